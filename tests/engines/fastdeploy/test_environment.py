"""What the engine's environment means here, and which release's ops are spoken: by what is installed, or as it says."""

import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.engines.fastdeploy import theirs
from tests.engines.fastdeploy.bus import save
from tests.engines.fastdeploy.engine import Steps
from tokenbus.engines.fastdeploy.environment import is_off, is_published, message_id, queue_id, queue_path, settings_for
from tokenbus.engines.fastdeploy.forms import FORMS, Installed, chosen, form_of, installed
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
    own_folder.mkdir() if is_folder else own_folder.touch(mode=0o600)
    own_folder.chmod(0o777 if is_folder else 0o600)
    with pytest.raises(SettingsError, match=r"^TMPDIR: a folder in which our subfolder belongs only to this user"):
        queue_path(settings_for({}), 1)


def test_switch_is_on_or_off() -> None:
    assert not is_off({})
    assert not is_off({"TOKENBUS_FASTDEPLOY": "on"})
    assert is_off({"TOKENBUS_FASTDEPLOY": " OFF "})
    with pytest.raises(SettingsError, match=r"^TOKENBUS_FASTDEPLOY: on or off, got 'of'$"):
        is_off({"TOKENBUS_FASTDEPLOY": "of"})


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
        ("2", "any number except 2, which means that nothing was read, got 2"),
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


SLOTS_READ = "columns = (field >> 16) & 0xFFFF\n"
FLAG_READ = "columns = field >> 8\n"


def install(folder: Path, version: str, reader: str) -> None:
    package = folder / "fastdeploy"
    (package / "output").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is only looked at')\n")
    (package / "output" / "token_processor.py").write_text(reader)
    written = f"fastdeploy version: 0.0.0\nPaddle version: 3.3.1\nfastdeploy version: {version}\n"
    (package / "version.txt").write_text(written if version else "Paddle version: 3.3.1\n")


@pytest.mark.parametrize(
    ("version", "reader", "form"),
    [
        ("2.4.0", "", "2.4"),
        ("2.5.0", "nothing is packed\n", "2.5"),
        ("2.6.0", "nothing is packed\n", "2.6-before-7861"),
        ("2.6.0", SLOTS_READ, "2.6-before-7884"),
        ("2.6.0", SLOTS_READ + FLAG_READ, "2.6"),
        ("2.6.3", "", "2.6"),
        ("2.6.0-dev", SLOTS_READ + FLAG_READ, "develop"),
        ("2.5.0.dev20260301", "nothing is packed\n", "2.5"),
        ("2.5.0-dev", SLOTS_READ + FLAG_READ, "develop"),
        ("2.9.0", "", "develop"),
        ("0.0.0", SLOTS_READ, "2.6-before-7884"),
        ("", SLOTS_READ + FLAG_READ, "develop"),
        ("2.5.1", SLOTS_READ + FLAG_READ, "2.5 as read"),
    ],
)
def test_installed_version_and_its_reader_say_which_form(
    version: str, reader: str, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, version, reader)
    monkeypatch.syspath_prepend(str(folder))
    found = chosen(environment={})
    assert found.name == form
    if reader:
        assert (found.packs_slots, found.packs_flag) == (SLOTS_READ in reader, FLAG_READ in reader)
    assert found.each_rank == form.startswith(("2.4", "2.5"))
    assert "fastdeploy" not in sys.modules


def test_unknown_version_is_taken_for_the_newest_or_what_it_reads_and_says_so() -> None:
    for version in ("2.7.0", "3.0", "2.3.0", "unknown"):
        said = f"unknown version {version} (known: 2.4, 2.5, 2.6)"
        assert form_of(Installed(version, (True, True))) == (FORMS["develop"], said, False)
        older = form_of(Installed(version, (True, False)))
        assert older == (FORMS["2.6-before-7884"], f"{said}, as its token processor reads", False)


def test_environment_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert chosen(environment={"TOKENBUS_FASTDEPLOY_FORM": " 2.5 "}) is FORMS["2.5"]
    assert 'FastDeploy form chosen form="2.5" reason="set" setting="TOKENBUS_FASTDEPLOY_FORM"' in caplog.text
    assert chosen("2.4", {"TOKENBUS_FASTDEPLOY_FORM": "2.5"}) is FORMS["2.4"]
    with pytest.raises(SettingsError) as refused:
        chosen(environment={"TOKENBUS_FASTDEPLOY_FORM": "2.3"})
    assert str(refused.value) == f"TOKENBUS_FASTDEPLOY_FORM: one of {', '.join(FORMS)}, got '2.3'"


def test_without_fastdeploy_the_newest_form_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed() is None
    monkeypatch.setitem(sys.modules, "fastdeploy", ModuleType("fastdeploy"))  # from no file
    assert installed() is None
    assert form_of(None) == (FORMS["develop"], "FastDeploy is not installed", True)


def test_table_is_that_of_the_oracle_and_of_the_page() -> None:
    assert tuple(FORMS) == theirs.FORMS
    page = (Path(__file__).resolve().parents[3] / "docs" / "fastdeploy.md").read_text()
    for form in FORMS.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{form.name}` |")]
        cells = [re.sub(r" \(#\d+\)", "", cell).strip() for cell in row.split("|")]
        assert cells[3:5] == ["yes" if packs else "no" for packs in (form.packs_slots, form.packs_flag)]
        assert cells[5] == "first-token ops" + ", speculative saves" * form.each_rank

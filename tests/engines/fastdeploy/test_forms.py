"""Which release's ops are spoken: by what is installed, by what the environment says, and in one line of the log."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.engines.fastdeploy import theirs
from tokenbus.engines.fastdeploy.forms import FORMS, Installed, chosen, form_of, installed
from tokenbus.settings import SettingsError

SLOTS_READ = "columns = (field >> 16) & 0xFFFF\n"
FLAG_READ = "columns = field >> 8\n"


def install(folder: Path, version: str, reader: str) -> None:
    """Lay out a FastDeploy as its wheel does: its version, and its token processor."""
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

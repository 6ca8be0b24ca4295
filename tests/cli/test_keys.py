"""`tokenbus keys`: files that only their owner reads, an allow-list, and errors of one line."""

import json
import os
from pathlib import Path

import pytest

from tokenbus.bus.allow_list import read_keys
from tokenbus.bus.keys import load_key
from tokenbus.cli import main

FILE = "keys/allowed.toml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENBUS_BUS_ALLOWED_KEYS", raising=False)
    before = os.umask(0)
    os.umask(before & 0o022)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_key_is_made_for_its_owner_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "keys", "make", "w0")
    assert (status, err) == (0, "")
    assert [Path(path).stat().st_mode & 0o777 for path in ("keys", "keys/w0.key_secret", "keys/w0.key")] == [
        0o700,
        0o600,
        0o644,
    ]
    pair = load_key("keys/w0.key_secret")
    assert pair.public.decode() in out
    assert pair.secret.decode() not in out + Path("keys/w0.key").read_text()
    assert sorted(path.name for path in Path("keys").iterdir()) == ["w0.key", "w0.key_secret"]


def test_key_is_never_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "keys", "make", "w0")
    before = Path("keys/w0.key_secret").read_text()
    assert said(capsys, "keys", "make", "w0") == (
        2,
        "",
        _complaint("keys/w0.key_secret: exists already; a key is never replaced"),
    )
    Path("keys/w0.key_secret").rename("keys/kept")
    assert said(capsys, "keys", "make", "w0")[0] == 2
    assert sorted(path.name for path in Path("keys").iterdir()) == ["kept", "w0.key"]
    assert Path("keys/kept").read_text() == before


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", "x" * 65, "new\nline"])
def test_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = said(capsys, "keys", "make", "--", name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "make: name: 1 to 64 letters" in err
    assert list(Path().iterdir()) == []


def test_life_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    """A key is added by its certificate's path or its text, listed, revoked by its name or itself, and stays listed.

    Of two keys of one name one can be revoked: so keys are rotated.
    """
    for name in ("w0", "g"):
        said(capsys, "keys", "make", name)
    added = said(capsys, "keys", "add", "w0", "keys/w0.key", "--role", "worker", "--names", "w0", "--names", "w-*")
    assert added == (0, f"added w0: worker as w0, w-* in {FILE}\n", "")
    text = load_key("keys/g.key_secret").public.decode()
    added = said(capsys, "keys", "add", "g", "--role", "client", "--role", "observer", "--", text)
    assert added == (0, f"added g: client, observer as g in {FILE}\n", "")
    status, out, _ = said(capsys, "keys", "list")
    assert (status, len(out.splitlines())) == (0, 2)
    assert text in out
    said(capsys, "keys", "make", "w0", "--folder", "next")
    said(capsys, "keys", "add", "w0", "next/w0.key", "--role", "worker")
    assert said(capsys, "keys", "revoke", "keys/w0.key") == (0, f"revoked w0: 1 key in {FILE}\n", "")
    assert [key.revoked is None for key in read_keys(Path(FILE))] == [False, True, True]
    assert said(capsys, "keys", "revoke", "w0") == (0, f"revoked w0: 1 key in {FILE}\n", "")
    assert said(capsys, "keys", "revoke", "keys/g.key") == (0, f"revoked g: 1 key in {FILE}\n", "")
    listed = json.loads(said(capsys, "keys", "list", "--json")[1])
    assert [(key["name"], key["roles"], key["names"], bool(key["revoked"])) for key in listed["keys"]] == [
        ("w0", ["worker"], ["w0", "w-*"], True),
        ("g", ["client", "observer"], ["g"], True),
        ("w0", ["worker"], ["w0"], True),
    ]


def test_revoked_key_does_not_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "keys", "make", "w0")
    add = ("keys", "add", "w0", "keys/w0.key", "--role", "worker")
    said(capsys, *add)
    assert said(capsys, *add) == (2, "", _complaint("add: this key is in the list already: revoke it first, as w0"))
    said(capsys, "keys", "revoke", "w0")
    assert said(capsys, *add) == (2, "", _complaint("add: this key was revoked: make a new one, as w0"))
    assert said(capsys, "keys", "revoke", "w0") == (2, "", _complaint("revoke: revoked already: 'w0'"))


def test_file_is_the_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the one that is named, else the one that the processor's variable names."""
    said(capsys, "keys", "make", "w0")
    monkeypatch.setenv("TOKENBUS_BUS_ALLOWED_KEYS", "by-variable.toml")
    said(capsys, "keys", "add", "w0", "keys/w0.key", "--role", "worker")
    said(capsys, "keys", "add", "w0", "keys/w0.key", "--role", "worker", "--file", "by-option.toml")
    assert {path.name for path in Path().glob("*.toml")} == {"by-variable.toml", "by-option.toml"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("add", "w0", "none.key", "--role", "worker"), "add: PUBLIC: a public key of 40 characters, or the path"),
        (("add", "w 0", "keys/w0.key", "--role", "worker"), "add: name: 1 to 64 letters"),
        (("add", "w0", "keys/w0.key", "--role", "worker", "--names", ""), "add: names: patterns of 1 to 64 bytes"),
        (("revoke", "w0"), "revoke: no such key: 'w0'"),
        (("list",), f"{FILE}: no such file or directory"),
        (("list", "--file", "broken.toml"), "broken.toml: "),
        (("add", "w0", "keys/w0.key", "--role", "worker", "--file", "broken.toml"), "broken.toml: "),
        (("add", "w0", "keys/w0.key", "--role", "worker", "--file", "none/a.toml"), "none: no such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str) -> None:
    said(capsys, "keys", "make", "w0")
    Path("broken.toml").write_text("[[key]")
    status, out, err = said(capsys, "keys", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"tokenbus: {line}")
    assert Path("broken.toml").read_text() == "[[key]"
    assert not Path(FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("make",), "keys make: error: the following arguments are required: NAME"),
        (("make", "w0", "--role", "worker"), "error: unrecognized arguments: --role worker"),
        (("add", "w0"), "keys add: error: the following arguments are required: PUBLIC, --role"),
        (("revoke", "w0", "w1"), "error: unrecognized arguments: w1"),
        (("list", "w0"), "error: unrecognized arguments: w0"),
    ],
)
def test_actions_have_arguments_of_their_own(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    status, out, err = said(capsys, "keys", *arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith(line)


def _complaint(line: str) -> str:
    return f"tokenbus: {line}\n"

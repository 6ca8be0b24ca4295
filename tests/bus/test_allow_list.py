"""The allow-list's file: what may stand in it, what is refused with its place, and that it is never half written."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import zmq

from tokenbus.bus import Identity, Role
from tokenbus.bus.allow_list import AllowedKey, AllowList, AllowListError, new_key, read_keys, write_keys
from tokenbus.bus.watched_files import locked
from tokenbus.settings import SettingsError

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""A key in Z85, the example of ZeroMQ's RFC."""


def public() -> str:
    return zmq.curve_keypair()[0].decode()


def line(name: str = "w0", **fields: object) -> str:
    entry = {"name": f'"{name}"', "public": f'"{KEY}"', "roles": '["worker"]', "names": '["*"]'} | fields
    return "\n".join(["[[key]]", *(f"{key} = {value}" for key, value in entry.items() if value is not None), ""])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "allowed.toml"
    first = new_key("w0", public(), ["worker", "observer"], ["w-*", 'odd "\\ é', "[ab]?"])
    second = replace(new_key("g", public(), ["client"], ["g"]), revoked=datetime(2026, 1, 2, tzinfo=timezone.utc))
    write_keys(file, [first, second])
    assert read_keys(file) == [first, second]
    assert file.stat().st_mode & 0o777 == 0o644
    allowed = AllowList(str(file))
    expected = Identity("w0", frozenset({Role.WORKER, Role.OBSERVER}), ("w-*", 'odd "\\ é', "[ab]?"), first.public)
    assert allowed.find(first.public) == expected
    assert allowed.find(second.public) is None


def test_role_that_is_not_listed_is_not_had() -> None:
    worker = Identity("w0", frozenset({Role.WORKER}), ("w-*",))
    assert [role for role in Role if worker.may(role)] == [Role.WORKER]
    assert [name for name in ("w-1", "w0", "x") if worker.may(Role.WORKER, name)] == ["w-1"]
    assert not worker.may(Role.CLIENT, "w-1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[key", "expected"),
        ("keys = 1", "tables [[key]] and nothing else, got 'keys'"),
        ("key = 1", "tables [[key]] and nothing else"),
        ("key = [1]", "key 1: a table"),
        (line(name="-w"), "key 1: name: 1 to 64 letters"),
        (line() + line("w1", public='"short"'), "key 2: public: a public key of 40 characters, got 'short'"),
        (line() + line("w1"), "key 2: public: one entry each"),
        (line(public='"/etc/passwd"'), "key 1: public: a public key of 40 characters"),
        (line(roles='["king"]'), "key 1: roles: of worker, client, observer, operator, prompts, got 'king'"),
        (line(roles="[]"), "key 1: roles: a list of 1 to 5 texts, got []"),
        (line(roles='"worker"'), "key 1: roles: a list of 1 to 5 texts"),
        (line(roles=None, role='["worker"]'), "key 1: no such field: 'role'"),
        (line(names=None), "key 1: names: a list of 1 to 64 texts, got None"),
        (line(names='["' + "x" * 65 + '"]'), "key 1: names: patterns of 1 to 64 bytes"),
        (line(names='[""]'), "key 1: names: patterns of 1 to 64 bytes, got ''"),
        (line(revoked='"yes"'), "key 1: revoked: a date and a time, got 'yes'"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "allowed.toml"
    file.write_text(text)
    with pytest.raises(AllowListError) as refused:
        read_keys(file)
    assert reason.lower() in str(refused.value).lower()
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)
    with pytest.raises(SettingsError, match=r"bus\.allowed_keys: a file of allowed keys"):
        AllowList(str(file))


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "allowed.toml"
    file.write_text(line())
    file.chmod(mode)
    with pytest.raises(AllowListError, match="a file that only its owner may write"):
        read_keys(file)


def test_missing_and_too_large_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AllowListError, match="no such file"):
        read_keys(tmp_path / "none")
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(2**24 + 1)
    with pytest.raises(AllowListError, match="at most 16777216 bytes"):
        read_keys(file)


def test_it_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "allowed.toml"
    key = new_key("w0", public(), ["worker"], ["*"])
    write_keys(file, [])
    allowed = AllowList(str(file))
    allowed.refresh()
    assert (allowed.version, allowed.find(key.public)) == (0, None)
    write_keys(file, [key])
    allowed.refresh()
    allowed.refresh()
    assert allowed.version == 1
    assert allowed.find(key.public) == key.identity
    with file.open("a") as appended:
        appended.write(line("w1"))  # another key than that of w0
    allowed.refresh()
    assert allowed.version == 2


def test_writers_take_turns_and_readers_see_whole_files(tmp_path: Path) -> None:
    file = tmp_path / "allowed.toml"
    write_keys(file, [])

    def add(number: int) -> None:
        with locked(file):
            write_keys(file, [*read_keys(file), new_key(f"w{number}", public(), ["worker"], ["*"])])

    def look(_number: int) -> list[AllowedKey]:
        return read_keys(file)

    with ThreadPoolExecutor(8) as pool:
        adding, looking = pool.map(add, range(40)), pool.map(look, range(200))
        assert list(adding) == [None] * 40
        sizes = [len(keys) for keys in looking]
    assert max(sizes) <= 40
    assert sorted(key.identity.name for key in read_keys(file)) == sorted(f"w{number}" for number in range(40))
    assert [path.name for path in tmp_path.iterdir()] == ["allowed.toml"]


def test_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "allowed.toml"
    key = new_key("w0", public(), ["worker"], ["*"])
    write_keys(file, [key])
    with pytest.raises(AttributeError):
        write_keys(file, [key, None])  # type: ignore[list-item]
    assert read_keys(file) == [key]
    assert [path.name for path in tmp_path.iterdir()] == ["allowed.toml"]

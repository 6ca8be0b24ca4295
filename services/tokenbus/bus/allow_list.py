"""AllowList: the keys that may connect, with their roles and names."""

import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from zmq.utils import z85

from tokenbus.backports import tomllib
from tokenbus.bus.transport import Identity, Role
from tokenbus.bus.watched_files import WatchedFiles, replace_file
from tokenbus.errors import UsageError
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.printable import reason_of
from tokenbus.settings import SettingsError

KEY_BYTES = 32
KEY_LENGTH = 40
"""Length of a Z85 key in characters."""
MOST_PATTERNS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_KEYS = 65_536
_MOST_BYTES = 2**24
_LONGEST_PATTERN = 64
_MODE = 0o644
_FIELDS = {"name", "public", "roles", "names", "added", "revoked"}
_HEAD = "# The keys that may connect. `tokenbus keys` writes this file; listeners reload it when it changes.\n"
_log = logger("bus")


def checked_name(name: object) -> str:
    """Return the name of a key if it is valid; raises ValueError otherwise. The files of the key have the same name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        limit = "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        raise ValueError(f"name: {limit}, got {name!r}")
    return name


@dataclass(frozen=True, slots=True)
class AllowedKey:
    """One entry of the allow-list; several keys may have the same name, for example during a key rotation."""

    public: str  # in Z85
    identity: Identity
    added: datetime
    revoked: datetime | None = None


class AllowListError(UsageError, ValueError):
    """An allow-list is invalid; the message names the entry, the limit and the value."""


class AllowList:
    """The allow-list of a listening process, reloaded when the file changes.

    If the new file is unreadable, the last valid list stays in force.
    """

    def __init__(self, path: str) -> None:
        """Read the file; raises SettingsError for `bus.allowed_keys` if the file is invalid."""
        self.path = Path(path)
        self.version = 0
        self._files = WatchedFiles([self.path])
        self._repeated_log = DeduplicatedLog()
        self._lock = threading.Lock()
        try:
            self._read()
        except AllowListError as error:
            raise SettingsError("bus.allowed_keys", f"a file of allowed keys: {error}", path) from None

    def find(self, public: str) -> Identity | None:
        """Return a key's identity, or None if the key is not allowed or was revoked."""
        return self._identities.get(public)

    def refresh(self) -> None:
        """Reload the file if it has changed; any thread may call this."""
        with self._lock:
            self._repeated_log.expire()
            try:
                if self._files.refresh(self._read):
                    self.version += 1
                    _log.info("allowed keys read again", file=str(self.path), keys=len(self._identities))
            except AllowListError as error:
                event = "allowed keys cannot be read: the last good ones stay"
                self._repeated_log.begin(str(error), _log.error, event, reason=str(error))

    def _read(self) -> None:
        self._identities = {key.public: key.identity for key in read_keys(self.path) if key.revoked is None}


def read_keys(path: Path) -> list[AllowedKey]:
    """Return the keys in a file, including revoked keys; raises AllowListError if the file is invalid."""
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(_MOST_BYTES + 1)
        document = tomllib.loads(data.decode()) if len(data) <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError) as error:
        raise AllowListError(f"{path}: {reason_of(error)}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AllowListError(f"{path}: a file that only its owner may write (chmod 644)")
    if len(data) > _MOST_BYTES:
        raise AllowListError(f"{path}: at most {_MOST_BYTES} bytes")
    entries = document.pop("key", [])
    if document or not isinstance(entries, list):
        raise AllowListError(f"{path}: tables [[key]] and nothing else, got {', '.join(map(repr, document)) or 'key'}")
    if len(entries) > _MOST_KEYS:
        raise AllowListError(f"{path}: at most {_MOST_KEYS} keys, got {len(entries)}")
    found: dict[str, AllowedKey] = {}
    for number, entry in enumerate(entries, 1):
        try:
            key = _parsed(entry)
        except (ValueError, TypeError) as error:
            raise AllowListError(f"{path}: key {number}: {error}") from None
        if key.public in found:
            raise AllowListError(f"{path}: key {number}: public: one entry each, got {key.public} twice")
        found[key.public] = key
    return list(found.values())


def write_keys(path: Path, keys: Iterable[AllowedKey]) -> None:
    replace_file(path, _HEAD + "".join(_text(key) for key in keys), _MODE)


def new_key(name: str, public: str, roles: Iterable[str], names: Iterable[str]) -> AllowedKey:
    """Return an entry for a key that is allowed from now on; raises ValueError for an invalid field."""
    now = datetime.now(timezone.utc).replace(microsecond=0)
    return _parsed({"name": name, "public": public, "roles": list(roles), "names": list(names), "added": now})


def is_key(text: bytes) -> bool:
    try:
        return len(text) == KEY_LENGTH and len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError):
        return False


def _parsed(entry: object) -> AllowedKey:
    if not isinstance(entry, Mapping):
        raise TypeError("a table")
    if unknown := sorted(entry.keys() - _FIELDS):
        raise ValueError(f"no such field: {unknown[0]!r}; there are {', '.join(sorted(_FIELDS))}")
    name, public = checked_name(entry.get("name")), entry.get("public")
    if not isinstance(public, str) or not is_key(public.encode()):
        raise ValueError(f"public: a public key of 40 characters, got {public!r}")
    roles = _texts(entry, "roles", len(Role))
    if wrong := [role for role in roles if role not in set(Role)]:
        raise ValueError(f"roles: of {', '.join(Role)}, got {wrong[0]!r}")
    names = _texts(entry, "names", MOST_PATTERNS)
    for pattern in names:
        if not pattern or not pattern.isprintable() or len(pattern.encode()) > _LONGEST_PATTERN:
            raise ValueError(f"names: patterns of 1 to {_LONGEST_PATTERN} bytes, got {pattern!r}")
    return AllowedKey(
        public,
        Identity(name, frozenset(Role(role) for role in roles), tuple(names), public),
        _moment(entry, "added") or datetime.fromtimestamp(0, timezone.utc),
        _moment(entry, "revoked"),
    )


def _texts(entry: Mapping[str, object], name: str, most: int) -> list[str]:
    value = entry.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or not 1 <= len(value) <= most:
        raise ValueError(f"{name}: a list of 1 to {most} texts, got {value!r}")
    return value


def _moment(entry: Mapping[str, object], name: str) -> datetime | None:
    value = entry.get(name)
    if value is not None and not isinstance(value, datetime):
        raise ValueError(f"{name}: a date and a time, got {value!r}")
    return value


def _text(key: AllowedKey) -> str:
    identity = key.identity
    lines = [
        "",
        "[[key]]",
        f"name = {json.dumps(identity.name)}",
        f"public = {json.dumps(key.public)}",
        f"roles = {json.dumps(sorted(identity.roles))}",
        f"names = {json.dumps(list(identity.names), ensure_ascii=False)}",
        f"added = {key.added.isoformat()}",
    ]
    if key.revoked is not None:
        lines.append(f"revoked = {key.revoked.isoformat()}")
    return "\n".join([*lines, ""])

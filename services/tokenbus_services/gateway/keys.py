"""API keys: a file of their hashes, which the command line writes and the gateway reads again when it changes.

A key is 256 random bits, so its SHA-256 says nothing about it: a slow hash, as for passwords, would only be slow. The
hashes are compared in constant time, each with each, so that no answer's time says how near a guess was.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

from tokenbus_services.settings.errors import shown
from tokenbus_services.settings.gateway import MOST_REQUESTS_PER_MINUTE, ORIGIN_FORM, is_origin

MOST_KEYS = 1024
_MOST_BYTES = 2**20
_PREFIX = "tb-"
_RANDOM_BYTES = 32
_VERSION = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_CONCURRENT = 2**31 - 1


class KeysError(Exception):
    """A file of keys, or one of its keys, is not as it must be; the line says what, where and what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it is kept: who it is for, what it hashes to, and what it may."""

    id: str
    sha256: str
    added: str
    """When, in UTC."""
    requests_per_minute: int | None = None
    """None: as gateway.key_requests_per_minute says."""
    concurrent: int | None = None
    """The most open requests; None: as gateway.key_share says."""
    origins: tuple[str, ...] = ()
    """The origins of web pages that it is for; none: those of gateway.origins."""

    def __post_init__(self) -> None:
        """Raise a KeysError for what no key has."""
        _check("id", "1 to 64 letters, digits and _ . @ -", self.id, _ID.fullmatch(_text(self.id)))
        _check("sha256", "64 hexadecimal digits", self.sha256, _DIGEST.fullmatch(_text(self.sha256)))
        _check("added", "a time", self.added, 1 <= len(_text(self.added)) <= 64)  # noqa: PLR2004 - far above any
        _check_whole("requests_per_minute", self.requests_per_minute, MOST_REQUESTS_PER_MINUTE)
        _check_whole("concurrent", self.concurrent, _MOST_CONCURRENT)
        for origin in self.origins:
            _check("origins", ORIGIN_FORM, origin, is_origin(_text(origin)))


def made(key_id: str, **limits: Any) -> tuple[str, ApiKey]:  # noqa: ANN401 - the fields of a key
    """Return a new key in clear, which is kept nowhere, and as it is kept."""
    clear = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return clear, ApiKey(id=key_id, sha256=digest(clear), added=now, **limits)


def digest(clear: str) -> str:
    """Return what a key hashes to."""
    return sha256(clear.encode("utf-8", "surrogateescape")).hexdigest()


def found(keys: Iterable[ApiKey], clear: str) -> ApiKey | None:
    """Return the key that a text is, in the same time whatever it is."""
    wanted = digest(clear)
    which = None
    for key in keys:
        if compare_digest(key.sha256, wanted):
            which = key
    return which


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file, none where there is no file, or raise a KeysError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise KeysError((getattr(error, "strerror", None) or str(error)).lower()) from None
    if len(data) > _MOST_BYTES:
        raise KeysError(f"at most {_MOST_BYTES} bytes, got more")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KeysError(f"JSON, got an error: {error}") from None
    if not isinstance(content, dict) or content.get("version") != _VERSION or not isinstance(content.get("keys"), list):
        raise KeysError(f"an object with version {_VERSION} and a list of keys, got {shown(content)}")
    return _checked([_key(each, f"keys[{place}]") for place, each in enumerate(content["keys"])])


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Put keys in the place of those that a file has, at once, readable by its owner alone."""
    content = {"version": _VERSION, "keys": [asdict(key) for key in _checked(keys)]}
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # made with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let no other command change the file meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _checked(keys: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    if len(keys) > MOST_KEYS:
        raise KeysError(f"at most {MOST_KEYS} keys, got {len(keys)}")
    ids = [key.id for key in keys]
    for place, each in enumerate(ids):
        if each in ids[:place]:
            raise KeysError(f"keys[{place}].id: an id that no other key has, got {each!r}")
    return tuple(keys)


def _key(values: Any, where: str) -> ApiKey:  # noqa: ANN401 - JSON
    if not isinstance(values, dict):
        raise KeysError(f"{where}: an object, got {shown(values)}")
    try:
        origins = values.get("origins", ())
        _check("origins", "a list", origins, isinstance(origins, list | tuple))
        return ApiKey(**{**values, "origins": tuple(origins)})
    except KeysError as error:
        raise KeysError(f"{where}.{error}") from None
    except TypeError:
        raise KeysError(f"{where}: the fields of a key, got {shown(sorted(values))}") from None


def _check(name: str, limit: str, value: object, holds: object) -> None:
    if not holds:
        raise KeysError(f"{name}: {limit}, got {shown(value)}")


def _check_whole(name: str, value: int | None, most: int) -> None:
    holds = value is None or (type(value) is int and 1 <= value <= most)
    _check(name, f"a whole number from 1 to {most}", value, holds)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""

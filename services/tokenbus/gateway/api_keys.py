"""API keys: the file of hashed keys, and the rate and concurrency limits of the callers.

SHA-256 is enough, because a key has 256 random bits and needs no slow hash as passwords do. A hash is compared with
those of all keys in constant time, so that timing reveals nothing about a guess.
"""

import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

from tokenbus.bus.watched_files import WatchedFiles, locked, replace_file
from tokenbus.gateway.errors import ApiError
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import GatewaySettings, SettingsError
from tokenbus.settings.errors import Shown, shown
from tokenbus.settings.sections import MOST_REQUESTS_PER_MINUTE, ORIGIN_FORM, is_origin

MOST_KEYS = 1024
_MOST_BYTES = 2**20
_PREFIX = "tb-"
_RANDOM_BYTES = 32
_VERSION = 1
_MODE = 0o600
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_CONCURRENT = 2**31 - 1
_MINUTE = 60.0
_log = logger("gateway")


class KeysError(Exception):
    """A file of keys is invalid. The message is one line with the key, the limit and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key: its id, its hash and its limits."""

    id: str
    sha256: str
    added: str
    requests_per_minute: int | None = None
    concurrent: int | None = None
    """Maximum number of open requests, or None for gateway.max_requests times gateway.key_share."""
    origins: tuple[str, ...] = ()
    """Origins of the web pages that may use the key. If empty, gateway.origins applies."""
    operator: bool = False

    def __post_init__(self) -> None:
        _check("id", "1 to 64 letters, digits and _ . @ -", self.id, _ID.fullmatch(_text(self.id)))
        _check("sha256", "64 hexadecimal digits", self.sha256, _DIGEST.fullmatch(_text(self.sha256)))
        _check("added", "a time", self.added, 1 <= len(_text(self.added)) <= 64)  # noqa: PLR2004 - far above any
        for name, most in (("requests_per_minute", MOST_REQUESTS_PER_MINUTE), ("concurrent", _MOST_CONCURRENT)):
            value = getattr(self, name)
            holds = value is None or (type(value) is int and 1 <= value <= most)
            _check(name, f"a whole number from 1 to {most}", value, holds)
        _check("operator", "true or false", self.operator, isinstance(self.operator, bool))
        for origin in self.origins:
            _check("origins", ORIGIN_FORM, origin, is_origin(_text(origin)))


def made(key_id: str, **limits: Any) -> tuple[str, ApiKey]:  # noqa: ANN401 - the fields of a key
    """Return the plain text of a new key, which must not be stored, and its stored form."""
    clear = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return clear, ApiKey(id=key_id, sha256=digest(clear), added=now, **limits)


def digest(clear: str) -> str:
    return sha256(clear.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
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
    return _checked([_key(each, f"keys[{index}]") for index, each in enumerate(content["keys"])])


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    content = {"version": _VERSION, "keys": [asdict(key) for key in _checked(keys)]}
    replace_file(path, json.dumps(content, indent=2) + "\n", _MODE)


def alone(path: Path) -> AbstractContextManager[None]:
    """Lock the file of keys against other commands during the `with` block."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return locked(path)


def _checked(keys: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    if len(keys) > MOST_KEYS:
        raise KeysError(f"at most {MOST_KEYS} keys, got {len(keys)}")
    ids = [key.id for key in keys]
    for index, each in enumerate(ids):
        if each in ids[:index]:
            raise KeysError(f"keys[{index}].id: an id that no other key has, got {each!r}")
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _tenant_of(key_id: str) -> int:
    return int.from_bytes(blake2b(key_id.encode(), digest_size=8).digest(), "little") or 1


class Caller:
    """The open requests and the token bucket of all clients that share a key, or of all clients without a key."""

    def __init__(self, key: ApiKey | None, settings: GatewaySettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._has_others = bool(settings.keys_file)
        """Whether the gateway has keys. Without keys only the gateway's limit on open requests applies."""
        self._open: set[int] = set()
        self._now = now
        self._left: float | None = None
        """Number of tokens in the token bucket at `_left_at`, or None before the bucket's first use."""
        self._left_at = 0.0
        self.update(key)

    def update(self, key: ApiKey | None) -> None:
        """Replace the key and its limits by the new version from the file."""
        settings = self._settings
        self.key = key
        self.name = "" if key is None else key.id
        self.tenant = 0 if key is None else _tenant_of(key.id)
        """The number that separates this key's sessions from those of other keys, or 0 without a key."""
        self._most = settings.max_requests
        self.per_minute = settings.key_requests_per_minute
        if self._has_others:
            self._most = max(1, math.floor(settings.max_requests * settings.key_share))
        if key is not None:
            self._most = min(settings.max_requests, key.concurrent or self._most)
            self.per_minute = key.requests_per_minute or self.per_minute

    def admit(self) -> None:
        """Charge one request to the rate limit. Above the limit, raises an ApiError with the time to wait."""
        if not self.per_minute:
            return
        left = self._refilled()
        if left < 1:
            wait_ms = math.ceil((1 - left) * _MINUTE * 1000 / self.per_minute)
            message = f"requests of {self._name}: at most {self.per_minute} a minute, got one more"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_ms=wait_ms)
        self._left = left - 1

    def limits(self) -> Mapping[str, str]:
        if not self.per_minute:
            return {}
        left = self._refilled()
        full_ms = math.ceil((self.per_minute - left) * _MINUTE * 1000 / self.per_minute)
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(math.floor(left)),
            "x-ratelimit-reset-requests": f"{full_ms}ms",
        }

    def check_room(self, count: int) -> None:
        opened = len(self._open)
        if not self._has_others or opened + count <= self._most:
            return
        if count > self._most:
            message = f"n: at most {self._most} choices of {self._name}, got {count}"
            raise ApiError(400, message, param="n", code="invalid_value")
        message = f"open requests of {self._name}: at most {self._most}, got {opened} and {count} more"
        raise ApiError(429, message, code="concurrency_limit_exceeded", retry_after_ms=self._settings.retry_after_ms)

    def open(self, request_ids: Sequence[int]) -> None:
        self._open.update(request_ids)

    def closed(self, request_id: int) -> None:
        """Stop counting a request that has ended on the bus. An abort needs some time to end a request there."""
        self._open.discard(request_id)

    @property
    def _name(self) -> str:
        return f"the key {self.name}" if self.name else "clients without a key"

    def _refilled(self) -> float:
        now, most = self._now(), float(self.per_minute)
        left = most if self._left is None else min(most, self._left + (now - self._left_at) * most / _MINUTE)
        self._left, self._left_at = left, now
        return left


class Callers:
    """The callers of all keys, by the hash of the key."""

    def __init__(self, settings: GatewaySettings, repeated_log: DeduplicatedLog) -> None:
        self._settings = settings
        self._by_hash: dict[str, Caller] = {}
        self._repeated_log = repeated_log
        self._path = Path(settings.keys_file)
        self.files = WatchedFiles([self._path] if settings.keys_file else [])
        self.anonymous = Caller(None, settings, time.monotonic)
        self.on_revoked: Callable[[Caller], None] = lambda _: None
        try:
            self._take(read_keys(self._path) if settings.keys_file else ())
        except KeysError as error:
            raise SettingsError(
                "gateway.keys_file", f"a file of keys: {settings.keys_file}: {error}", Shown("")
            ) from None
        if settings.keys_file and not self._by_hash:
            _log.warning("no API keys yet", keys_file=settings.keys_file)

    @property
    def are_asked(self) -> bool:
        return bool(self._settings.keys_file)

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(origin for caller in self._by_hash.values() if caller.key for origin in caller.key.origins)

    def find(self, clear: str) -> Caller | None:
        """Return the caller of a key, or None if the key is unknown. The comparison takes constant time."""
        wanted = digest(clear)
        matches = [caller for known, caller in self._by_hash.items() if compare_digest(known, wanted)]
        return matches[0] if matches else None

    def refresh(self) -> None:
        try:
            if self.files.refresh(lambda: self._take(read_keys(self._path))):
                _log.info("API keys read", keys=len(self._by_hash))
        except KeysError as error:
            self._repeated_log.begin(str(error), _log.error, "API keys cannot be read", reason=str(error))

    def _take(self, keys: Sequence[ApiKey]) -> None:
        before, self._by_hash = self._by_hash, {}
        for key in keys:
            caller = before.pop(key.sha256, None)
            if caller is None:
                caller = Caller(key, self._settings, time.monotonic)
            else:  # keep the caller, because it counts the open requests
                caller.update(key)
            self._by_hash[key.sha256] = caller
        for caller in before.values():
            self.on_revoked(caller)

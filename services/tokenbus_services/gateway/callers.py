"""Callers: who asks, by its API key, and how much of the gateway it may have at once and in a minute."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.gateway.keys import ApiKey, KeysError, found, read_keys
from tokenbus_services.gateway.watched import WatchedFiles
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.settings import GatewaySettings, SettingsError
from tokenbus_services.settings.errors import Shown

_log = logger("gateway")
_MINUTE = 60.0


class Caller:
    """One key, or all clients that need none: its open requests, and a token bucket for new ones."""

    def __init__(self, key: ApiKey | None, settings: GatewaySettings, now: Callable[[], float]) -> None:
        """Take the key, if it is one, the defaults, and the clock in seconds."""
        self.key = key
        self.name = "" if key is None else key.id
        self._most = settings.max_requests
        self._has_others = bool(settings.keys_file)
        """Whether there are others who want room, too: else the gateway's own bound is all."""
        self.per_minute = settings.key_requests_per_minute
        if self._has_others:
            self._most = max(1, math.floor(settings.max_requests * settings.key_share))
        if key is not None:
            self._most = min(settings.max_requests, key.concurrent or self._most)
            self.per_minute = key.requests_per_minute or self.per_minute
        self._retry_after_ms = settings.retry_after_ms
        self._open: set[int] = set()
        self._now = now
        self._left = float(self.per_minute)
        self._left_at = now()

    def take_over(self, other: "Caller") -> None:
        """Go on from the same key with other limits: what it has open still counts."""
        self._open = other._open  # noqa: SLF001 - its own class

    def admit(self) -> None:
        """Count one more request over HTTP, or raise an ApiError that says after how long there is room for it."""
        if not self.per_minute:
            return
        self._refill()
        if self._left < 1:
            wait_ms = math.ceil((1 - self._left) * _MINUTE * 1000 / self.per_minute)
            message = f"requests of {self._who}: at most {self.per_minute} a minute, got one more"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_ms=wait_ms)
        self._left -= 1

    def limits(self) -> Mapping[str, str]:
        """Return what OpenAI's answers say of the requests that are left."""
        if not self.per_minute:
            return {}
        self._refill()
        full_ms = math.ceil((self.per_minute - self._left) * _MINUTE * 1000 / self.per_minute)
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(math.floor(self._left)),
            "x-ratelimit-reset-requests": f"{full_ms}ms",
        }

    def check_room(self, count: int) -> None:
        """Raise an ApiError if it may not have so many more requests open."""
        if len(self._open) + count <= self._most or not self._has_others:
            return
        if count > self._most:
            message = f"n: at most {self._most} choices of {self._who}, got {count}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if len(self._open) + count > self._most:
            message = f"open requests of {self._who}: at most {self._most}, got {len(self._open)} and {count} more"
            raise ApiError(429, message, code="concurrency_limit_exceeded", retry_after_ms=self._retry_after_ms)

    @property
    def open_requests(self) -> int:
        """How many of its requests the bus has not ended."""
        return len(self._open)

    def opened(self, request_id: int) -> None:
        """Count a request until the bus has ended it."""
        self._open.add(request_id)

    def closed(self, request_id: int) -> None:
        """Count a request no more: the bus has ended it, which for one that was aborted is some time later."""
        self._open.discard(request_id)

    @property
    def _who(self) -> str:
        return f"the key {self.name}" if self.name else "clients without a key"

    def _refill(self) -> None:
        now = self._now()
        self._left = min(float(self.per_minute), self._left + (now - self._left_at) * self.per_minute / _MINUTE)
        self._left_at = now


class Callers:
    """All keys that are known, and what each of them does just now."""

    def __init__(self, settings: GatewaySettings, now: Callable[[], float] = time.monotonic) -> None:
        """Read the file of keys; a SettingsError says why it cannot be used."""
        self._settings = settings
        self._now = now
        self._by_hash: dict[str, Caller] = {}
        self._repeated_log = DeduplicatedLog()
        self._path = Path(settings.keys_file)
        self._files = WatchedFiles([self._path] if settings.keys_file else [])
        self.anonymous = Caller(None, settings, now)
        self.on_revoked: Callable[[Caller], None] = _nothing
        """Called with a key that is no longer known."""
        self.is_unread = False
        """Whether the file has changed and cannot be read: what was known before holds."""
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
        """Whether clients need a key."""
        return bool(self._settings.keys_file)

    @property
    def origins(self) -> frozenset[str]:
        """The origins of all keys."""
        return frozenset(origin for caller in self._by_hash.values() if caller.key for origin in caller.key.origins)

    def find(self, clear: str) -> Caller | None:
        """Return whose key a text is."""
        key = found([caller.key for caller in self._by_hash.values() if caller.key is not None], clear)
        return None if key is None else self._by_hash.get(key.sha256)

    def look(self) -> None:
        """Read the file again if it has changed; it is to be called now and then."""
        self._repeated_log.expire()
        if not self._files.changed():
            return
        try:
            keys = read_keys(self._path)
        except KeysError as error:
            self.is_unread = True
            self._repeated_log.begin("keys", _log.error, "API keys cannot be read", reason=str(error))
            return
        self.is_unread = False
        self._take(keys)
        _log.info("API keys read", keys=len(keys))

    def _take(self, keys: Sequence[ApiKey]) -> None:
        before, self._by_hash = self._by_hash, {}
        for key in keys:
            known = before.pop(key.sha256, None)
            caller = known if known is not None and known.key == key else Caller(key, self._settings, self._now)
            if known is not None and caller is not known:
                caller.take_over(known)
            self._by_hash[key.sha256] = caller
        for caller in before.values():
            self.on_revoked(caller)


def _nothing(_caller: Caller) -> None:
    """What a key had open was not known yet."""

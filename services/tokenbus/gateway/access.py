"""Access: middleware that counts requests, and checks the Host, the Origin, the API key and the key's limits."""

import ipaddress
import re
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenbus.gateway.api_keys import Caller
from tokenbus.gateway.connection import host_of
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.gateway import Gateway
from tokenbus.gateway.response import RAW_SEND, error_response
from tokenbus.logs import logger
from tokenbus.settings.sections import listed

_log = logger("gateway")
_EXTENSION = "tokenbus.visitor"
_OPEN_TO_ALL = frozenset({"/", "/healthz", "/readyz", "/health", "/ping", "/version"})
_OPEN_FOLDER = "/page/"
_INSIDE = frozenset({"/bus", "/inspect", "/load", "/metrics", "/openapi.json"})
"""Paths that only clients with a key or on this machine may use, even if the gateway has no keys."""
_SESSIONS = "/sessions/"
"""Prefix of the paths that need a key or, if the gateway has no keys, a client on this machine."""
_READING = ("GET", "HEAD")
_ANY = "*"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_FORWARDING = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
"""Headers that proxies set. A request with such a header may come from a client on another machine."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9 ,_-]*")
_PREFLIGHT_SECONDS = 600
_EXPOSED = "retry-after, retry-after-ms, x-request-id, " + ", ".join(
    f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")
)


@dataclass(frozen=True, slots=True)
class Visitor:
    """The client of a request."""

    caller: Caller
    is_known: bool
    """Whether the client has a key or is on this machine. Other clients see no details of the gateway's health."""


def visitor_of(scope: Scope) -> Visitor:
    visitor: Visitor = scope["extensions"][_EXTENSION]
    return visitor


def owner_of(scope: Scope) -> str:
    """Return the name under which a client takes turns: the name of its key, or else its machine."""
    return visitor_of(scope).caller.name or _peer(scope)


class Access:
    """Middleware that refuses a request before its body is read."""

    def __init__(self, app: ASGIApp, gateway: Gateway, paths: AbstractSet[str], token_routes: AbstractSet[str]) -> None:
        settings = gateway.settings.gateway
        self._paths = paths
        """Paths whose requests are counted separately. Clients may send any path, so the other paths share a count."""
        self._token_routes = token_routes
        """Paths whose POST requests count towards a key's rate limit, as do reads of sessions."""
        self._app = app
        self._callers = gateway.callers
        self._counts = gateway.counts
        self._names_all = settings.request_id_headers
        self._hosts = _LOOPBACK_NAMES | set(listed(settings.hosts)) | {host_of(settings.address)}
        self._origins = frozenset(listed(settings.origins))
        self._repeated_log = gateway.repeated_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        route = path if path in self._paths else "/page" if path.startswith(_OPEN_FOLDER) else "other"
        added: dict[str, str] = {}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.requests[route, str(message["status"])] += 1
                answered = MutableHeaders(raw=message["headers"])
                answered.update(added)
                if self._names_all:
                    answered.setdefault("x-request-id", headers.get("x-request-id") or uuid.uuid4().hex)
            await send(message)

        # The chunks of an answer bypass this middleware, which needs only the start of a response.
        extensions = scope.setdefault("extensions", {})
        extensions[RAW_SEND] = send
        try:
            answer = self._admit(scope, headers, added) or self._app
        except ApiError as error:
            answer = error_response(error, path)
        try:
            await answer(scope, receive, sending)
        finally:
            del extensions[RAW_SEND]  # break the cycle: `send` refers to the scope

    def _admit(self, scope: Scope, headers: Headers, added: dict[str, str]) -> Response | None:
        """Check a request. Return the response to a CORS preflight, or None for other requests. Raises an ApiError."""
        host = headers.get("host", "")
        is_own = self._is_own(scope, host)
        if not (is_own or self._callers.are_asked):
            names = "localhost, the gateway's address or one of gateway.hosts (*: any)"
            message = f"host: {names} if gateway.keys_file is not set, got {host[:100]!r}"
            raise self._refused(scope, "host", ApiError(421, message, code="misdirected_request"))
        origin = headers.get("origin")
        of_keys = self._callers.origins
        if origin is not None and is_own and _is_same(origin, host, scope["scheme"]):
            origin = None
        if self._origins or of_keys:
            added["vary"] = "Origin"
        if origin is not None:
            self._check_origin(scope, origin, self._origins | of_keys)
            added["access-control-allow-origin"] = origin
            added["access-control-expose-headers"] = _EXPOSED
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return _preflight(headers)
        visitor = self._visitor(scope, headers, is_near=is_own and _is_near(scope, headers))
        if origin is not None:
            key = visitor.caller.key
            self._check_origin(scope, origin, frozenset(key.origins) if key and key.origins else self._origins)
        scope["extensions"][_EXTENSION] = visitor
        path, method = scope["path"], scope["method"]
        is_session = path.startswith(_SESSIONS) and method in _READING
        if is_session or (path in self._token_routes and method == "POST"):
            self._charge(scope, visitor.caller, added)
        return None

    def _is_own(self, scope: Scope, host: str) -> bool:
        """Return whether the Host header names this gateway. A web page that tries DNS rebinding sends another name."""
        local = str((scope.get("server") or ("",))[0])
        return not host or _ANY in self._hosts or host_of(host) in self._hosts | {local, f"[{local}]"}

    def _check_origin(self, scope: Scope, origin: str, allowed: frozenset[str]) -> None:
        if origin not in allowed:
            pages = "this gateway's own page, at localhost, its address or one of gateway.hosts"
            message = f"origin: {pages}, or one of gateway.origins, got {origin[:100]!r}"
            raise self._refused(scope, "origin", ApiError(403, message, code="origin_not_allowed"))

    def _visitor(self, scope: Scope, headers: Headers, *, is_near: bool) -> Visitor:
        """Return the client. Raises an ApiError for a missing or unknown key."""
        path, callers = scope["path"], self._callers
        is_open = path in _OPEN_TO_ALL or path.startswith(_OPEN_FOLDER)
        if not callers.are_asked:
            if (path in _INSIDE or path.startswith(_SESSIONS)) and not is_near:
                message = f"{path}: for clients on the gateway's own machine, as it has no gateway.keys_file"
                raise self._refused(scope, "no_key", ApiError(403, message, code="not_local"))
            return Visitor(callers.anonymous, is_near)
        given = headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]
        caller = callers.find(_bearer(given)) if given else None
        if caller is not None:
            return Visitor(caller, is_known=True)
        if is_open or (path in _INSIDE and is_near and not given):
            return Visitor(callers.anonymous, is_near)
        if given:
            message = "authorization: Bearer, or x-api-key, with an API key that this gateway knows, got another"
            raise self._refused(scope, "unknown_key", ApiError(401, message, code="invalid_api_key"))
        message = "authorization: Bearer, or x-api-key, with an API key, got none"
        raise self._refused(scope, "no_key", ApiError(401, message, code="missing_api_key"))

    def _charge(self, scope: Scope, caller: Caller, added: dict[str, str]) -> None:
        try:
            caller.check_room(1)
            caller.admit()
        except ApiError as error:
            self.limited(scope, error, caller)
            raise
        finally:
            added.update(caller.limits())

    def limited(self, scope: Scope, error: ApiError, caller: Caller) -> None:
        why = _WHYS.get(error.code or "")
        if why is not None:
            self._refused(scope, why, error, caller.name)

    def _refused(self, scope: Scope, why: str, error: ApiError, key: str = "") -> ApiError:
        self._counts.refusals[why] += 1
        peer = _peer(scope)
        values: Mapping[str, object] = {"why": why, "peer": peer, **({"key_id": key} if key else {})}
        self._repeated_log.begin((why, key or peer), _log.warning, "request refused", reason=error.message, **values)
        return error


_WHYS = {"rate_limit_exceeded": "rate", "concurrency_limit_exceeded": "concurrency"}


def _preflight(headers: Headers) -> Response:
    requested = headers.get("access-control-request-headers", "")
    allowed = {
        "access-control-allow-methods": "GET, POST",
        "access-control-max-age": str(_PREFLIGHT_SECONDS),
        # Allow all requested headers here, because the request itself is checked when it arrives.
        **({"access-control-allow-headers": requested} if requested and _HEADER_NAMES.fullmatch(requested) else {}),
    }
    return Response(status_code=204, headers=allowed)


def _is_same(origin: str, host: str, scheme: str) -> bool:
    """Return whether an origin is this server. The schemes may differ, because a proxy may have terminated TLS."""
    schemes = ("https",) if scheme == "https" else ("http", "https")
    return bool(host) and origin.lower() in [f"{each}://{host.lower()}" for each in schemes]


def _is_near(scope: Scope, headers: Headers) -> bool:
    return _FORWARDING.isdisjoint(headers.keys()) and _is_loopback(_peer(scope))


def _peer(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


@lru_cache(maxsize=4096)
def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _bearer(given: list[str]) -> str:
    scheme, _, key = given[0].partition(" ")
    return key.strip() if len(given) == 1 and scheme.lower() == "bearer" else ""

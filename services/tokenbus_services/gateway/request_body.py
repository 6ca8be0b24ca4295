"""A request's body as JSON: bounded in bytes and in time."""

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from tokenbus_services.gateway.errors import ApiError
from tokenbus_services.settings import GatewaySettings

_MOST_DISCARDED = 16 * 2**20
"""So much of a body that is too large is still read: a client that is cut off while it writes sees no answer."""


async def body_of(request: Request, settings: GatewaySettings) -> bytes:
    """Return the body of a request that says it is JSON, or raise an ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type: application/json, got {kind[:100]!r}", code="unsupported_media_type")
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"body: within {settings.request_timeout_ms} ms"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "body: all of it, got a part", code="incomplete_body") from None


def json_of(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return what a body says, or raise an ApiError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"body: JSON in UTF-8, got an error: {error}", code="invalid_json") from None


async def _read(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0  # noqa: PLR2004
    if size > _MOST_DISCARDED:
        raise _too_large(most, size)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            chunks.append(chunk)
        elif size > _MOST_DISCARDED:
            raise _too_large(most, size)
    if size > most:
        raise _too_large(most, size)
    return b"".join(chunks)


def _too_large(most: int, size: int) -> ApiError:
    return ApiError(413, f"body: at most {most} bytes, got {size} or more", code="request_too_large")

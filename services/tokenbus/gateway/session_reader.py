"""SessionReader: reads a session from the durable log in another thread, and writes it as JSON."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson

from tokenbus.bus import AddressError
from tokenbus.gateway.errors import ApiError
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.recordings.session_turns import SessionName, TurnReader
from tokenbus.recordings.sessions import Branch, Session, SessionRequest, Span, sessions_of
from tokenbus.settings import Settings
from tokenbus.settings.errors import shown

MOST_SECONDS = 30.0
"""Time limit, in seconds, of a read of the whole log."""
_TOKEN_BYTES = 11
"""Minimum size, in bytes, of one token with its values in an answer."""
_log = logger("gateway")


class SessionReader:
    """Reads one session at a time for all HTTP clients of this process."""

    def __init__(self, settings: Settings, repeated_log: DeduplicatedLog) -> None:
        self._settings = settings
        self._repeated_log = repeated_log
        self._reading: asyncio.Future[bytes] | None = None

    async def read(self, name: SessionName) -> bytes:
        """Return a session as JSON. Raises an ApiError."""
        if not self._settings.durable_log.address:
            message = "sessions: a gateway with durable_log.address, the log to read, got none"
            raise ApiError(404, message, code="not_found")
        if not name.owner:  # unknown until a processor accepts this gateway's client
            raise ApiError(503, "sessions: a connected processor, got none yet", code="no_processor")
        if self._reading is not None and not self._reading.done():
            raise self._refusal("sessions: one read of the durable log at a time, got one more")
        read = _Read(self._settings, name)
        self._reading = reading = asyncio.ensure_future(asyncio.to_thread(read.run))
        reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio would log it
        try:
            async with asyncio.timeout(MOST_SECONDS):
                return await asyncio.shield(reading)
        except TimeoutError:
            raise self._refusal(f"sessions: read within {MOST_SECONDS:g} s, got no end of the durable log") from None
        except (AddressError, ImportError) as error:
            self._repeated_log.begin("sessions", _log.error, "durable log cannot be read", reason=str(error))
            message = "sessions: a durable log that can be read, got an error; the gateway's log says more"
            raise ApiError(503, message, code="no_log") from None
        finally:
            read.is_over = True

    def _refusal(self, message: str) -> ApiError:
        retry_after_ms = self._settings.gateway.retry_after_ms
        return ApiError(503, message, code="overloaded", retry_after_ms=retry_after_ms)


class _Read:
    """One read of the log, which runs in a thread."""

    def __init__(self, settings: Settings, name: SessionName) -> None:
        self._settings = settings
        self._name = name
        self._most = settings.gateway.answer_bytes
        self.is_over = False
        """Whether the caller no longer waits for the session."""

    def run(self) -> bytes:
        with TurnReader(name=self._name) as turns:
            asyncio.run(self._collect(turns))
            session = next(sessions_of(turns), None)
        if session is None:
            raise ApiError(404, f"there is no session {shown(self._name.label)}", code="not_found")
        self._check(_TOKEN_BYTES * sum(branch.token_ids.size for branch in session.branches))
        data = _written(session)
        self._check(len(data))
        return data

    async def _collect(self, turns: TurnReader) -> None:
        from tokenbus.recordings.durable_log.reader import read_log  # noqa: PLC0415 - its library is an extra

        async with asyncio.timeout(MOST_SECONDS), aclosing(read_log(settings=self._settings)) as items:
            async for item in items:
                turns.add(item)
                self._check(turns.stored_bytes)
                if self.is_over:
                    raise TimeoutError

    def _check(self, size: int) -> None:
        if size > self._most:
            message = f"sessions: a session of at most {self._most} bytes, got {size} or more"
            raise ApiError(400, message, code="answer_too_large")


def _written(session: Session) -> bytes:
    answer = {
        "session": session.name.label,
        "complete": session.is_complete,
        "missing": session.missing,
        "requests": list(map(_request, session.requests)),
        "branches": list(map(_branch, session.branches)),
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _request(request: SessionRequest) -> dict[str, Any]:
    attempts = [
        {
            "worker": each.worker_id,
            "first_position": each.first_position,
            "weight_version": each.weight_version,
            "reason": each.reason,
            "status": each.status,
            "error": each.error,
        }
        for each in request.attempts
    ]
    return {
        "request_id": _hexadecimal(request.request_id),
        "parent": _hexadecimal(request.parent) if request.parent else None,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "status": request.status,
        "error": request.error,
        "branch": request.branch if request.branch >= 0 else None,
        "begin": request.begin,
        "attempts": attempts,
        "routed_experts": request.routed_experts,
    }


def _branch(branch: Branch) -> dict[str, Any]:
    arrays = {
        "token_ids": branch.token_ids,
        "output_mask": branch.is_output.astype(np.uint8),
        "logprobs": branch.logprobs,  # orjson writes NaN as null
        "ranks": branch.ranks,
    }
    return {
        **{name: np.ascontiguousarray(array) for name, array in arrays.items()},
        "weight_versions": _spans(branch.weight_versions),
        "workers": _spans(branch.workers),
        "requests": list(map(_hexadecimal, branch.requests)),
        "digest": branch.digest,
        "divergence": branch.divergence,
    }


def _spans(spans: Iterable[Span]) -> list[dict[str, Any]]:
    return [{"begin": each.begin, "value": each.value} for each in spans]


def _hexadecimal(request_id: int) -> str:
    return f"{request_id:016x}"

"""Request ids on the bus for the requests of an existing vLLM, which chooses its own ids."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from tokenbus.logs import DeduplicatedLog, logger

ARGUMENT = "tokenbus_request_id"
"""Argument in `vllm_xargs` (SamplingParams.extra_args) with which a request chooses its id."""
_MOST_ID = 2**64 - 1
_MOST_DIGITS = 20
_MOST_RECENT = 65_536
"""Number of ended requests that a processor remembers by default."""
_SUFFIX = re.compile("-[0-9a-f]{8}")
_CHILD = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)
_log = logger("worker")


def request_id(vllm_id: str) -> int:
    """Return a request's id on the bus, from the id in vLLM's API server.

    vLLM's id is `ID` for the chat answer `ID`, and `ID-PROMPT` for a completion, where PROMPT counts from 0. For a
    request with several answers, the id begins with the answer's number and `_`. The result is the first 8 bytes of the
    id's SHA-256, as a big-endian number.

    Example:
        assert request_id("chatcmpl-42") != request_id("cmpl-42-0") != request_id("1_cmpl-42-0")
    """
    return int.from_bytes(sha256(vllm_id.encode(errors="surrogatepass")).digest()[:8], "big") or 1


class RequestIds:
    """Assigns unique ids, because a processor would drop rows with a reused id as late rows of the earlier request."""

    def __init__(self, most: int = _MOST_RECENT) -> None:
        self._most = most
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._repeated_log = DeduplicatedLog()

    def id_of(self, name: str, arguments: Mapping[str, Any] | None) -> int:
        """Choose a new request's id from its `extra_args`, or derive the id from its name in vLLM's core."""
        for found in self._candidates(name, arguments or {}):
            if found not in self._recent:
                break
            self._repeated_log.begin("used", _log.warning, "request id used before", request=name, request_id=found)
        self._recent[found] = None
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return found

    def _candidates(self, name: str, arguments: Mapping[str, Any]) -> Iterator[int]:
        """Yield the possible ids of a request, beginning with the preferred id."""
        child = _CHILD.fullmatch(name)
        if ARGUMENT in arguments:
            given = _number(arguments[ARGUMENT])
            if given is None:
                limit = f"1 to {_MOST_ID}"
                self._repeated_log.begin("wrong", _log.warning, "request id refused", request=name, limit=limit)
            else:  # the answers of a request with `n` get consecutive ids
                yield (given + int(child[1]) - 1) % _MOST_ID + 1 if child else given
        # The core appends eight random digits to the front end's id.
        known = name[: -len("-12345678")] if _SUFFIX.fullmatch(name[-len("-12345678") :]) else name
        parent = _CHILD.fullmatch(known)
        if not (parent[2] if parent else known).isdecimal():  # `LLM.generate` makes decimal ids, which repeat
            yield request_id(known)
        life = 0
        while True:
            yield request_id(f"{name}#{life}" if life else name)
            life += 1


def _number(given: object) -> int | None:
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS:
        given = int(given)
    return given if type(given) is int and 1 <= given <= _MOST_ID else None

"""Request ids: which id the requests of a vLLM that is deployed already have on the bus, where vLLM names them."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from tokenbus.logs import DeduplicatedLog, logger

ARGUMENT = "tokenbus_request_id"
"""What a request says in `vllm_xargs`, and so in SamplingParams.extra_args, that wants a key of its own choice."""
_MOST_KEY = 2**64 - 1
_MOST_DIGITS = 20
_MOST_RECENT = 65_536
"""As many ended requests as a processor remembers unless it is told otherwise."""
_SUFFIX = re.compile("-[0-9a-f]{8}")
_CHILD = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)
_log = logger("worker")


def request_id(vllm_id: str) -> int:
    """Return the key that a request has on the bus, by the id that vLLM's API server knows it by.

    That is the `id` of a chat's answer, or the `id` of a completion with `-` and the prompt's number, from 0; of one of
    `n` answers, its number and `_` come first. The key is the first 8 bytes of the id's SHA-256, a big-endian number.

    Example:
        assert request_id("chatcmpl-42") != request_id("cmpl-42-0") != request_id("1_cmpl-42-0")
    """
    return int.from_bytes(sha256(vllm_id.encode(errors="surrogatepass")).digest()[:8], "big") or 1


class RequestIds:
    """Gives each request a key that none before it had: to a processor, a key's second life is late rows."""

    def __init__(self, most: int = _MOST_RECENT) -> None:
        self._most = most
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._repeated_log = DeduplicatedLog()

    def id_of(self, name: str, arguments: Mapping[str, Any] | None) -> int:
        """Return the key of a new request, by its name in vLLM's core and its `extra_args`."""
        for key in self._candidates(name, arguments or {}):
            if key not in self._recent:
                break
            self._repeated_log.begin("used", _log.warning, "request id used before", request=name, request_id=key)
        self._recent[key] = None
        if len(self._recent) > self._most:
            self._recent.popitem(last=False)
        return key

    def _candidates(self, name: str, arguments: Mapping[str, Any]) -> Iterator[int]:
        """Yield the keys that a request may have, the best first."""
        child = _CHILD.fullmatch(name)
        if ARGUMENT in arguments:
            given = _number(arguments[ARGUMENT])
            if given is None:
                limit = f"1 to {_MOST_KEY}"
                self._repeated_log.begin("wrong", _log.warning, "request id refused", request=name, limit=limit)
            else:  # each of n answers has its own, from the given one on
                yield (given + int(child[1]) - 1) % _MOST_KEY + 1 if child else given
        # The core adds eight random digits to the id that the front end knows.
        known = name[: -len("-12345678")] if _SUFFIX.fullmatch(name[-len("-12345678") :]) else name
        parent = _CHILD.fullmatch(known)
        if not (parent[2] if parent else known).isdecimal():  # else `LLM.generate` has counted, as another one will
            yield request_id(known)
        life = 0
        while True:
            yield request_id(f"{name}#{life}" if life else name)
            life += 1


def _number(given: object) -> int | None:
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS:
        given = int(given)
    return given if type(given) is int and 1 <= given <= _MOST_KEY else None

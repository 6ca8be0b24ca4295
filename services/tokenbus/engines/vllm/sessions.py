"""Sessions on the bus for the requests of an existing vLLM, with labels in an argument or in vLLM's request id."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenbus.logs import DeduplicatedLog, logger
from tokenbus_contracts.generated.request_pb2 import Generate, TokenPrompt
from tokenbus_contracts.schema import bounds_in

SESSION = "tokenbus_session"
"""Argument in `vllm_xargs` (SamplingParams.extra_args) with the label of a request's session."""
PARENT = "tokenbus_parent"
"""Argument with the id of the request's parent, in 16 hexadecimal digits."""
_MOST_BYTES = bounds_in(Generate.DESCRIPTOR.fields_by_name["session"].GetOptions()).max_bytes
_ID = re.compile("[0-9a-fA-F]{16}")
_LABELLED = re.compile(rf"(?:\d+_)?(?:[a-z-]+[-_])?{SESSION}:([^:]*):.*", re.DOTALL)
"""Pattern of a labelled request id in vLLM's core.

The id consists of the answer's number, the kind of request (`chatcmpl-`), `tokenbus_session:LABEL:`, and a unique end.
"""
_log = logger("worker")


class Sessions:
    """Reads the sessions of requests. Invalid arguments are logged and ignored, because they must not fail vLLM."""

    def __init__(self) -> None:
        self._repeated_log = DeduplicatedLog()

    def of(
        self, request_id: int, name: str, arguments: Mapping[str, Any] | None, prompt: Sequence[int] | None
    ) -> Generate | None:
        """Return a new request's session, or None for a request without a label or without token ids.

        An argument for the session takes precedence over a label in `name`, the request's id in vLLM's core.
        """
        given = arguments or {}
        labelled = _LABELLED.fullmatch(name)
        if (label := self._label(given.get(SESSION, labelled[1] if labelled else ""))) is None:
            return None
        if prompt is None:
            self._refuse(SESSION, "a prompt of token ids", "embeddings")
            return None
        return Generate(
            request_id=request_id,
            session=label,
            parent=self._parent(given.get(PARENT, "")),
            tokens=TokenPrompt(token_ids=prompt),
        )

    def _label(self, given: object) -> str | None:
        if not isinstance(given, str):
            self._refuse(SESSION, "a text", type(given).__name__)
            return None
        try:
            size = len(given.encode())
        except UnicodeEncodeError:
            self._refuse(SESSION, "a text in UTF-8", ascii(given))
            return None
        if size > _MOST_BYTES:
            self._refuse(SESSION, f"at most {_MOST_BYTES} bytes", f"{size} bytes: {given}")
            return None
        return given or None

    def _parent(self, given: object) -> int:
        if isinstance(given, str) and _ID.fullmatch(given):
            return int(given, 16)
        if given:
            self._refuse(PARENT, "16 hexadecimal digits", given)
        return 0

    def _refuse(self, field: str, limit: str, value: object) -> None:
        self._repeated_log.begin(field, _log.warning, "session refused", field=field, limit=limit, value=value)

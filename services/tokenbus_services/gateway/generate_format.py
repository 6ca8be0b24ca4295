"""GenerateFormat: an answer as vLLM's /inference/v1/generate has it."""

import time
from typing import TYPE_CHECKING

import orjson

from tokenbus_services.gateway.logprob_writers import Entries, IdEntries, Part
from tokenbus_services.gateway.openai_format import Envelope

if TYPE_CHECKING:
    from tokenbus_services.gateway.event_writer import EventStream


class GenerateFormat(Envelope):
    """Writes one answer: token ids, and the text beside them where that is wanted."""

    _has_one_prompt = True

    def _first_members(self, name: str) -> dict[str, object]:
        request = self._request
        mode = "text" if request.wants_text else "tokens"
        members: dict[str, object] = {"request_id": f"generate-tokens-{name}", "output_mode": mode}
        return members if request.is_streamed else members | {"model": request.model, "created": int(time.time())}

    def _member_of_text(self) -> bytes:
        return b'"text":%b,' if self._request.wants_text else b""

    def parts(self, progress: "EventStream") -> tuple[Part, ...]:
        """Return new writers of the members beside a choice's text."""
        parts = super().parts(progress)
        if self._request.wants_text:
            return parts
        return tuple(IdEntries() if isinstance(part, Entries) else part for part in parts)

    def beginnings(self) -> bytes:
        """Return the chunk before all rows, with the prompt's ids if requested."""
        ids = self._prompt_ids(0)
        said = self._said and self._said % b'""'
        ending = b'"token_ids":[],"logprobs":null,"finish_reason":null,"stop_reason":null}]%b%b}\n\n'
        return ids and self._openings[0] + said + ending % (ids, self._usage_so_far(0, 0))

    def _prompt_ids(self, _index: int) -> bytes:
        members = self._request.echoed
        return b"," + orjson.dumps(members)[1:-1] if members else b""

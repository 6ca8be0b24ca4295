"""EngineOutput: the interface through which an engine's loop publishes steps and request events."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from tokenbus.delivery.errors import request_error
from tokenbus.worker.step import StepArrays
from tokenbus_contracts.generated.request_pb2 import (
    Admitted,
    ErrorCode,
    Generate,
    RequestEvent,
    SessionPrompt,
    TokenPrompt,
)
from tokenbus_contracts.schema import bounds_in

_CHUNK_TOKENS = bounds_in(SessionPrompt.DESCRIPTOR.fields_by_name["token_ids"].GetOptions()).max_bytes // 4


class EngineOutput(ABC):
    """Publishes the steps and events of one engine in order."""

    @abstractmethod
    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step. After the call, the engine may reuse the arrays."""

    @abstractmethod
    def publish_event(self, event: RequestEvent) -> None:
        """Publish an event. The publisher sets the event's sequence."""

    def admitted(
        self, request_id: int, prompt_tokens: int, cached_tokens: int | None = None, weight_version: int = 0
    ) -> None:
        self.publish_event(admitted_event(request_id, prompt_tokens, cached_tokens, weight_version))

    def failed(self, request_id: int, code: ErrorCode, message: str) -> None:
        self.publish_event(error_event(request_id, code, message))


def admitted_event(
    request_id: int, prompt_tokens: int, cached_tokens: int | None = None, weight_version: int = 0
) -> RequestEvent:
    """Return an admission's event. The publisher sets the worker and the turn, and replaces a weight version of 0."""
    admitted = Admitted(
        request_id=request_id,
        prompt_tokens=max(1, prompt_tokens),
        cached_tokens=cached_tokens,
        weight_version=weight_version,
    )
    return RequestEvent(admitted=admitted)


def session_events(generate: Generate) -> Iterator[RequestEvent]:
    """Yield the events of a request's session, with the tokens of its prompt."""
    size, ids = len(generate.tokens.token_ids), _packed(generate.tokens)
    for begin in range(0, size, _CHUNK_TOKENS):
        chunk = SessionPrompt(
            request_id=generate.request_id,
            session=generate.session,
            parent=generate.parent,
            owner=generate.owner,
            tenant=generate.tenant,
            position=begin,
            prompt_tokens=size,
            token_ids=ids[4 * begin : 4 * (begin + _CHUNK_TOKENS)],
        )
        yield RequestEvent(session_prompt=chunk)


def _packed(prompt: TokenPrompt) -> bytes:
    """Return a prompt's ids as little-endian uint32.

    The encoded message ends with the ids, its only field, so no slow loop over the ids is needed.
    """
    known = TokenPrompt()
    known.CopyFrom(prompt)
    known.DiscardUnknownFields()
    return known.SerializeToString()[-4 * len(prompt.token_ids) :]


def error_event(request_id: int, code: ErrorCode, message: str, emitted_tokens: int = 0) -> RequestEvent:
    """Return the event of a request that ended with an error. A long message is cut."""
    return RequestEvent(error=request_error(request_id, code, message, emitted_tokens=emitted_tokens))

"""RequestState: what a decode engine needs to continue a request after its first token. All of it is checked."""

from typing import Annotated, Protocol

import msgspec

from tokenbus_engines.requests import Request, prompt_digest
from tokenbus_services.plugins import Tokenizer

_MOST_BYTES = 65_536
_MOST_TOKENS = 16
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ModelTokenizer(Tokenizer, Protocol):
    """The tokenizer of a model, one of whose tokens ends a text."""

    @property
    def end_token(self) -> int:
        """The token that ends a text; it has no bytes."""


class RequestState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="is", tag="state"):
    """Where a request is. Everything else that a decode engine needs is in the request itself, and in the model."""

    model: str
    """The model's fingerprint: another one's tokens mean something else."""
    prompt: bytes
    """What tells the prompt's tokens from another's."""
    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=_MOST_TOKENS)]
    """What was emitted already."""
    seed: Annotated[int, msgspec.Meta(ge=0)]
    proposals: Annotated[list[TokenId], msgspec.Meta(max_length=_MOST_TOKENS)]
    """What the draft proposed to follow."""
    carried: bytes = b""
    """What the decoder computed that it would else have to compute again."""

    def packed(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)


def unpacked(data: bytes, most_carried: int) -> RequestState:
    """Return the state that `packed` gave. It came over the network: a ValueError says what is wrong with it."""
    most = _MOST_BYTES + most_carried
    if len(data) > most:
        raise ValueError(f"state: at most {most} bytes, got {len(data)}")
    try:
        return msgspec.msgpack.decode(data, type=RequestState)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"state: damaged: {error}") from None


def resume(request: Request, state: RequestState, model: str, tokenizer: ModelTokenizer) -> None:
    """Continue a new request from a state; after a ValueError, the request must be dropped."""
    if state.model != model:
        raise ValueError(f"state.model: {model}, got {state.model[:64]!r}")
    if state.prompt != prompt_digest(request.prompt):
        raise ValueError("state.prompt: the request's own, got another")
    for name, ids in (("tokens", state.tokens), ("proposals", state.proposals)):
        for place, token_id in enumerate(ids):
            if token_id >= tokenizer.vocabulary_size:
                raise ValueError(f"state.{name}[{place}]: below {tokenizer.vocabulary_size}, got {token_id}")
    if tokenizer.end_token in state.tokens and not request.ignores_end:
        raise ValueError("state.tokens: none that ends the request, got the end token")
    if len(state.tokens) >= request.most:
        raise ValueError(f"state.tokens: less than the {request.most} of the request, got {len(state.tokens)}")
    if request.stops is not None and request.stops.take(state.tokens) is not None:
        raise ValueError("state.tokens: none that ends the request, got one that does")
    request.output, request.proposals = state.tokens, state.proposals
    if not request.is_seeded:
        request.seed = state.seed

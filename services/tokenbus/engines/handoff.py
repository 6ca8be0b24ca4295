"""RequestState: what a decode engine needs to continue a request after its first token. All of it is checked."""

from typing import Annotated, Protocol

import msgspec

from tokenbus.engines.requests import Request, prompt_digest
from tokenbus.plugins import Tokenizer

_MOST_BYTES = 65_536
_MOST_TOKENS = 16
_WORD = 1 << 64
_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class ModelTokenizer(Tokenizer, Protocol):
    """The tokenizer of a model, one of whose tokens ends a text."""

    @property
    def end_token(self) -> int:
        """The token that ends a text; it has no bytes."""


class RequestState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a request is. The request itself and the model have everything else that a decode engine needs."""

    model: str
    """The model's fingerprint: another one's tokens mean something else."""
    prompt: str
    tokens: Annotated[list[_TokenId], msgspec.Meta(min_length=1, max_length=_MOST_TOKENS)]
    seed: Annotated[int, msgspec.Meta(ge=0)]
    proposals: Annotated[list[_TokenId], msgspec.Meta(max_length=_MOST_TOKENS)]

    def packed(self, carried: bytes) -> bytes:
        """Return the state as a line of JSON, and behind it what the engine carries over."""
        return msgspec.json.encode(self) + b"\n" + carried


def unpacked(data: bytes, most_carried: int) -> tuple[RequestState, bytes]:
    """Return the state and what is carried, as `packed` wrote them. A ValueError says what is wrong with the bytes."""
    most = _MOST_BYTES + most_carried
    if len(data) > most:
        raise ValueError(f"state: at most {most} bytes, got {len(data)}")
    line, _, carried = data.partition(b"\n")
    try:
        state = msgspec.json.decode(line, type=RequestState)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors
        raise ValueError(f"state: {error}") from None
    if state.seed >= _WORD:
        raise ValueError(f"state.seed: below {_WORD}, got {str(state.seed)[:32]}")
    return state, carried


def resume(request: Request, state: RequestState, model: str, tokenizer: ModelTokenizer) -> None:
    """Continue a new request from a state; after a ValueError, the request must be dropped."""
    if state.model != model:
        raise ValueError(f"state.model: {model}, got {state.model[:64]!r}")
    if state.prompt != prompt_digest(request.prompt):
        raise ValueError("state.prompt: the request's own, got another")
    for name, ids in (("tokens", state.tokens), ("proposals", state.proposals)):
        for place, token_id in enumerate(ids):
            if token_id >= tokenizer.vocabulary_size:
                raise ValueError(f"state.{name}[{place}]: below {tokenizer.vocabulary_size}, got {str(token_id)[:32]}")
    if tokenizer.end_token in state.tokens and not request.ignores_end:
        raise ValueError("state.tokens: none that ends the request, got the end token")
    if len(state.tokens) >= request.most:
        raise ValueError(f"state.tokens: less than the {request.most} of the request, got {len(state.tokens)}")
    if request.stops is not None and request.stops.take(state.tokens):
        raise ValueError("state.tokens: none that ends the request, got one that does")
    request.output, request.proposals = state.tokens, state.proposals
    if not request.is_seeded:
        request.seed = state.seed

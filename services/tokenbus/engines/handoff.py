"""RequestState: what a decode engine needs to continue a request after its first token. All of it is checked."""

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

from tokenbus.engines.admission import check_ids
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


def resume(
    request: Request, state: RequestState, model: str, tokenizer: ModelTokenizer, accepted: Sequence[int] = ()
) -> None:
    """Continue a new request from a state, behind the tokens of earlier turns; drop the request after a ValueError."""
    if state.model != model:
        raise ValueError(f"state.model: {model}, got {state.model[:64]!r}")
    if state.prompt != prompt_digest(request.prompt):
        raise ValueError("state.prompt: the request's own, got another")
    check_ids("state.proposals", state.proposals, tokenizer.vocabulary_size)
    _go_on(request, "state.tokens", [*accepted, *state.tokens], tokenizer)
    request.proposals, request.is_computed = state.proposals, True
    if not request.is_seeded:
        request.seed = state.seed


def continue_from(request: Request, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> None:
    """Continue a new request behind the tokens of its earlier turns; drop the request after a ValueError."""
    _go_on(request, "continuation.token_ids", list(token_ids), tokenizer)


def _go_on(request: Request, name: str, ids: list[int], tokenizer: ModelTokenizer) -> None:
    check_ids(name, ids, tokenizer.vocabulary_size)
    if tokenizer.end_token in ids and not request.ignores_end:
        raise ValueError(f"{name}: none that ends the request, got the end token")
    if len(ids) >= request.most:
        raise ValueError(f"{name}: less than the {request.most} of the request, got {len(ids)}")
    if request.stops is not None and request.stops.take(ids):
        raise ValueError(f"{name}: none that ends the request, got one that does")
    request.output = ids

"""RequestState: what a decode engine needs to continue a request after its first token. All of it is checked."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tokenbus_engines.requests import Request, prompt_digest
from tokenbus_services.plugins import Tokenizer

_MOST_BYTES = 65_536
_MOST_TOKENS = 16
_WORD = 1 << 64


class ModelTokenizer(Tokenizer, Protocol):
    """The tokenizer of a model, one of whose tokens ends a text."""

    @property
    def end_token(self) -> int:
        """The token that ends a text; it has no bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """Where a request is. Everything else that a decode engine needs is in the request itself, and in the model."""

    model: str
    """The model's fingerprint: another one's tokens mean something else."""
    prompt: str
    """What tells the prompt's tokens from another's."""
    tokens: list[int]
    """What was emitted already."""
    seed: int
    proposals: list[int]
    """What the draft proposed to follow."""
    carried: bytes
    """What the decoder computed that it would else have to compute again."""

    def packed(self) -> bytes:
        """Return it as a line of JSON, and behind it what is carried."""
        fields = asdict(self)
        carried: bytes = fields.pop("carried")
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n" + carried


def unpacked(data: bytes, most_carried: int) -> RequestState:
    """Return the state that `packed` gave. It came over the network: a ValueError says what is wrong with it."""
    most = _MOST_BYTES + most_carried
    if len(data) > most:
        raise ValueError(f"state: at most {most} bytes, got {len(data)}")
    line, _, carried = data.partition(b"\n")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"state: JSON, got {line[:32]!r}") from None
    known = set(RequestState.__slots__) - {"carried"}
    if type(found) is not dict or found.keys() != known:
        wrong = sorted(known ^ found.keys())[:4] if type(found) is dict else type(found).__name__
        raise ValueError(f"state: the fields {', '.join(sorted(known))} and no other, got a difference in {wrong}")
    for name in ("model", "prompt"):
        if type(found[name]) is not str:
            raise ValueError(f"state.{name}: a string, got {type(found[name]).__name__}")
    _check_number("seed", found["seed"], _WORD)
    for name, least in (("tokens", 1), ("proposals", 0)):
        ids = found[name]
        if type(ids) is not list or not least <= len(ids) <= _MOST_TOKENS:
            got = f"{len(ids)} of them" if type(ids) is list else type(ids).__name__
            raise ValueError(f"state.{name}: a list of {least} to {_MOST_TOKENS} numbers, got {got}")
        for place, number in enumerate(ids):
            _check_number(f"{name}[{place}]", number, 1 << 31)
    return RequestState(**found, carried=carried)


def _check_number(name: str, value: Any, beyond: int) -> None:  # noqa: ANN401 - whatever JSON has
    if type(value) is not int or not 0 <= value < beyond:
        raise ValueError(f"state.{name}: a whole number from 0 to below {beyond}, got {str(value)[:32]}")


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

"""RequestState: what a decode engine needs to continue a request after its first token, as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from tokenbus_engines.ngram.model import Model

_VERSION = 1
_MOST_BYTES = 65_536
_MOST_TOKENS = 16
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class RequestState:
    """Where a request is. Everything else that a decode engine needs is in the request itself, and in the model."""

    model: str
    """The model's fingerprint: another one's tokens mean something else."""
    prompt_tokens: int
    tokens: list[int]
    """What was emitted already."""
    seed: int
    proposals: list[int]
    """What the draft proposed to follow."""

    def written(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, separators=(",", ":")).encode()

    def check(self, model: Model, prompt_tokens: int) -> None:
        """Refuse what was made by another model, or for another prompt."""
        if self.model != model.fingerprint:
            raise ValueError(f"state.model: {model.fingerprint}, got {self.model[:64]!r}")
        if self.prompt_tokens != prompt_tokens:
            raise ValueError(f"state.prompt_tokens: {prompt_tokens}, as the request has, got {self.prompt_tokens}")
        for name, ids in (("tokens", self.tokens), ("proposals", self.proposals)):
            for place, token_id in enumerate(ids):
                if token_id >= model.vocabulary_size:
                    raise ValueError(f"state.{name}[{place}]: below {model.vocabulary_size}, got {token_id}")


def read(data: bytes) -> RequestState:
    """Return the state that `written` gave. It came over the network: a ValueError says what is wrong with it."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"state: at most {_MOST_BYTES} bytes, got {len(data)}")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"state: JSON, got {bytes(data[:32])!r}") from None
    if type(found) is not dict:
        raise ValueError(f"state: an object, got {type(found).__name__}")
    known = {"version", *RequestState.__slots__}
    if found.keys() != known:
        wrong = sorted(known ^ found.keys())
        raise ValueError(f"state: the fields {', '.join(sorted(known))} and no other, got a difference in {wrong[:4]}")
    if found["version"] != _VERSION:
        raise ValueError(f"state.version: {_VERSION}, got {str(found['version'])[:32]}")
    if type(found["model"]) is not str:
        raise ValueError(f"state.model: a string, got {type(found['model']).__name__}")
    return RequestState(
        found["model"],
        _number("prompt_tokens", found["prompt_tokens"], _WORD),
        _numbers("tokens", found["tokens"], 1),
        _number("seed", found["seed"], _WORD),
        _numbers("proposals", found["proposals"], 0),
    )


def _numbers(name: str, value: Any, least: int) -> list[int]:  # noqa: ANN401 - whatever JSON has
    if type(value) is not list or not least <= len(value) <= _MOST_TOKENS:
        got = f"{len(value)} of them" if type(value) is list else type(value).__name__
        raise ValueError(f"state.{name}: a list of {least} to {_MOST_TOKENS} numbers, got {got}")
    return [_number(f"{name}[{place}]", number, 1 << 31) for place, number in enumerate(value)]


def _number(name: str, value: Any, beyond: int) -> int:  # noqa: ANN401 - whatever JSON has
    if type(value) is not int or not 0 <= value < beyond:
        raise ValueError(f"state.{name}: a whole number from 0 to below {beyond}, got {str(value)[:32]}")
    return value

"""Continues a request after the tokens of its earlier turns, which it validates."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tokenbus.engines.admission import check_ids
from tokenbus.engines.requests import Request
from tokenbus.plugins import Tokenizer


@runtime_checkable
class ModelTokenizer(Tokenizer, Protocol):
    """The tokenizer of a model with an end token."""

    @property
    def end_token(self) -> int:
        """The id of the token that ends a text; its bytes are empty."""


def continue_from(request: Request, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> None:
    """Set the request's previous output; raises ValueError, after which the request must not be used."""
    name, ids = "continuation.token_ids", list(token_ids)
    check_ids(name, ids, tokenizer.vocabulary_size)
    if tokenizer.end_token in ids and not request.ignores_end:
        raise ValueError(f"{name}: no token that ends the request, got the end token")
    if len(ids) >= request.most:
        raise ValueError(f"{name}: less than the request's {request.most} tokens, got {len(ids)}")
    if request.stops is not None and request.stops.add(ids):
        raise ValueError(f"{name}: no token that ends the request, got a stop")
    request.output = ids

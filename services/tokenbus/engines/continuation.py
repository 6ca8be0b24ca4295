"""Continuation: a new request goes on behind the tokens of its earlier turns. All of them are checked."""

from collections.abc import Sequence
from typing import Protocol

from tokenbus.engines.admission import check_ids
from tokenbus.engines.requests import Request
from tokenbus.plugins import Tokenizer


class ModelTokenizer(Tokenizer, Protocol):
    """The tokenizer of a model, one of whose tokens ends a text."""

    @property
    def end_token(self) -> int:
        """The token that ends a text; it has no bytes."""


def continue_from(request: Request, token_ids: Sequence[int], tokenizer: ModelTokenizer) -> None:
    """Continue a new request behind some tokens; drop the request after a ValueError."""
    name, ids = "continuation.token_ids", list(token_ids)
    check_ids(name, ids, tokenizer.vocabulary_size)
    if tokenizer.end_token in ids and not request.ignores_end:
        raise ValueError(f"{name}: none that ends the request, got the end token")
    if len(ids) >= request.most:
        raise ValueError(f"{name}: less than the {request.most} of the request, got {len(ids)}")
    if request.stops is not None and request.stops.take(ids):
        raise ValueError(f"{name}: none that ends the request, got one that does")
    request.output = ids

"""The smallest body that each route takes, and what reads them."""

from typing import Any

from tests.in_process.builders import settings
from tokenbus.gateway.completion_request import Reader
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts.generated.client_pb2 import WorkerStatus

VALID: dict[str, dict[str, Any]] = {
    "completion": {"model": "m", "prompt": "a"},
    "chat": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "chat_batch": {"model": "m", "messages": [[{"role": "user", "content": "a"}]]},
    "messages": {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "token_count": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "responses": {"input": "a"},
    "generation": {"token_ids": [1], "sampling_params": {}},
    "inspection": {"prompt": "a"},
    "tokenization": {"prompt": "a"},
    "detokenization": {"tokens": [1]},
}
"""By the name of the reader's method that reads it."""
SMALL: dict[str, object] = {"gateway.max_tokens": 12, "gateway.max_prompt_tokens": 3, "gateway.max_choices": 2}
"""Bounds that a short body can go beyond."""


def reading(vocabulary: str = "bytes", *, context: int = 0, given: dict[str, object] | None = None) -> Reader:
    reader = Reader(settings(given), vocabulary_of(vocabulary))
    reader.learn_models([WorkerStatus(model="m", max_model_tokens=context)])
    return reader


def read(reader: Reader, route: str, **fields: Any) -> Any:  # noqa: ANN401 - what the route's method returns
    return getattr(reader, route)(VALID[route] | fields)

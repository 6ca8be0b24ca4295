"""What answers are charged with, held to the memory that the process takes for them."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.in_process.builders import settings
from tokenbus.engines.synthetic import true_prompt_scores
from tokenbus.gateway.answer import Answer, Format, WholeAnswer
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import CompletionRequest, unpacked
from tokenbus.gateway.messages_format import MessagesFormat
from tokenbus.gateway.openai_format import Envelope, GenerateFormat
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.responses_format import ResponsesFormat
from tokenbus.gateway.sse import InspectorFormat, StreamedAnswer
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_contracts.extras import Extra
from tokenbus_contracts.generated.request_pb2 import PromptScoring

VOCABULARY = vocabulary_of("ngram")
CHOICES, ROWS, TOP_K = 3, 60, 20
PROMPT = [1 + place % 200 for place in range(30)]
_SLACK = 48 * 1024
"""What else is made in a test, such as the last step."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "texts": {},
    "lists": {"top_logprobs": TOP_K},
    "own logprobs": {"top_logprobs": 0},
    "chat": {"top_logprobs": TOP_K, "is_chat": True},
    "token ids": {"wants_ids": True},
    "columns": {"top_logprobs": TOP_K, "wants_columns": True},
    "names of ids": {"top_logprobs": TOP_K, "names_ids": True},
    "extras": {"top_logprobs": 0, "token_scoring": {"entropies": True}},
    "echo": {"top_logprobs": TOP_K, "echoes": ["hi"]},
    "prompt logprobs": {"wants_prompt_logprobs": True},
}
FORMS: Mapping[str, tuple[Callable[[CompletionRequest, int], Format], Mapping[str, Any]]] = {
    **{name: (Envelope, fields) for name, fields in KINDS.items()},
    "generation": (GenerateFormat, {"top_logprobs": TOP_K, "n": 1}),
    "messages": (MessagesFormat, {"n": 1}),
    "responses": (ResponsesFormat, {"top_logprobs": TOP_K, "n": 1}),
}


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    """Let no collection of other tests' garbage free memory between two measurements."""
    gc.disable()
    yield
    gc.enable()


def _step(position: int, choices: int, top_k: int) -> RenderedStep:
    status = RowStatus.FINISHED_LENGTH if position == ROWS - 1 else RowStatus.ACTIVE
    rows = batch([RowShape(key, position, 1, status, top_k=top_k) for key in range(1, choices + 1)], step=1)
    entropies = np.linspace(0, 1, rows.token_ids.size, dtype=np.float32)
    extras = np.full(rows.row_count, int(Extra.ENTROPY), np.uint8)
    return RenderedStep(LogprobBatch(rows.header, **rows.columns, extras=extras, entropies=entropies), VOCABULARY)


def _fill(answer: Answer, request: CompletionRequest) -> None:
    answer.begin(lambda: None)
    scores = true_prompt_scores(1, PROMPT, PromptScoring(top_logprobs=TOP_K))
    scores = replace(scores, alternative_token_ids=scores.alternative_token_ids % VOCABULARY.size)
    for choice in answer.choices if request.echoes or request.wants_prompt_logprobs else ():
        choice.scored(scores, VOCABULARY)
    for position in range(ROWS):
        step = _step(position, len(answer.choices), request.top_logprobs or 0)
        for place, choice in enumerate(answer.choices):
            choice.take(step, place)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 0),
        ({"wants_ids": True, "hides_prompts": True}, 0),
        ({"wants_ids": True}, 400_000),
        ({"echoes": ["a"]}, 400_000),
    ],
)
def test_answers_keep_no_lists_for_the_engine_and_no_prompts_that_they_do_not_show(
    fields: Mapping[str, Any], size: int
) -> None:
    request = CompletionRequest(
        model="m",
        prompts=[range(1000, 101_000)],
        sampling={"allowed_token_ids": list(range(1000, 66_000)), "stop": ["b"], "max_tokens": 7},
        **fields,
    )
    kept = unpacked(request.packed()).kept()
    assert size <= kept.size <= 1.1 * size + 2000
    assert (kept.stopping, kept.prompt_tokens) == (request.stopping, 100_000)
    assert kept.sampling["max_tokens"] == 7


class Held:
    """What the process holds more than before, in bytes."""

    def __init__(self) -> None:
        self._before = tracemalloc.get_traced_memory()[0]

    def now(self) -> int:
        return tracemalloc.get_traced_memory()[0] - self._before


async def _measured(make: Callable[[CompletionRequest, Buffers], Answer], request: CompletionRequest) -> list[int]:
    """Return what an answer takes and what it is charged with: filled, written, and what is left once it is sent."""
    held, buffers = Held(), Buffers(2**30)
    answer = make(request, buffers)
    _fill(answer, request)
    found = [held.now(), buffers.size]
    await answer.ready()
    found += [held.now(), buffers.size]
    while not answer.queue.take(2**30).is_last:
        pass
    answer.queue.drop()
    del answer
    return [*found, held.now(), buffers.size]


async def _check(make: Callable[[CompletionRequest, Buffers], Answer], request: CompletionRequest) -> None:
    tracemalloc.start()
    try:
        several = [await _measured(make, request) for _ in range(3)]
    finally:
        tracemalloc.stop()
    filled, counted_filled, written, counted_written, left, counted_left = map(min, zip(*several, strict=True))
    for taken, counted in ((filled, counted_filled), (written, counted_written)):
        assert taken < 1.1 * counted + _SLACK
        assert counted < 1.5 * taken + _SLACK
    assert left < _SLACK
    assert counted_left == 0


@pytest.mark.parametrize("name", FORMS)
async def test_whole_answers_are_charged_with_their_memory(name: str) -> None:
    form, fields = FORMS[name]
    request = CompletionRequest(**{"model": "m", "prompts": [PROMPT], "n": CHOICES, **fields})
    gateway = settings().gateway
    await _check(lambda asked, buffers: WholeAnswer(asked, form(asked, 1), gateway, buffers), request)


@pytest.mark.parametrize("name", ["lists", "chat", "columns", "extras", "echo", "messages", "responses"])
async def test_streams_are_charged_with_their_memory(name: str) -> None:
    form, fields = FORMS[name]
    request = CompletionRequest(**{"model": "m", "prompts": [PROMPT], "n": CHOICES, "is_streamed": True, **fields})
    gateway = settings({"gateway.stream_buffer_bytes": 2**28}).gateway
    await _check(lambda asked, buffers: StreamedAnswer(asked, form(asked, 1), gateway, buffers), request)


async def test_nothing_is_kept_of_an_answer_whose_client_has_left() -> None:
    request = CompletionRequest(model="m", prompts=[PROMPT], n=CHOICES, top_logprobs=TOP_K)
    tracemalloc.start()
    try:
        held, buffers = Held(), Buffers(2**30)
        answer = WholeAnswer(request, Envelope(request, 1), settings().gateway, buffers)
        _fill(answer, request)
        filled, counted = held.now(), buffers.size
        answer.drop()
        assert held.now() < filled - counted / 2
        assert buffers.size == 0
    finally:
        tracemalloc.stop()


async def test_inspected_answers_are_charged_with_their_memory() -> None:
    request = CompletionRequest(model="m", prompts=[PROMPT], top_logprobs=TOP_K, is_streamed=True)
    gateway = settings({"gateway.stream_buffer_bytes": 2**28}).gateway
    form = InspectorFormat(request, 1)  # type: ignore[abstract]  # it is always streamed
    await _check(lambda asked, buffers: StreamedAnswer(asked, form, gateway, buffers), request)

"""What an answer has of its prompt, held to the scores that it was made of."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gateway.rendering import chunks
from tests.gateway.test_rendering import VOCABULARIES
from tests.in_process.builders import settings
from tokenbus.engines.synthetic import true_prompt_scores
from tokenbus.gateway.answer import Answer, WholeAnswer
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.logprob_writers import prompt_logprobs
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.sse import StreamedAnswer
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.generated.request_pb2 import PromptScoring

VOCABULARY = VOCABULARIES["bytes"]
PROMPT = [104, 105, 256, 0]


def scored(**asked: Any) -> PromptScores:  # noqa: ANN401 - fields of PromptScoring
    scores = true_prompt_scores(1, PROMPT, PromptScoring(**asked))
    return replace(scores, alternative_token_ids=scores.alternative_token_ids % 256)  # the vocabulary is small


async def echoed(*, is_streamed: bool, top_logprobs: int | None, n: int = 2) -> list[dict[str, Any]]:
    request = CompletionRequest(
        model="m", prompts=[PROMPT], n=n, top_logprobs=top_logprobs, is_streamed=is_streamed, echoes=["hi\0"]
    )
    maker: type[Answer] = StreamedAnswer if is_streamed else WholeAnswer
    answer = maker(request, Envelope(request, 1), settings().gateway, Buffers(2**30))
    answer.begin(lambda: None)
    rows = [RowShape(key, 0, 2, RowStatus.FINISHED_LENGTH, top_k=top_logprobs or 0) for key in range(1, n + 1)]
    view = RenderedStep(batch(rows, step=1), VOCABULARY)
    for place, choice in enumerate(answer.choices):
        if top_logprobs is not None:
            choice.scored(scored(top_logprobs=top_logprobs), VOCABULARY)
        choice.take(view, place)
    await answer.ready()
    sent = [answer.queue.take(2**30)]
    while not sent[-1].is_last:
        sent.append(answer.queue.take(2**30))
    data = b"".join(each.data for each in sent)
    if not is_streamed:
        choices: list[dict[str, Any]] = json.loads(data)["choices"]
        return choices
    joined: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks(data) for choice in chunk["choices"]):
        whole = joined.setdefault(choice["index"], {"text": "", "logprobs": {}})
        whole["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"].setdefault(name, []).extend(values)
    return list(joined.values())


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
async def test_choices_begin_with_the_prompt(top_logprobs: int | None, *, is_streamed: bool) -> None:
    for choice in await echoed(is_streamed=is_streamed, top_logprobs=top_logprobs):
        assert choice["text"].startswith("hi")
        if top_logprobs is None:
            continue
        lists, scores = choice["logprobs"], scored(top_logprobs=top_logprobs)
        assert lists["tokens"][:4] == ["h", "i", "", "\x00"]
        first, *values = lists["token_logprobs"][:4]
        assert (first, np.float32(values).tolist()) == (None, scores.logprobs.tolist())
        assert lists["top_logprobs"][0] is None
        assert all(name in top for name, top in zip(lists["tokens"][1:4], lists["top_logprobs"][1:4], strict=True))
        assert lists["text_offset"][:5] == [0, 1, 2, 2, 3]
        assert {len(each) for each in lists.values()} == {6}


@pytest.mark.parametrize("asked", [{"top_logprobs": 0}, {"top_logprobs": 2}, {"token_ids": [7, 9, 200]}])
def test_prompt_logprobs_say_what_the_scores_hold(asked: dict[str, Any]) -> None:
    scores = scored(**asked)
    first, *others = json.loads(b"[%b]" % b",".join(prompt_logprobs(scores, VOCABULARY)))
    assert first is None
    for place, position in enumerate(others):
        own = position[str(scores.token_ids[place])]
        assert (np.float32(own["logprob"]), own["rank"]) == (scores.logprobs[place], scores.ranks[place])
        pairs = zip(scores.alternative_token_ids[place].tolist(), scores.alternative_logprobs[place], strict=True)
        for number, (token, logprob) in enumerate(pairs, 1):
            found = position[str(token)]
            if token != scores.token_ids[place]:
                assert np.float32(found["logprob"]) == logprob
                assert found["rank"] == (None if "token_ids" in asked else number)


def test_first_positions_that_are_not_scored_are_null() -> None:
    found = json.loads(b"[%b]" % b",".join(prompt_logprobs(scored(top_logprobs=1, first_position=3), VOCABULARY)))
    assert [each is None for each in found] == [True, True, True, False]


LONG = [place % 256 for place in range(2000)]
"""A prompt whose scores take several turns of the event loop."""
OF_LONG = {"prompt_logprobs": {"wants_prompt_logprobs": True}, "echo": {"echoes": ["hi"], "top_logprobs": 20}}


def begun(**asked: Any) -> tuple[WholeAnswer, RenderedStep]:  # noqa: ANN401 - fields of a CompletionRequest
    request = CompletionRequest(model="m", prompts=[LONG], **asked)
    answer = WholeAnswer(request, Envelope(request, 1), settings().gateway, Buffers(2**30))
    answer.begin(lambda: None)
    scores = true_prompt_scores(1, LONG, PromptScoring(top_logprobs=20))
    answer.choices[0].scored(replace(scores, alternative_token_ids=scores.alternative_token_ids % 256), VOCABULARY)
    view = RenderedStep(batch([RowShape(1, 0, 1, RowStatus.FINISHED_LENGTH, top_k=20)]), VOCABULARY)
    return answer, view


@pytest.mark.parametrize("asked", OF_LONG.values(), ids=OF_LONG)
async def test_others_have_their_tokens_while_a_long_prompt_is_written(asked: dict[str, Any]) -> None:
    answer, view = begun(**asked)
    request = CompletionRequest(model="m", prompts=[[1]], is_streamed=True)
    stream = StreamedAnswer(request, Envelope(request, 1), settings().gateway, Buffers(2**30))
    stream.begin(lambda: None)
    order: list[str] = []

    async def write() -> None:
        await answer.ready()
        order.append("answer")

    async def read() -> None:
        for _ in range(5):
            await stream.ready()
            assert stream.queue.take().data
            order.append("token")

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        tasks.create_task(read())
        answer.choices[0].take(view, 0)
        while len(order) < 6:
            stream.choices[0].take(RenderedStep(batch([RowShape(2, len(order))]), VOCABULARY), 0)
            await asyncio.sleep(0)
    assert order == [*["token"] * 5, "answer"]
    (choice,) = json.loads(answer.queue.take(2**30).data)["choices"]
    scores = choice["prompt_logprobs"] if "wants_prompt_logprobs" in asked else choice["logprobs"]["top_logprobs"]
    of_prompt = scores[: len(LONG)]
    assert of_prompt[0] is None
    assert all(20 <= len(each) <= 21 for each in of_prompt[1:])


async def test_long_prompt_is_echoed_part_by_part_as_its_client_reads() -> None:
    """Of a stream no more is made than the client reads, and rows that come meanwhile stand behind it."""
    request = CompletionRequest(model="m", prompts=[LONG], echoes=["hi"], top_logprobs=20, is_streamed=True)
    gateway = settings({"gateway.stream_buffer_bytes": 20_000}).gateway
    stream = StreamedAnswer(request, Envelope(request, 1), gateway, Buffers(2**30))
    stream.begin(lambda: None)
    scores = true_prompt_scores(1, LONG, PromptScoring(top_logprobs=20))
    stream.choices[0].scored(replace(scores, alternative_token_ids=scores.alternative_token_ids % 256), VOCABULARY)
    for position, status in enumerate((RowStatus.ACTIVE, RowStatus.FINISHED_LENGTH)):
        row = RowShape(1, position, 1, status, top_k=1)
        stream.choices[0].take(RenderedStep(batch([row]), VOCABULARY), 0)
    sent = [stream.queue.take().data]
    while stream.queue.has_parts:
        assert max(map(len, sent)) < 100_000
        sent.append(stream.queue.take().data)
    assert len(sent) > 10
    assert stream.error is None
    found = [choice for chunk in chunks(b"".join(sent)) for choice in chunk["choices"]]
    assert [each["finish_reason"] for each in found] == [None] * (len(found) - 1) + ["length"]
    assert sum(len(each["logprobs"]["tokens"]) for each in found) == len(LONG) + 2
    assert found[-2]["logprobs"]["text_offset"] == [2]


@pytest.mark.parametrize("asked", OF_LONG.values(), ids=OF_LONG)
async def test_answer_that_ends_early_writes_no_more_of_its_prompt(asked: dict[str, Any]) -> None:
    answer, view = begun(**asked)
    answer.choices[0].take(view, 0)
    writing = asyncio.create_task(answer.ready())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not writing.done()
    answer.end(ApiError(503, "over", code="stopping"))
    await writing
    assert answer.error is not None
    assert (answer.error.message, answer.queue.size) == ("over", 0)

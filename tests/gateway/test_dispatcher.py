"""Dispatcher: each request's rows go to its choice, and its error after them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.client.test_client import Processor, meeting
from tests.in_process.builders import generate_of, settings
from tests.support.waiting import turns, until
from tokenbus import Turn
from tokenbus.gateway import dispatcher as module
from tokenbus.gateway.api_keys import Caller
from tokenbus.gateway.buffers import Buffers, SendQueue
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.dispatcher import Dispatcher
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.event_writer import EventStream
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.sse import StreamedAnswer
from tokenbus.gateway.vocabulary import Vocabulary, vocabulary_of
from tokenbus.logs import DeduplicatedLog
from tokenbus.metrics.families import Histogram
from tokenbus.testing import RowShape
from tokenbus_contracts import PromptScores, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate


class _Choice:
    cached_tokens: int | None = None
    turns: Sequence[Turn] = ()

    def __init__(self, most: int = 1000, on_row: Callable[[], None] = lambda: None) -> None:
        self.stream = EventStream()
        self.tokens = 0
        self.most = most
        self.seen: list[int | str] = []
        self.on_row = on_row

    def take(self, view: RenderedStep, place: int) -> bool:
        self.tokens = min(self.most, self.tokens + view.counts[place])
        self.seen.append(self.tokens)
        self.on_row()
        return True

    def scored(self, scores: PromptScores, vocabulary: Vocabulary) -> None:
        """Prompts do not matter here."""

    def end(self, error: ApiError) -> None:
        self.seen.append(error.message)


@asynccontextmanager
async def _running(buffers: Buffers | None = None) -> AsyncIterator[tuple[Processor, Dispatcher, Caller]]:
    processor, client, _ = await meeting({"client.drain_timeout_ms": 0})
    chosen = settings().gateway
    async with client:
        await processor.welcome()
        beside = (buffers or Buffers(2**30), DeduplicatedLog(), Histogram())
        dispatcher = Dispatcher(client, vocabulary_of("numbers"), chosen, *beside)
        running = asyncio.create_task(dispatcher.run())
        await turns()
        yield processor, dispatcher, Caller(None, chosen, time.monotonic)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _answer(*choices: _Choice) -> Any:  # noqa: ANN401 - the part of an answer that the dispatcher uses
    queue = SendQueue(2**30, lambda: None, Buffers(2**30))
    return cast("Any", SimpleNamespace(choices=choices, queue=queue, who=""))


@pytest.mark.parametrize(("emitted", "most", "told"), [(7, 1000, 7), (30, 12, 12)])
async def test_error_tells_how_many_tokens_were_handed_out(emitted: int, most: int, told: int) -> None:
    async with _running() as (processor, dispatcher, caller):
        choice = _Choice(most)
        await dispatcher.open([5], [generate_of(5)], _answer(choice), caller)
        await processor.body("generate")
        for place in range(emitted):
            processor.rows(RowShape(5, place, 1))
        processor.fails(5, ErrorCode.ERROR_CODE_GAP, "lost")
        await turns()
        assert choice.seen[-1] == f"lost (after {told} tokens)"
        assert len(dispatcher) == 0


async def test_error_comes_after_the_rows_before_it_without_a_task_or_a_timer() -> None:
    async with _running() as (processor, dispatcher, caller):
        tasks = len(asyncio.all_tasks())
        choices = [_Choice() for _ in range(20)]
        await dispatcher.open(range(5, 25), map(generate_of, range(5, 25)), _answer(*choices), caller)
        assert len(asyncio.all_tasks()) == tasks
        await processor.body("generate")
        processor.rows(*(RowShape(key, 0, 2) for key in range(5, 25)))
        processor.rows(*(RowShape(key, 2, 1) for key in range(5, 25)))
        for key in range(5, 25):
            processor.fails(key, ErrorCode.ERROR_CODE_ENGINE, "broke")
        await turns()
        assert [choice.seen for choice in choices] == [[2, 3, "broke (after 3 tokens)"]] * 20


async def test_aborted_request_takes_its_callers_room_until_the_bus_has_ended_it() -> None:
    async with _running() as (processor, dispatcher, caller):
        await dispatcher.open([5], [generate_of(5)], _answer(_Choice()), caller)
        await processor.body("generate")
        dispatcher.close([5])
        await processor.body("abort")
        assert len(caller._open) == 1
        processor.rows(RowShape(5, 0, 0, RowStatus.ABORTED))
        await turns()
        assert len(caller._open) == 0


@pytest.mark.parametrize("tokens_of_the_other", [1, 8])
async def test_rows_of_an_ended_request_evict_no_answer(tokens_of_the_other: int) -> None:
    buffers = Buffers(
        8 * 2080
    )  # an eighth may wait before it is handed out: more than a step's small row, less than two
    async with _running(buffers) as (processor, dispatcher, caller):
        choice, closed = _Choice(), _Choice()
        answer = _Holder(choice, buffers)
        buffers.join(answer)
        await dispatcher.open([5], [generate_of(5)], answer, caller)
        await dispatcher.open([6], [generate_of(6)], _answer(closed), caller)
        dispatcher.close([6])
        await turns()
        processor.rows(RowShape(5, 0, 1), RowShape(6, 0, tokens_of_the_other))
        await turns()
        assert (answer.evictions, choice.seen, closed.seen) == (0, [1], [])
        assert dispatcher.backlog.size == 0


async def test_steps_that_came_while_the_gateway_stood_still_are_delivered_before_an_answer_ends() -> None:
    buffers = Buffers(8 * 5000)  # two steps may wait
    async with _running(buffers) as (processor, dispatcher, caller):
        choice = _Choice()
        answer = _Holder(choice, buffers)
        buffers.join(answer)
        await dispatcher.open([5], [generate_of(5)], answer, caller)
        await processor.body("generate")
        for position in range(30):
            processor.rows(RowShape(5, position, 1))
        await turns()
        assert (answer.evictions, choice.seen) == (0, list(range(1, 31)))
        assert dispatcher.backlog.size == 0


class _Holder(StreamedAnswer):
    def __init__(self, choice: _Choice, buffers: Buffers, most: int = 1000) -> None:
        request = CompletionRequest(model="m", prompts=[[1]])
        super().__init__(request, Envelope(request, 1), settings().gateway, buffers)
        self.queue = SendQueue(most, self._overflow, buffers)
        self.choices: Any = [choice]
        self.evictions = 0

    def evict(self, _size: int) -> None:
        self.evictions += 1
        self._close()


async def test_scores_are_charged_before_they_are_asked_for() -> None:
    """Scores may hold a quarter of what answers may; what is reserved is free again once it is written or dropped."""
    buffers = Buffers(4000)
    async with _running(buffers) as (processor, dispatcher, caller):
        first = _Holder(_Choice(), buffers, most=10)
        await dispatcher.open([5], [generate_of(5)], first, caller, 900)
        assert (first.error, first.queue.size, buffers.reserved) == (None, 900, 900)
        with pytest.raises(ApiError, match=r"at most 1000 bytes at once .*, got 900 and 101 more") as refused:
            await dispatcher.open([6], [generate_of(6)], _answer(_Choice()), caller, 101)
        assert refused.value.status == 429
        await processor.body("generate")
        first.queue.drop()
        assert (buffers.size, buffers.reserved) == (0, 0)
        await dispatcher.open([6], [generate_of(6)], _answer(_Choice()), caller, 101)
        await processor.body("generate")


async def test_answer_learns_that_its_request_goes_on_at_another_worker() -> None:
    async with _running() as (processor, dispatcher, caller):
        choice = _Choice()
        generate = generate_of(5, continuation_policy=0)
        await dispatcher.open([5], [generate], _answer(choice), caller)
        await processor.body("generate")
        processor.rows(RowShape(5, 0, 1))
        processor.fails(5, ErrorCode.ERROR_CODE_WORKER_LOST, "gone")
        key = (await processor.body("generate")).generate.request_id
        processor.rows(RowShape(key, 1, 1, RowStatus.FINISHED_STOP))
        await turns()
        assert choice.seen == [1, 2]
        assert [(turn.begin, turn.request_id, turn.reason) for turn in choice.turns] == [
            (0, 5, ""),
            (1, key, "worker_lost"),
        ]


class _Slow:
    """The order in which rows are handed out, each of which takes milliseconds; `-` stands for other tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: int = 1) -> None:
        self.order = ""
        self._each = each
        self._milliseconds = 0
        monkeypatch.setattr(module, "monotonic", lambda: self._milliseconds / 1024)

    def choice(self, name: str) -> _Choice:
        return _Choice(on_row=lambda: self.spend(name))

    def spend(self, name: str) -> None:
        self.order += name
        self._milliseconds += self._each

    async def watch(self) -> None:
        while True:
            self.order += "-" * (not self.order.endswith("-"))
            await asyncio.sleep(0)


async def test_rows_of_one_answer_wait_for_no_backlog_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(monkeypatch)
    async with _running() as (processor, dispatcher, caller):
        many, one = [slow.choice("a") for _ in range(100)], slow.choice("b")
        await dispatcher.open(range(5, 105), map(generate_of, range(5, 105)), _answer(*many), caller)
        await dispatcher.open([200], [generate_of(200)], _answer(one), caller)
        await processor.body("generate")
        watching = asyncio.create_task(slow.watch())
        for position in range(2):
            processor.rows(*(RowShape(key, position, 1) for key in (*range(5, 105), 200)))
        await turns(100)
        watching.cancel()
        assert [choice.seen for choice in (*many, one)] == [[1, 2]] * 101
        assert max(map(len, slow.order.split("-"))) <= 12
        assert slow.order.count("a", 0, slow.order.rindex("b")) < 20
        assert dispatcher.backlog.size == 0


async def test_answer_with_the_most_rows_that_wait_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, buffers = _Slow(monkeypatch, each=20), Buffers(8 * 12_000)
    async with _running(buffers) as (processor, dispatcher, caller):
        answers = [_Holder(slow.choice(name), buffers) for name in "ab"]
        answers[0].choices = [slow.choice("a") for _ in range(30)]
        for key, answer in ((5, answers[0]), (100, answers[1])):
            buffers.join(answer)
            keys = range(key, key + len(answer.choices))
            await dispatcher.open(keys, map(generate_of, keys), answer, caller)
            answer.begin(partial(dispatcher.close, keys))
        await processor.body("generate")
        for position in range(2):
            processor.rows(*(RowShape(key, position, 1) for key in (*range(5, 35), 100)))
            await until(lambda: slow.order, every=0)
        await turns(100)
        assert [answer.evictions for answer in answers] == [1, 0]


@pytest.mark.parametrize("ends", [False, True])
async def test_requests_of_an_answer_are_sent_a_few_at_a_time(
    ends: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other tasks run meanwhile. An answer that ends sends no further request, and takes no room for it."""
    slow = _Slow(monkeypatch)
    async with _running() as (processor, dispatcher, caller):
        keys, answer = range(5, 25), _answer(*(_Choice() for _ in range(20)))

        def made() -> Iterator[Generate]:
            for key in keys:
                slow.spend("g")
                yield generate_of(key)

        watching = asyncio.create_task(slow.watch())
        opening = asyncio.create_task(dispatcher.open(keys, made(), answer, caller))
        await until(lambda: slow.order.count("g") > 8, every=0)
        assert (len(dispatcher), len(caller._open)) == (20, 20)
        if ends:
            answer.queue.close()
        await opening
        watching.cancel()
        assert (len(dispatcher) < 20) == ends
        assert len(caller._open) == len(dispatcher)
        assert max(map(len, slow.order.split("-"))) <= 8
        dispatcher.close(keys)
        await processor.body("generate")


async def test_rows_that_wait_keep_their_order_and_are_free_when_their_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = _Slow(monkeypatch)
    async with _running() as (processor, dispatcher, caller):
        choices = [slow.choice("a") for _ in range(40)]
        keys = range(5, 45)
        await dispatcher.open(keys, map(generate_of, keys), _answer(*choices), caller)
        await processor.body("generate")
        for position in range(3):
            processor.rows(*(RowShape(key, position, 1) for key in keys))
        for key in keys:
            processor.fails(key, ErrorCode.ERROR_CODE_ENGINE, "broke")
        await until(lambda: len(slow.order) > 20, every=0)
        for choice in choices:  # a row that came now would wait behind those
            assert choice.stream.is_held == (choice.tokens < 3)
        dispatcher.close(keys[:10])
        await turns(100)
        assert [choice.seen for choice in choices[10:]] == [[1, 2, 3, "broke (after 3 tokens)"]] * 30
        assert (len(dispatcher), dispatcher.backlog.size) == (0, 0)

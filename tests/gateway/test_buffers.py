"""What waits for a client's socket: in order, bounded, and past the queue where the socket has room."""

import asyncio

import pytest

from tests.in_process.builders import settings
from tokenbus.gateway.buffers import Buffers, Sending, SendQueue
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.sse import StreamedAnswer


async def _next(queue: SendQueue) -> Sending:
    await queue.ready()
    return queue.take()


async def test_what_waits_is_sent_together_and_in_order() -> None:
    queue = SendQueue(100, lambda: None, Buffers(2**30))
    queue.put(b"a", 1)
    queue.put(b"b", 2)
    first = await _next(queue)
    assert (first.data, first.produced_at_ns, first.is_last) == (b"ab", [1, 2], False)
    queue.put(b"c")
    queue.close()
    queue.put(b"too late")
    last = await _next(queue)
    assert (last.data, last.is_last) == (b"c", True)


async def test_bound_is_told() -> None:
    """Above the bound `on_full` is called once and may still put a last chunk."""
    told = []

    def full() -> None:
        told.append(queue.length)
        queue.put(b"!")
        queue.close()

    queue = SendQueue(50, full, Buffers(2**30))
    queue.put(b"abc")
    assert not told
    queue.put(b"defghi")
    assert told == [9]
    assert (await _next(queue)).data == b"abcdefghi!"
    assert queue.size == 0


async def test_chunks_pass_by_only_while_nothing_waits() -> None:
    written: list[bytes] = []
    room = True

    def write(chunk: bytes, *_produced_at_ns: int) -> bool:
        if room:
            written.append(chunk)
        return room

    queue = SendQueue(100, lambda: None, Buffers(2**30))
    queue.write = write
    queue.put(b"nobody waits yet")
    assert not written
    assert (await _next(queue)).data == b"nobody waits yet"
    waiting = asyncio.create_task(_next(queue))
    await asyncio.sleep(0)
    queue.put(b"1")
    room = False
    queue.put(b"2")
    room = True
    queue.put(b"3")
    assert (await waiting).data == b"23"
    assert written == [b"1"]


@pytest.mark.parametrize("has_room", [True, False])
async def test_gathered_chunks_are_written_at_once(has_room: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """What is put between `gather` and `flush` is one write, with the times of all; without room it waits in order."""
    written: list[tuple[bytes, tuple[int, ...]]] = []

    def write(chunk: bytes, *produced_at_ns: int) -> bool:
        if has_room:
            written.append((chunk, produced_at_ns))
        return has_room

    queue = SendQueue(100, lambda: None, Buffers(2**30))
    queue.write = write
    waiting = asyncio.create_task(_next(queue))
    await asyncio.sleep(0)
    queue.gather()
    queue.put(b"1", 11)
    queue.put(b"2", 12)
    queue.close()
    assert not written
    queue.flush()
    last = await waiting
    assert last.is_last
    assert (written, last.data) == (([(b"12", (11, 12))], b"") if has_room else ([], b"12"))


async def test_what_waits_can_be_thrown_away_until_it_is_taken() -> None:
    buffers = Buffers(2**30)
    queue = SendQueue(10**6, lambda: None, buffers)
    queue.put(b"a" * 200_000)
    assert queue.length == 200_000 <= queue.size == buffers.size
    taken = queue.take()
    assert len(taken.data) < 100_000
    assert not taken.is_last
    assert queue.length == 200_000 - len(taken.data) <= queue.size == buffers.size
    queue.drop()
    assert (queue.size, buffers.size) == (0, 0)


class _Answer(StreamedAnswer):
    """An answer that holds what it says, and frees it when it ends."""

    def __init__(self, buffers: Buffers, held: int) -> None:
        request = CompletionRequest(model="m", prompts=[[1]])
        super().__init__(request, Envelope(request, 1), settings().gateway, buffers)
        self.is_evicted = False
        self.size_said = 0
        buffers.join(self)
        self.queue.hold(held)

    def evict(self, size: int) -> None:
        self.is_evicted, self.size_said = True, size
        self.queue.drop()


def test_who_holds_the_most_ends_first() -> None:
    buffers = Buffers(100)
    answers = [_Answer(buffers, held) for held in (5, 40, 10, 30)]
    assert not any(answer.is_evicted for answer in answers)
    last = _Answer(buffers, 25)
    assert [answer.is_evicted for answer in [*answers, last]] == [False, True, False, False, False]
    assert (buffers.size, buffers.evicted) == (70, 1)
    buffers.evict(1, beside={answers[0]: 100})
    assert (answers[0].is_evicted, answers[0].size_said) == (True, 105)
    assert buffers.evicted == 2


def test_who_leaves_the_most_unread_ends_alone() -> None:
    """An answer that is not whole yet has nothing that its client could have read, and one that is needs no more."""
    buffers = Buffers(2**30)
    collected, whole, read, unread, most = (_Answer(buffers, held) for held in (50_000, 0, 0, 0, 0))
    for answer, size in ((whole, 40_000), (read, 2900), (unread, 3000), (most, 4000)):
        answer.queue.put(b"a" * size)
    whole.queue.close()
    answers = [collected, whole, read, unread, most]
    for ended in ({most}, {most, unread}, {most, unread}):
        buffers.evict_unread(3000)
        assert {each for each in answers if each.is_evicted} == ended


def test_an_answer_is_evicted_once() -> None:
    """One whose socket stays full after its end counts once, and the next time the one after it ends."""
    buffers = Buffers(2**30)
    second, first = _Answer(buffers, 10), _Answer(buffers, 20)
    first.queue.unsent = second.queue.unsent = lambda: 1000
    buffers.evict_unread(1)
    assert (first.is_evicted, second.is_evicted, buffers.evicted) == (True, False, 1)
    buffers.evict_unread(1)
    assert (second.is_evicted, buffers.evicted) == (True, 2)
    buffers.evict_unread(1)
    assert buffers.evicted == 2

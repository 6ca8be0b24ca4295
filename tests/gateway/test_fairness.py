"""FairTurns, FairQueue, BodyRoom and AdmissionLimiter: no client has more than its share while others wait."""

import asyncio
import contextlib
import itertools
from contextlib import AsyncExitStack

import pytest

from tests.support.waiting import turns
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.fairness import SHORT_BYTES, AdmissionLimiter, BodyRoom, FairQueue, FairTurns


class Asking:
    def __init__(self) -> None:
        self.turns = FairTurns(1, 7)
        self.order: list[str] = []
        self.stack = AsyncExitStack()

    async def ask(self, who: str) -> None:
        async with self.turns.of(who):
            self.order.append(who)
            await asyncio.sleep(0)


async def test_clients_have_one_turn_after_the_other() -> None:
    asking = Asking()
    async with asking.turns.of("first"):
        tasks = [asyncio.create_task(asking.ask(who)) for who in "aaaabbc"]
        await turns()
        assert not asking.order
    await asyncio.gather(*tasks)
    assert asking.order == list("abcabaa")


async def test_turn_of_a_client_that_left_goes_to_the_next() -> None:
    asking = Asking()
    async with asking.turns.of("first"):
        left, comes_and_leaves, stays = (asyncio.create_task(asking.ask(who)) for who in "abc")
        await turns()
        left.cancel()
        await turns()
    comes_and_leaves.cancel()  # its turn has come, and it does not know yet
    await asyncio.gather(left, comes_and_leaves, return_exceptions=True)
    await asyncio.wait_for(stays, 60)
    assert asking.order == ["c"]
    await asyncio.wait_for(asking.ask("d"), 60)


async def test_who_waits_for_the_most_is_refused_first() -> None:
    asking = Asking()
    async with asking.turns.of("first"):
        many = [asyncio.create_task(asking.ask("a")) for _ in range(256)]
        await turns()
        with pytest.raises(ApiError, match="at most 256, got one more") as refused:
            await asking.ask("a")
        assert (refused.value.status, refused.value.retry_after_ms) == (429, 7)
        other = asyncio.create_task(asking.ask("b"))
        await turns()
        assert [each.done() for each in many] == [False] * 255 + [True]
    await other
    assert len(await asyncio.gather(*many, return_exceptions=True)) == 256
    assert asking.order[:2] == ["a", "b"]


class Bodies:
    def __init__(self, largest: int) -> None:
        self.room = BodyRoom(largest, 7)
        self.let_go = asyncio.Event()

    async def hold(self, who: str, size: int) -> None:
        async with self.room.hold(who) as held:
            for part in range(0, size + 1, max(1, size // 3)):
                held.grow_to(part)
            await self.let_go.wait()


async def test_newest_body_of_who_holds_the_most_is_refused() -> None:
    bodies = Bodies(100_000)
    full = [asyncio.create_task(bodies.hold("a", 100_000 + SHORT_BYTES)) for _ in range(8)]
    short = [asyncio.create_task(bodies.hold("a", SHORT_BYTES)) for _ in range(100)]
    await turns()
    assert not any(each.done() for each in full + short)
    other = asyncio.create_task(bodies.hold("b", 120_000))
    await turns()
    assert [each.done() for each in full] == [False] * 6 + [True] * 2
    with pytest.raises(ApiError, match="at most 800000 bytes of all clients at once") as refused:
        await full[-1]
    assert (refused.value.status, refused.value.retry_after_ms) == (429, 7)
    bodies.let_go.set()
    await asyncio.gather(other, *full, *short, return_exceptions=True)
    again = [asyncio.create_task(bodies.hold("c", 100_000 + SHORT_BYTES)) for _ in range(8)]
    await asyncio.gather(*again)


async def test_body_that_is_done_before_it_is_refused_is_done() -> None:
    room = BodyRoom(100, 7)
    async with room.hold("a") as held:
        held.grow_to(SHORT_BYTES + 801)
    await asyncio.sleep(0)
    async with room.hold("a") as held:
        held.grow_to(SHORT_BYTES + 800)


async def test_other_cancellation_is_passed_on() -> None:
    bodies = Bodies(100)
    held = asyncio.create_task(bodies.hold("a", SHORT_BYTES + 9))
    await turns()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held


async def _begin(limiter: AdmissionLimiter, number: int, begun: list[int]) -> None:
    await limiter.next()
    begun.append(number)


async def test_alone_nobody_waits() -> None:
    limiter, begun = AdmissionLimiter(2), list[int]()
    one = _begin(limiter, 1, begun)
    with contextlib.suppress(StopIteration):
        one.send(None)
    assert begun == [1]


async def test_burst_begins_a_few_at_a_time() -> None:
    limiter, begun = AdmissionLimiter(4), list[int]()
    tasks = [asyncio.create_task(_begin(limiter, number, begun)) for number in range(20)]
    seen = [0]
    for _ in tasks:
        await asyncio.sleep(0)
        seen.append(len(begun))
    assert begun == list(range(20))
    assert max(after - before for before, after in itertools.pairwise(seen)) == 4
    await asyncio.gather(*tasks)


async def test_one_begins_at_a_time_where_they_take_long() -> None:
    limiter, begun = AdmissionLimiter(4), list[int]()

    async def begin(number: int) -> None:
        await _begin(limiter, number, begun)
        limiter.spent(0.002)

    tasks = [asyncio.create_task(begin(number)) for number in range(20)]
    seen = [0]
    while len(begun) < len(tasks):
        await asyncio.sleep(0)
        seen.append(len(begun))
    grown = [after - before for before, after in itertools.pairwise(seen) if after > before]
    assert grown[:5] == [4, 1, 4, 1, 4]
    await asyncio.gather(*tasks)


async def test_who_leaves_takes_no_turn() -> None:
    limiter, begun = AdmissionLimiter(1), list[int]()
    tasks = [asyncio.create_task(_begin(limiter, number, begun)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [0, 2, 3]


def _slices(queue: FairQueue[str], count: int, done: str) -> str:
    """Return which answers have the next slices; those in `done` have no more work then."""
    order = ""
    for _ in range(count):
        who, answer = queue.take()
        order += answer
        queue.give_back(who, answer, has_more=answer not in done)
    return order


def test_clients_and_their_answers_have_one_slice_after_the_other() -> None:
    queue = FairQueue[str]()
    for who, answer in (("A", "a"), ("A", "b"), ("A", "c"), ("B", "x")):
        queue.add(who, answer)
    assert _slices(queue, 10, "") == "axbxcxaxbx"


def test_who_was_up_to_date_is_next() -> None:
    queue = FairQueue[str]()
    for answer in "abc":
        queue.add("A", answer)
    assert _slices(queue, 4, "") == "abca"
    queue.add("A", "d")
    queue.add("B", "x")
    assert _slices(queue, 4, "dx") == "xdbc"
    queue.add("A", "d")
    assert _slices(queue, 2, "d") == "da"
    assert queue.answers
    assert _slices(queue, 3, "abc") == "bca"
    assert not queue.answers

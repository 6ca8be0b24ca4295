"""AdmissionLimiter: a burst of new requests begins a few at a time, and what else runs has its turn between."""

import asyncio
import contextlib
import itertools

from tokenbus_services.gateway.routes import AdmissionLimiter


async def _begin(turns: AdmissionLimiter, number: int, begun: list[int]) -> None:
    await turns.next()
    begun.append(number)


async def test_alone_nobody_waits() -> None:
    turns, begun = AdmissionLimiter(2), list[int]()
    one = _begin(turns, 1, begun)
    with contextlib.suppress(StopIteration):
        one.send(None)
    assert begun == [1]


async def test_burst_begins_a_few_at_a_time() -> None:
    turns, begun = AdmissionLimiter(4), list[int]()
    tasks = [asyncio.create_task(_begin(turns, number, begun)) for number in range(20)]
    seen = [0]
    while len(begun) < len(tasks):
        await asyncio.sleep(0)
        seen.append(len(begun))
    assert begun == list(range(20))
    assert max(after - before for before, after in itertools.pairwise(seen)) == 4
    await asyncio.gather(*tasks)


async def test_who_leaves_takes_no_turn() -> None:
    turns, begun = AdmissionLimiter(1), list[int]()
    tasks = [asyncio.create_task(_begin(turns, number, begun)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [0, 2, 3]

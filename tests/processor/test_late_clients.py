"""A processor restarts and its clients come late: rows that nobody has asked for wait for them."""

import asyncio
from collections.abc import AsyncIterator

import tokenbus
from tokenbus import testing

_TOKENS = 30
_STEP_SECONDS = 0.1


async def ids_of(tokens: AsyncIterator[tokenbus.Token]) -> list[int]:
    return [token.id async for token in tokens]


def truth(key: int, first: int = 0) -> list[int]:
    found: list[int] = testing.true_tokens(key, first, _TOKENS).ids.tolist()
    return found


async def test_rows_wait_for_clients_that_come_after_the_restart() -> None:
    """Rows come to a new processor before their clients do, the last row too: each client gets all, once, in order.

    One comes back by itself; another died, and its next life takes up its requests.
    """
    async with testing.bus(step_seconds=_STEP_SECONDS) as bus:
        doomed = await bus.add_client("doomed")
        kept = [bus.client.generate([1], max_tokens=_TOKENS, request_id=key) for key in (1, 2)]
        left = [doomed.generate([1], max_tokens=_TOKENS, request_id=key) for key in (3, 4)]
        kept_ids = asyncio.gather(*map(ids_of, kept))
        had = [[(await bus.until(anext(generation))).id for _ in range(5)] for generation in left]
        bus.line(bus.client).hold()
        await bus.lose_client(doomed)
        await bus.restart_processor()
        await bus.advance(2 * _TOKENS * _STEP_SECONDS)  # less than a request may be unclaimed
        steps, waiting = bus.worker.steps, bus.processor.registry.table.open_requests()
        assert {request.id for request in waiting} == {1, 2, 3, 4}
        assert not any(request.is_claimed for request in waiting)
        bus.line(bus.client).release()
        assert await bus.until(kept_ids) == [truth(1), truth(2)]
        heir = await bus.add_client("doomed")
        rest = asyncio.gather(*(ids_of(heir.resume(key, 5)) for key in (3, 4)))
        assert await bus.until(rest) == [truth(3)[5:], truth(4)[5:]]
        assert had == [truth(3)[:5], truth(4)[:5]]
        assert bus.worker.steps == steps  # all of it was there before any client was
        await bus.advance(1)
        assert not bus.processor.registry.table.open_requests()

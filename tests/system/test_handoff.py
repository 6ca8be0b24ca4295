"""Requests that change hands, pause, end early, or come at the wrong time, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.waiting import until
from tests.system.asking import all_exact, all_failed, ask, begun, resumed
from tests.system.deployment import Deployment, Overrides
from tests.system.hand_made import MadeRow, step
from tests.system.inprocess import trio
from tokenbus.client import Client
from tokenbus.processor import Processor
from tokenbus.worker import Publisher
from tokenbus_contracts import Row, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode

KEYS = tuple(range(101, 133))


@asynccontextmanager
async def publisher(deployment: Deployment, name: str, role: str) -> AsyncIterator[Publisher]:
    """Run a worker of some role that a test publishes for."""
    settings = deployment.settings(worker__id=name, worker__role=role, worker__drain_timeout_ms=5000)
    async with Publisher(settings) as made:
        yield made


def prefilled(keys: tuple[int, ...] = KEYS) -> list[MadeRow]:
    """Return the prefill node's last rows: a first token each, and what it proposes for the next ones."""
    return [MadeRow(key, 0, 1, RowStatus.HANDED_OFF, proposals=(key, key + 1), top_k=2) for key in keys]


def publish_decoded(to: Publisher, keys: tuple[int, ...] = KEYS, steps: int = 20) -> None:
    """Publish the decode node's rows: three tokens a step from the second token on."""
    for number in range(steps):
        status = RowStatus.FINISHED_LENGTH if number == steps - 1 else RowStatus.ACTIVE
        to.publish(step(number + 1, [MadeRow(key, 1 + 3 * number, 3, status, top_k=number % 3) for key in keys]))


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_handed_off_requests_get_all_rows_and_all_tokens(deployment: Deployment, first: str) -> None:
    """Case 27: every request handed off gets every token, whichever worker's rows arrive first."""
    async with (
        Processor(deployment.settings()) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "prefill", "prefill") as prefill,
        publisher(deployment, "decode", "decode") as decode,
    ):
        if first == "prefill":
            prefill.publish(step(1, prefilled()))
            asked = await resumed(client, processor, KEYS)
            await begun(asked)
            publish_decoded(decode)
        else:
            publish_decoded(decode)
            await until(lambda: processor.registry.router.counts.early >= len(KEYS))
            prefill.publish(step(1, prefilled()))
            asked = await resumed(client, processor, KEYS)
        await all_exact(asked, 61)


async def test_proposals_reach_whoever_asks_for_rows(deployment: Deployment) -> None:
    """What the prefill node proposes arrives with its row, for each request its own."""
    async with (
        Processor(deployment.settings(processor__handoff_timeout_ms=60_000)) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "prefill", "prefill") as prefill,
        publisher(deployment, "decode", "decode") as decode,
    ):
        prefill.publish(step(1, prefilled()))
        await until(lambda: all(map(processor.registry.table.knows, KEYS)))
        rows = {key: client.resume(key, 0).rows() for key in KEYS}
        firsts: dict[int, Row] = {key: await anext(each) for key, each in rows.items()}
        publish_decoded(decode)
        for each in rows.values():
            assert [row.token_ids.size async for row in each] == [3] * 20
    found = {key: row.proposal_token_ids.tolist() for key, row in firsts.items()}
    assert found == {key: [key, key + 1] for key in KEYS}


async def test_handed_off_to_nobody_ends_with_an_error(deployment: Deployment) -> None:
    """Without a decode worker, a request that was handed off ends when its time is over, and says how far it came."""
    patient: Overrides = {"processor__unclaimed_timeout_ms": 60_000}
    async with (
        Processor(deployment.settings(processor__handoff_timeout_ms=200, **patient)) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "prefill", "prefill") as prefill,
    ):
        prefill.publish(step(1, [MadeRow(key, 0, 1) for key in KEYS]))
        asked = await resumed(client, processor, KEYS)
        await begun(asked)
        prefill.publish(step(2, [MadeRow(key, 1, 1, RowStatus.HANDED_OFF) for key in KEYS]))
        await all_failed(asked, ErrorCode.ERROR_CODE_HANDOFF)
        assert {each.audit.position for each in asked} == {2}


async def test_abort_in_flight_ends_a_request_and_not_its_neighbours(deployment: Deployment) -> None:
    """Requests aborted while tokens are on the way end as aborted, after true tokens; others get all of theirs."""
    async with trio(deployment) as three:
        doomed, others = ask(three.client, 16, 600_000), ask(three.client, 16, 600)
        await begun(doomed)
        for each in doomed:
            three.client.abort(each.tokens.request_id)
            three.client.abort(each.tokens.request_id)
        for each in doomed:
            audit = await each.ended()
            assert audit.is_exact
            assert audit.error is None
            assert each.tokens.status is RowStatus.ABORTED
        await all_exact(others, 600)
        await until(lambda: not three.publisher.session.requests)

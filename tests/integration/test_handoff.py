"""Requests that change hands, pause, end early, or come at the wrong time, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.asking import Asked, all_exact, all_failed, ask, begun, resumed, wanted
from tests.integration.deployment import Deployment, Overrides
from tests.integration.hand_made import MadeRow, step
from tests.integration.inprocess import trio
from tests.support.waiting import until
from tokenbus_contracts import BatchKind, Row, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.client import Client
from tokenbus_services.processor import Processor
from tokenbus_services.worker import Publisher

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


async def test_preempted_request_goes_on_where_it_was(deployment: Deployment) -> None:
    """Cases 7 and 22: a preempted row has no token, its neighbours go on, and resumed it misses nothing."""
    async with (
        Processor(deployment.settings()) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "worker", "mixed") as worker,
    ):
        worker.publish(step(1, [MadeRow(1, 0, 3), MadeRow(2, 0, 3)]))
        asked = await resumed(client, processor, (1, 2))
        worker.publish(step(2, [MadeRow(1, 3, 0, RowStatus.PREEMPTED), MadeRow(2, 3, 3)]))
        worker.publish(step(3, [MadeRow(2, 6, 3)]))
        worker.publish(step(4, [MadeRow(1, 3, 0, RowStatus.PREFILLING), MadeRow(2, 9, 3)]))
        ended = RowStatus.FINISHED_STOP
        worker.publish(step(5, [MadeRow(2, 12, 3, ended), MadeRow(1, 3, 6)]))
        worker.publish(step(6, [MadeRow(1, 9, 6, ended)]))
        await all_exact(asked, 15)


async def test_frames_that_were_in_flight_at_preemption_are_settled_by_position(deployment: Deployment) -> None:
    """Case 22: tokens that an engine computes again after preemption are given once; ones it leaves out are a gap."""
    async with (
        Processor(deployment.settings()) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "worker", "mixed") as worker,
    ):
        worker.publish(step(1, [MadeRow(1, 0, 6), MadeRow(2, 0, 6)]))
        again, left_out = await resumed(client, processor, (1, 2))
        worker.publish(step(2, [MadeRow(1, 6, 0, RowStatus.PREEMPTED), MadeRow(2, 6, 0, RowStatus.PREEMPTED)]))
        worker.publish(step(3, [MadeRow(1, 3, 6, RowStatus.FINISHED_STOP), MadeRow(2, 9, 3)]))
        await all_exact([again], 9)
        await all_failed([left_out], ErrorCode.ERROR_CODE_GAP)
        assert left_out.audit.position == 6


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


async def test_unknown_request_is_told_to_be_unknown(deployment: Deployment) -> None:
    """A client that resumes a request that no worker has gets an error, once its worker could have come back."""
    async with trio(deployment, processor__handoff_timeout_ms=200, processor__unclaimed_timeout_ms=200) as three:
        await all_failed([Asked(three.client.resume(4711, 0))], ErrorCode.ERROR_CODE_UNKNOWN_REQUEST)


async def test_ended_request_cannot_be_resumed(deployment: Deployment) -> None:
    """A client that resumes a request too late gets an error: it has ended, and with how many tokens."""
    async with trio(deployment) as three:
        (asked,) = ask(three.client, 1, 30)
        await all_exact([asked], 30)
        audit = await Asked(three.client.resume(asked.tokens.request_id, 30), 30).ended()
        assert audit.error is not None
        assert audit.error.code == ErrorCode.ERROR_CODE_UNKNOWN_REQUEST
        assert audit.error.emitted_tokens == 30


async def test_key_in_use_is_refused_and_its_owner_unharmed(deployment: Deployment) -> None:
    """A second client that asks with the key of an open request is refused; the first gets every token."""
    async with (
        trio(deployment) as three,
        Client(deployment.settings(client__drain_timeout_ms=0, **three.addresses)) as other,
    ):
        (asked,) = ask(three.client, 1, 900)
        await begun([asked])
        again = await Asked(other.generate(wanted(900, key=asked.tokens.request_id))).ended()
        assert again.error is not None
        assert again.error.code == ErrorCode.ERROR_CODE_DUPLICATE_REQUEST
        await all_exact([asked], 900)


async def test_late_rows_reach_nobody(deployment: Deployment) -> None:
    """Rows of a request that has ended are counted and delivered to no consumer, and its neighbours get theirs."""
    async with (
        Processor(deployment.settings()) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "worker", "mixed") as worker,
    ):
        worker.publish(step(1, [MadeRow(1, 0, 3, RowStatus.FINISHED_STOP), MadeRow(2, 0, 3)]))
        asked = await resumed(client, processor, (1, 2))
        worker.publish(step(2, [MadeRow(1, 3, 3), MadeRow(2, 3, 3, RowStatus.FINISHED_STOP)]))
        await all_exact(asked[:1], 3)
        await all_exact(asked[1:], 6)
        assert processor.registry.router.counts.late == 1


async def test_draft_that_comes_too_late_harms_nobody(deployment: Deployment) -> None:
    """A draft that comes when its step was given out without it is refused, and no request ends."""
    async with (
        Processor(deployment.settings()) as processor,
        Client(deployment.settings(client__drain_timeout_ms=0)) as client,
        publisher(deployment, "worker", "mixed") as worker,
    ):
        worker.publish(step(1, [MadeRow(1, 0, 3)], draft_follows=True))
        worker.publish(step(2, [MadeRow(1, 3, 3)]))
        worker.publish(step(3, [MadeRow(1, 6, 3)]))
        worker.publish(step(1, [MadeRow(1, 0, 3)], BatchKind.DRAFT))
        worker.publish(step(4, [MadeRow(1, 9, 3, RowStatus.FINISHED_STOP)]))
        await all_exact(await resumed(client, processor, [1]), 12)
        assert processor.refused_messages.by_rule.total() == 1

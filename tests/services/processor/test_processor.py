"""Processor in one process: requests and new requests, their deadlines, and how it leaves."""

import asyncio

import pytest

from tests.services.builders import generate_of, ids, settings
from tests.services.processor.live import QUICK, running, started
from tests.support.waiting import soon, turns
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import ContractError, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason
from tokenbus_services.bus import AddressError
from tokenbus_services.delivery import RequestFailedError, RequestTokens, Token
from tokenbus_services.processor import Processor

FINISHED, ABORTED = RowStatus.FINISHED_LENGTH, RowStatus.ABORTED


async def taken(tokens: RequestTokens) -> list[Token]:
    return [token async for token in tokens]


def code(raised: pytest.ExceptionInfo[RequestFailedError]) -> int:
    return raised.value.code


async def test_request_is_iterated_over_from_its_first_row() -> None:
    """A request's iterator yields its tokens in order and ends with it, whichever client submitted the request."""
    async with running() as made:
        reading = asyncio.create_task(taken(made.processor.request(5)))
        await turns()
        await made.worker.publish([RowShape(5, 0, 2), RowShape(6, 0, 1)])
        await made.worker.publish([RowShape(5, 2, 1, FINISHED)])
        assert [token.id for token in await soon(reading)] == ids(5, 0, 3)


async def test_request_from_a_position_on() -> None:
    """Tokens before the position are left out, and nothing after it (case 14)."""
    async with running() as made:
        await made.worker.publish([RowShape(5, 0, 3)])
        tokens = made.processor.request(5, position=2)
        await made.worker.publish([RowShape(5, 3, 1, FINISHED)])
        assert [token.position for token in await soon(taken(tokens))] == [2, 3]


async def test_request_that_a_client_has_is_not_lost() -> None:
    """A request can be iterated over here although it went elsewhere before: further rows come here."""
    async with running() as made:
        made.processor.generate(generate_of(5))
        request = made.processor.registry.table.get(5)
        assert request is not None
        made.processor.registry.table.contexts[request.slot] = None
        tokens = made.processor.request(5)
        await made.worker.publish([RowShape(5, 0, 1, FINISHED)])
        assert len(await soon(taken(tokens))) == 1


async def test_new_request_goes_to_a_worker_and_its_tokens_come_back() -> None:
    async with running() as made:
        tokens = made.processor.generate(generate_of(5, 3))
        asked = (await made.worker.heard("generate")).generate
        assert asked.deadline_unix_ms == made.processor.clock.unix_ms() + 600_000
        asked.ClearField("deadline_unix_ms")
        assert asked == generate_of(5, 3)
        await made.worker.publish([RowShape(5, 0, 3, FINISHED)])
        assert [token.id for token in await soon(taken(tokens))] == ids(5, 0, 3)


async def test_request_that_is_wrong_or_cannot_be_taken_is_refused_at_once() -> None:
    """A request that breaks its bounds, or finds no worker, is an error where it is asked for, and leaves nothing."""
    async with running() as made:
        with pytest.raises(ContractError, match="top_logprobs"):
            made.processor.generate(generate_of(5, top_logprobs=500))
        with pytest.raises(RequestFailedError) as refused:
            made.processor.generate(generate_of(5, model="other"))
        assert code(refused) == ErrorCode.ERROR_CODE_NO_WORKER
        assert len(made.processor.registry.table) == 0


async def test_abort_ends_a_request_at_its_worker() -> None:
    async with running() as made:
        tokens = made.processor.generate(generate_of(5))
        made.processor.abort(5)
        made.processor.abort(99)
        assert (await made.worker.heard("abort")).abort.request_key == 5
        await made.worker.publish([RowShape(5, 0, 0, ABORTED)])
        assert await soon(taken(tokens)) == []
        assert tokens.status is ABORTED


async def test_standstill_of_the_process_loses_nobody() -> None:
    async with running() as made:
        made.clock.advance(60.0)
        await turns()
        assert "worker-0" in made.processor.workers.by_id


@pytest.mark.parametrize("policy", ["end", "wait"])
async def test_slow_iterator(policy: str) -> None:
    """An iterator that takes too little ends, or slows its worker and loses nothing (case 20)."""
    async with running(slow_consumer=policy, request_buffer_rows=2, credit_items=4) as made:
        tokens = made.processor.generate(generate_of(5))
        for position in range(4):
            await made.worker.publish([RowShape(5, position, 1)])
        await made.pass_time(0.3)
        stream = made.processor.workers.by_id["worker-0"].stream
        if policy == "end":
            with pytest.raises(RequestFailedError) as failed:
                await soon(taken(tokens))
            assert code(failed) == ErrorCode.ERROR_CODE_SLOW_CLIENT
            return
        granted = stream.credit.through_sequence
        while made.worker.sequence < granted:
            await made.worker.publish([RowShape(5, made.worker.sequence, 1)])
        await made.pass_time(0.3)
        assert stream.credit.through_sequence == granted
        found = [await soon(anext(tokens)) for _ in range(made.worker.sequence)]
        assert [token.id for token in found] == ids(5, 0, made.worker.sequence)
        await made.pass_time(0.3)
        assert stream.credit.through_sequence > granted


async def test_defect_in_one_message_or_tick_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of our own while a message or the time is looked at is logged; what comes next is handled."""
    async with running() as made:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(made.processor.worker_connections, "_take", fail)
            await made.worker.publish(row_shapes([1]))
        with monkeypatch.context() as patched:
            patched.setattr(made.processor.registry, "expire", fail)
            made.clock.advance(0.1)
            await turns()
        assert made.processor.is_listening
        tokens = made.processor.request(5)
        made.worker.sequence = 0
        await made.worker.publish([RowShape(5, 0, 1, FINISHED)])
        assert len(await soon(taken(tokens))) == 1
        await made.pass_time(0.2)
    assert caplog.text.count("ZeroDivisionError") >= 1


async def test_leaving_waits_for_open_requests() -> None:
    async with running(drain_timeout_ms=60_000) as made:
        tokens = made.processor.generate(generate_of(5))
        draining = asyncio.create_task(made.processor.drain())
        await turns()
        with pytest.raises(RequestFailedError) as refused:
            made.processor.generate(generate_of(6))
        assert code(refused) == ErrorCode.ERROR_CODE_OVERLOADED
        await made.pass_time(1.0)
        assert not draining.done()
        await made.worker.publish([RowShape(5, 0, 1, FINISHED)])
        await made.pass_time(0.2)
        await soon(draining)
        assert len(await soon(taken(tokens))) == 1


async def test_leaving_has_an_end_and_so_has_every_iteration() -> None:
    """Requests still open when a processor closes end with an error; its worker is asked to wait for the next one."""
    made = await started(drain_timeout_ms=1000)
    tokens = made.processor.generate(generate_of(5))
    reading = asyncio.create_task(taken(tokens))
    leaving = asyncio.create_task(made.processor.__aexit__(None, None, None))
    await made.pass_time(0.9)
    assert not leaving.done()
    made.clock.advance(0.2)
    await soon(leaving)
    with pytest.raises(RequestFailedError, match="the processor was closed"):
        await soon(reading)
    assert (await made.worker.heard("goodbye")).goodbye.reason == GoodbyeReason.GOODBYE_REASON_RESTARTING


async def test_leaving_after_an_error_is_at_once() -> None:
    made = await started(drain_timeout_ms=60_000)
    tokens = made.processor.generate(generate_of(5))
    await soon(made.processor.__aexit__(ZeroDivisionError, ZeroDivisionError(), None))
    assert tokens.has_ended


async def test_taken_address_is_a_clear_error() -> None:
    """A processor that starts at a taken address fails with a clear error, and keeps nothing bound (case 8)."""
    async with running() as made:
        chosen = settings(QUICK)
        with pytest.raises(AddressError, match="taken"):
            await Processor(chosen, transport=made.transport).__aenter__()
        free = settings(QUICK | {"bus.workers_address": "memory://elsewhere"})
        with pytest.raises(AddressError, match="taken"):
            await Processor(free, transport=made.transport).__aenter__()
        async with Processor(
            settings(QUICK | {"bus.workers_address": "memory://elsewhere", "bus.clients_address": "memory://others"}),
            transport=made.transport,
        ) as other:
            assert other.workers_address == "memory://elsewhere"


@pytest.mark.parametrize("name", ["processor", "mine"])
async def test_each_life_of_a_processor_has_a_name_of_its_own(name: str) -> None:
    """Each start of a processor gets an id of its own, whatever its configured name (case 21)."""
    names = {Processor(settings(QUICK | {"processor.id": name})).id for _ in range(3)}
    assert len(names) == 3
    assert all(each.startswith(f"{name}-") for each in names)

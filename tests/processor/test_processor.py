"""Processor in one process: what it survives, and how it leaves."""

import asyncio

import pytest

from tests.in_process.builders import generate_of, settings
from tests.processor.live import QUICK, running, started
from tests.support.waiting import soon, turns
from tokenbus.bus import AddressError
from tokenbus.processor import Processor
from tokenbus.testing import RowShape, row_shapes
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.stream_pb2 import GoodbyeReason

FINISHED = RowStatus.FINISHED_LENGTH


async def test_standstill_of_the_process_loses_nobody() -> None:
    async with running() as made:
        made.clock.advance(60.0)
        await turns()
        assert "worker-0" in made.processor.workers.by_id


async def test_defect_in_one_message_or_tick_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as made:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(made.processor.worker_connections, "_handle", fail)
            await made.worker.publish(row_shapes([1]))
        with monkeypatch.context() as patched:
            patched.setattr(made.processor.registry, "expire", fail)
            made.clock.advance(0.1)
            await turns()
        assert made.processor.is_listening
        made.worker.sequence = 0
        await made.worker.publish([RowShape(5, 0, 1, FINISHED)])
        assert made.processor.registry.table.buffered_rows == 1
        await made.pass_time(0.2)
    assert caplog.text.count("ZeroDivisionError") >= 1


async def test_leaving_waits_for_open_requests() -> None:
    async with running(drain_timeout_ms=60_000) as made:
        made.processor.dispatch.submit(generate_of(5), 1, 1)
        draining = asyncio.create_task(made.processor.drain())
        await made.pass_time(1.0)
        assert not draining.done()
        await made.worker.publish([RowShape(5, 0, 1, FINISHED)])
        await made.pass_time(0.2)
        await soon(draining)


async def test_leaving_has_an_end() -> None:
    made = await started(drain_timeout_ms=1000)
    made.processor.dispatch.submit(generate_of(5), 1, 1)
    leaving = asyncio.create_task(made.processor.__aexit__(None, None, None))
    await made.pass_time(0.9)
    assert not leaving.done()
    made.clock.advance(0.2)
    await soon(leaving)
    assert (await made.worker.heard("goodbye")).goodbye.reason == GoodbyeReason.GOODBYE_REASON_RESTARTING


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

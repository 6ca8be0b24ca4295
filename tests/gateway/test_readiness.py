"""What the gateway knows of workers, and whether requests would find one."""

import asyncio

import pytest

from tests.in_process.builders import settings
from tests.processor.live import QUICK
from tests.support.waiting import soon
from tokenbus.bus.memory import MemoryTransport
from tokenbus.client import Client
from tokenbus.gateway.processor_status import StatusCache, bus_panel, takes_requests
from tokenbus.processor import Processor
from tokenbus_contracts.generated.client_pb2 import ProcessorStatus, WorkerStatus
from tokenbus_contracts.generated.stream_pb2 import WorkerRole


@pytest.mark.parametrize(
    ("workers", "models", "is_ready"),
    [
        ([], ("tokenbus",), False),
        ([("mixed", "m", True)], ("tokenbus",), True),
        ([("mixed", "m", False)], ("tokenbus",), False),
        ([("mixed", "m", True)], ("other",), False),
        ([("mixed", "m", True)], ("other", "m"), True),
        ([("decode", "m", True)], ("tokenbus",), False),
        ([("prefill", "m", True)], ("tokenbus",), False),
        ([("prefill", "m", True), ("decode", "m", False)], ("tokenbus",), False),
        ([("prefill", "m", True), ("decode", "n", True)], ("tokenbus",), False),
        ([("prefill", "m", True), ("decode", "m", True)], ("tokenbus",), True),
    ],
)
def test_it_is_ready_when_a_request_would_come_to_its_end(
    workers: list[tuple[str, str, bool]],
    models: tuple[str, ...],
    is_ready: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    found = [
        WorkerStatus(role=f"WORKER_ROLE_{role.upper()}", model=model, is_connected=is_connected)
        for role, model, is_connected in workers
    ]
    assert takes_requests(found, models) is is_ready


async def test_callers_share_an_answer_until_one_wants_a_new_one() -> None:
    chosen = settings(QUICK)
    transport = MemoryTransport(chosen.bus)
    async with Processor(chosen, transport=transport), Client(chosen, transport=transport) as client:
        cache = StatusCache(client, 60_000)
        first, *others = await soon(asyncio.gather(*(cache.get() for _ in range(10))))
        assert all(other is first for other in others)
        assert bus_panel(first, 1.0) == {
            "workers": [],
            "processor": {"open_requests": 0, "steps": 0, "tokens": 0, "refused": 0, "lost": 0},
            "clients": 1,
            "at": 1.0,
        }
        new = await soon(cache.get(is_new=True))
        assert new is not first
        assert await soon(cache.get()) is new


async def test_processor_that_does_not_answer_is_an_error() -> None:
    chosen = settings(QUICK)
    async with Client(chosen, transport=MemoryTransport(chosen.bus)) as client:
        with pytest.raises(match="no processor sent its status within 10 ms"):
            await StatusCache(client, 10).get()


def test_panel_shows_each_worker() -> None:
    status = ProcessorStatus(
        connected_clients=1,
        workers=[
            WorkerStatus(
                worker_id="w",
                processor_id="p",
                epoch=2**63,
                role=WorkerRole.WORKER_ROLE_DECODE,
                is_connected=True,
                open_requests=3,
                draft_tokens=[4, 2],
                accepted_tokens=[3, 1],
            )
        ],
    )
    (worker,) = bus_panel(status, 0.0)["workers"]
    assert (worker["id"], worker["role"], worker["epoch"]) == ("w", "decode", str(2**63))
    assert (worker["open_requests"], worker["acceptance_by_head"]) == (3, [0.75, 0.5])
    assert worker["processor"] == "p"

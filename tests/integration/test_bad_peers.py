"""Unknown peers at the processor's addresses: each is refused and counted, and workers and clients notice nothing."""

import logging

import pytest

from tests.integration import bad_peers
from tests.integration.asking import Witness
from tests.integration.bad_peers import Stranger, client_hello, item, say_over_tcp, worker_hello
from tests.integration.deployment import Deployment, Overrides
from tests.integration.inprocess import trio
from tests.support.waiting import until
from tokenbus_contracts.generated.client_pb2 import ServerFrame
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame, RefusalReason

ADDRESSES = ("bus__workers_address", "bus__clients_address")
QUICK: Overrides = {"bus__heartbeat_timeout_ms": 2000}


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("data", [bad_peers.RANDOM, bad_peers.HTTP], ids=["random bytes", "http"])
async def test_what_is_not_zeromq_is_cut_off(
    deployment: Deployment, address: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Random bytes and HTTP are cut off by the transport, counted, and logged once however often they come."""
    caplog.set_level(logging.WARNING)
    async with trio(deployment) as three:
        witness = Witness(three.client)
        for _ in range(3):
            await say_over_tcp(str(three.addresses[address]), data)
        await until(lambda: three.processor.refused_connections == 3)
        await witness.noticed_nothing()
    assert sum(record.message.startswith("connection refused reason") for record in caplog.records) == 1


@pytest.mark.parametrize("address", ADDRESSES)
async def test_half_a_transport_handshake_is_cut_off(deployment: Deployment, address: str) -> None:
    """A peer that begins ZeroMQ's handshake and then says nothing is cut off after the heartbeat's timeout."""
    async with trio(deployment, **QUICK) as three:
        witness = Witness(three.client)
        await say_over_tcp(str(three.addresses[address]), bad_peers.HALF_GREETING)
        await until(lambda: three.processor.refused_connections == 1)
        await witness.noticed_nothing()


@pytest.mark.parametrize(
    ("messages", "refused"),
    [
        ([[b"garbage"], [b""], [b"\xff" * 64], [b"a", b"b", b"c"]] * 5, 20),
        ([[b"\0" * 3_000_000]], 1),
        ([[b"x" * 1000] * 100], 1),
    ],
    ids=["garbage", "oversized frame", "many parts"],
)
@pytest.mark.parametrize("address", ADDRESSES)
async def test_frames_that_are_none_are_refused(
    deployment: Deployment,
    address: str,
    messages: list[list[bytes]],
    refused: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frames that cannot be read are refused with a reason, counted, and logged once a rule."""
    caplog.set_level(logging.WARNING)
    async with trio(deployment) as three:
        witness = Witness(three.client)
        connections = three.processor.worker_connections if address == ADDRESSES[0] else three.processor.clients
        async with Stranger(str(three.addresses[address])) as stranger:
            stranger.say(messages)
            await until(lambda: three.processor.refused_messages.by_rule.total() == refused)
            answer = (ProcessorFrame if address == ADDRESSES[0] else ServerFrame).FromString(await stranger.heard())
        assert answer.refusal.reason == RefusalReason.REFUSAL_REASON_PROTOCOL
        assert connections.refused >= refused
        await witness.noticed_nothing()
    rules = len(three.processor.refused_messages.by_rule)
    assert sum(record.message.startswith("frame refused reason") for record in caplog.records) == rules


@pytest.mark.parametrize("address", ADDRESSES)
async def test_parts_above_the_transports_bound_are_cut_off(deployment: Deployment, address: str) -> None:
    """A part larger than any message may be is not even received: its peer is cut off, and counted."""
    async with trio(deployment, bus__max_part_bytes=2_097_152) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses[address])) as stranger:
            stranger.say([[b"\0" * 2_097_153]])
            await until(lambda: three.processor.refused_connections >= 1)
        await witness.noticed_nothing()


@pytest.mark.parametrize("address", ADDRESSES)
async def test_hello_of_another_major_is_refused_by_name(deployment: Deployment, address: str) -> None:
    """Another major version is refused, with a reason of its own."""
    async with trio(deployment) as three:
        witness = Witness(three.client)
        say, frame = (worker_hello, ProcessorFrame) if address == ADDRESSES[0] else (client_hello, ServerFrame)
        async with Stranger(str(three.addresses[address])) as stranger:
            stranger.say([say(major=2)])
            refusal = frame.FromString(await stranger.heard()).refusal
            assert refusal.reason == RefusalReason.REFUSAL_REASON_SCHEMA_VERSION
        connections = three.processor.worker_connections if address == ADDRESSES[0] else three.processor.clients
        assert connections.refused == 1
        await witness.noticed_nothing()


async def test_worker_that_says_hello_and_no_more_is_lost(deployment: Deployment) -> None:
    """Half a handshake costs a place among the workers until the heartbeat's timeout, and nothing after."""
    async with trio(deployment, **QUICK) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses["bus__workers_address"])) as stranger:
            stranger.say([worker_hello()])
            assert ProcessorFrame.FromString(await stranger.heard()).HasField("welcome")
            await until(lambda: three.processor.workers.lost == 1)
        assert set(three.processor.workers.by_id) == {"worker-0"}
        await witness.noticed_nothing()


async def test_client_that_says_hello_and_no_more_is_forgotten(deployment: Deployment) -> None:
    """Half a handshake of a client is forgotten once it was away for as long as it may be."""
    async with trio(deployment, clients__detached_timeout_ms=1, **QUICK) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses["bus__clients_address"])) as stranger:
            stranger.say([client_hello()])
            assert ServerFrame.FromString(await stranger.heard()).HasField("welcome")
            assert len(three.processor.clients.sessions) == 2
            await until(lambda: len(three.processor.clients.sessions) == 1)
        await witness.noticed_nothing()


async def test_items_before_hello_are_nobodys(deployment: Deployment) -> None:
    """A peer that sends items first is asked to say hello first; the items are not read."""
    async with trio(deployment) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses["bus__workers_address"])) as stranger:
            stranger.say([item(sequence) for sequence in range(1, 100)])
            answer = ProcessorFrame.FromString(await stranger.heard())
        assert answer.refusal.reason == RefusalReason.REFUSAL_REASON_HELLO_FIRST
        await witness.noticed_nothing()
        assert set(three.processor.workers.by_id) == {"worker-0"}


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (1, RefusalReason.REFUSAL_REASON_WORKER_ID_TAKEN),
        (-1, RefusalReason.REFUSAL_REASON_EPOCH_OUTDATED),
    ],
    ids=["a later epoch", "an earlier epoch"],
)
async def test_forged_worker_id_is_refused(deployment: Deployment, later: int, reason: RefusalReason) -> None:
    """No peer takes the id of a worker that is alive, whichever epoch it makes up."""
    async with trio(deployment) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses["bus__workers_address"])) as stranger:
            stranger.say([worker_hello("worker-0", three.publisher.epoch + later)])
            assert ProcessorFrame.FromString(await stranger.heard()).refusal.reason == reason
        assert three.processor.worker_connections.refused == 1
        await witness.noticed_nothing()


async def test_flood_of_items_without_credit_is_refused(deployment: Deployment) -> None:
    """A worker that sends beyond its credit is refused, and what it sent is not kept."""
    async with trio(deployment, processor__credit_items=8) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses["bus__workers_address"])) as stranger:
            stranger.say([worker_hello()])
            assert ProcessorFrame.FromString(await stranger.heard()).HasField("welcome")
            stranger.say([item(sequence) for sequence in range(9, 500)])
            frame = ProcessorFrame.FromString(await stranger.heard())
            while not frame.HasField("refusal"):
                frame = ProcessorFrame.FromString(await stranger.heard())
        assert frame.refusal.reason == RefusalReason.REFUSAL_REASON_PROTOCOL
        assert "item 9: credit goes to item 8" in frame.refusal.message
        await witness.noticed_nothing()


async def test_payload_above_its_bound_is_refused(deployment: Deployment) -> None:
    """An item whose payload is larger than a batch may be is refused, and counted."""
    async with trio(deployment) as three:
        witness = Witness(three.client)
        async with Stranger(str(three.addresses["bus__workers_address"])) as stranger:
            stranger.say([worker_hello()])
            assert ProcessorFrame.FromString(await stranger.heard()).HasField("welcome")
            stranger.say([item(1, b"\0" * 3_000_000)] * 2)
            await until(lambda: three.processor.refused_messages.by_rule["bytes"] >= 1)
        assert three.processor.worker_connections.refused >= 1
        await witness.noticed_nothing()

"""Numbers from a processor: those that are out of range are refused in one line, before anything is done with them."""

from collections import deque
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.client.peer import opened as client_opened
from tests.in_process.builders import generate_of
from tests.worker.peer import opened as worker_opened
from tests.worker.peer import welcome_of
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientWelcome, ServerFrame
from tokenbus_contracts.generated.request_pb2 import Admitted
from tokenbus_contracts.generated.stream_pb2 import (
    Ack,
    Heartbeat,
    ProcessorFrame,
    ReplayRequest,
)

BEYOND = 2**62 + 1
MOST = 2**64 - 1


def snapshot(session: object) -> dict[str, Any]:
    """Return what a session knows, as values that do not change with it."""
    kept: dict[str, Any] = {}
    for name, value in vars(session).items():
        if isinstance(value, Message):
            kept[name] = value.SerializeToString()
        elif isinstance(value, (dict, set, list, deque)):
            kept[name] = repr(value)
        else:
            kept[name] = value
    return kept


@pytest.mark.parametrize(
    "frame",
    [
        ProcessorFrame(welcome=welcome_of(resume_from=5)),
        ProcessorFrame(welcome=welcome_of(heartbeat_timeout_ms=1000)),
        ProcessorFrame(ack=Ack(through_sequence=4)),
        ProcessorFrame(replay=ReplayRequest(first_sequence=3, last_sequence=2)),
        ProcessorFrame(replay=ReplayRequest(first_sequence=1, last_sequence=4)),
        ProcessorFrame(heartbeat=Heartbeat(sent_at_ns=0)),
        ProcessorFrame(generate=generate_of(9, top_logprobs=128)),
    ],
    ids=lambda frame: " ".join(str(frame).split())[:60],
)
def test_worker_refuses_numbers_out_of_range(frame: ProcessorFrame) -> None:
    """Sequences, credit, ranges and times beyond their bounds, or beyond what there is, change nothing at a worker."""
    peer = worker_opened(3)
    assert peer.sequences() == [1, 2, 3]
    before = snapshot(peer.session)
    peer.now += 1
    with pytest.raises(ContractError) as refused:
        peer.session.receive([frame.SerializeToString()], peer.now)
    assert "\n" not in str(refused.value)
    assert snapshot(peer.session) == before


@pytest.mark.parametrize(
    "frame",
    [
        ServerFrame(number=BEYOND, admitted=Admitted(request_key=5, worker_id="w", epoch=1, prompt_tokens=1)),
        ServerFrame(welcome=ClientWelcome(processor_id="other", heartbeat_interval_ms=5, heartbeat_timeout_ms=5)),
        ServerFrame(heartbeat=Heartbeat(sent_at_ns=0)),
    ],
    ids=lambda frame: " ".join(str(frame).split())[:60],
)
def test_client_refuses_numbers_out_of_range(frame: ServerFrame) -> None:
    """Frame numbers, counts and times beyond their bounds change nothing at a client."""
    peer = client_opened()
    peer.requests.open(generate_of(5))
    list(peer.says_all())
    before = snapshot(peer.session), snapshot(peer.requests)
    peer.now += 1
    with pytest.raises(ContractError) as refused:
        peer.session.receive([frame.SerializeToString()], peer.now)
    assert "\n" not in str(refused.value)
    assert (snapshot(peer.session), snapshot(peer.requests)) == before


def test_largest_moments_and_times_are_taken() -> None:
    """What a frame may say goes through: the largest clock of a heartbeat is echoed, and the largest moment kept."""
    worker, client = worker_opened(), client_opened()
    worker.hear(heartbeat=Heartbeat(sent_at_ns=MOST))
    client.hear(heartbeat=Heartbeat(sent_at_ns=MOST))
    client.requests.open(generate_of(5, deadline_unix_ms=MOST, deadline_ms=2**32 - 1))
    for peer in (worker, client):
        list(peer.says_all())
        peer.now += 1.5
        beats = [frame.heartbeat.echo_ns for frame in peer.says_all() if frame.HasField("heartbeat")]
        assert beats == [MOST]

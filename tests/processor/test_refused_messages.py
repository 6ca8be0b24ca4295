"""Refused messages: one line with the reason, the sender, the sequence and the first bytes, and a counter by rule."""

import io
import json
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from tests.in_process.bench import Bench
from tests.in_process.builders import BATCH, EVENT, client_hello
from tests.processor.serving import serving
from tokenbus.logs import DeduplicatedLog, configure
from tokenbus.processor.refused_messages import RefusedMessages
from tokenbus.settings import LogSettings
from tokenbus.testing import ManualClock, RowShape, batch
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, Rule, encode
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.request_pb2 import PromptScoresChunk, RequestEvent

Lines = Callable[[], list[dict[str, Any]]]
ONE = batch([RowShape(1)], step=1, sequence=2)
OTHER = LogprobBatch.of_views(ONE.header, ONE.columns | {"token_ids": ONE.token_ids ^ 1})
NAN = encode(ONE).replace(ONE.logprobs.tobytes(), b"\x00\x00\xc0\x7f")
SCORES = PromptScoresChunk(request_id=1, position=1, prompt_tokens=2, token_ids=bytes(4))


@pytest.fixture
def lines() -> Lines:
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)
    return lambda: [line for line in map(json.loads, stream.getvalue().splitlines()) if "refused" in line["event"]]


@pytest.mark.parametrize(
    ("first", "payload", "rule", "reason"),
    [
        ({}, NAN, "finite", "logprobs[0]: "),
        ({"part": (0, 2), "step_rows": 2}, encode(batch([RowShape(2)], step=1, sequence=2, part=(1, 3), step_rows=3, indices=[1])), "malformed", "header.part_count: "),  # noqa: E501
        ({}, encode(OTHER), "malformed", "payload: the first item for the same part of the step, got something else"),
        ({"draft_follows": True}, encode(batch([RowShape(1, position=5)], step=1, sequence=2, kind=BatchKind.DRAFT)), "malformed", "positions[0]: 0, as in the step's target, got 5"),  # noqa: E501
        ({}, RequestEvent(sequence=2, prompt_scores=SCORES).SerializeToString(), "length", "prompt_scores.logprobs: "),
    ],
    ids=["a bad value", "a part of another step", "another rank's values", "a draft of other rows", "prompt scores"],
)  # fmt: skip
def test_refused_item(first: dict[str, Any], payload: bytes, rule: str, reason: str, lines: Lines) -> None:
    bench = Bench()
    worker = bench.worker()
    worker.publish([RowShape(1)], step=1, **first)
    worker.item(payload, 2, EVENT if reason.startswith("prompt") else BATCH, checksum=crc32(payload))
    (line,) = lines()
    assert (line["level"], line["event"]) == ("warning", "item refused")
    assert (line["stream"], line["epoch"], line["sequence"]) == ("worker-0", 7, 2)
    assert line["reason"].startswith(reason)
    assert (line["first_bytes"], line["bytes"]) == (payload[:64].hex(), len(payload))
    assert bench.core.refused_messages.by_rule == {rule: 1}
    counted = bench.core.intake.refused_items + bench.core.intake.refused_parts + bench.core.worker_connections.refused
    assert counted == (not reason.startswith("payload"))  # which is counted as a divergence
    assert worker.known.stream.counts.missing_drafts == reason.startswith("positions")


def test_refused_frame(lines: Lines) -> None:
    bench, worker, client = serving()
    for connections, peer in (
        (bench.core.worker_connections, worker.peer),
        (bench.core.clients, client.peer),
        (bench.core.clients, b"stranger"),
    ):
        connections.receive(peer, [b"\xff" * 100], 0.0)
    found = lines()
    assert [line["event"] for line in found] == ["frame refused"] * 3
    assert [line.get("stream", line.get("client")) for line in found] == ["worker-0", "client", None]
    assert {(line["first_bytes"], line["bytes"]) for line in found} == {("ff" * 64, 100)}
    assert bench.core.refused_messages.by_rule == {"malformed": 3}


def test_proof_of_a_refused_hello_is_not_shown(lines: Lines) -> None:
    hello = ClientFrame(hello=client_hello(5, proof=b"secret" * 11)).SerializeToString()
    Bench().core.clients.receive(b"peer", [hello], 0.0)
    (line,) = lines()
    assert "proof" in line["reason"]
    assert (line["first_bytes"], line["bytes"]) == ("", len(hello))
    assert b"secret".hex() not in json.dumps(line)


def test_flood_is_one_line_and_a_count(lines: Lines) -> None:
    clock = ManualClock()
    repeated_log = DeduplicatedLog(now=clock.now)
    messages = RefusedMessages(repeated_log)
    error = ContractError("logprobs[1]", "a finite number", float("nan"), rule=Rule.FINITE)
    for sequence in range(1, 1001):
        messages.add("item refused", b"x", error, {"stream": "worker-0"}, sequence=sequence)
    assert messages.by_rule == {"finite": 1000}
    assert len(lines()) == 1
    clock.advance(60)
    repeated_log.expire()
    assert [line["event"] for line in lines()] == ["item refused", "item refused: over"]
    assert lines()[1]["count"] == 1000

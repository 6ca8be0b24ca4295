"""tokenbus tap: the lines and values of items, and that every missing item is counted."""

import argparse
import asyncio
import json
from typing import Any

import pytest

from tests.cli.helpers import (
    BATCH,
    EPOCH,
    EVENT,
    WORKER,
    admitted,
    hello,
    memory_settings,
    payloads,
    publish,
    recording,
    take_all,
)
from tests.support.waiting import soon, until
from tokenbus.bus.memory import MemoryTransport
from tokenbus.cli.tap import item_values, left_out_values, lines_of, tap
from tokenbus.cli.values import Values
from tokenbus.cli.watching import watched
from tokenbus.engines.synthetic import true_prompt_scores, true_tokens
from tokenbus.processor import Processor
from tokenbus.recordings.items import StreamItem
from tokenbus_contracts import decode, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated import request_pb2 as pb
from tokenbus_contracts.generated.control_pb2 import ControlAnswer, EngineState
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

NOW = 10**18 + 10**7 + 2_500_000


def values_of(payload: bytes, kind: PayloadKind = BATCH, *, rows: bool = False) -> Values:
    item = StreamItem(hello(), EPOCH, 4, kind, payload)
    values: Values = json.loads(json.dumps(item_values(item, NOW, rows=rows), allow_nan=False))
    return values


def first_batch() -> bytes:
    return next(payload for _, kind, payload in payloads() if kind == BATCH)


def with_weights(payload: bytes) -> bytes:
    batch = decode(payload)
    return encode(batch.headed(batch.header._replace(weight_version=12)))


def event(**values: Any) -> bytes:  # noqa: ANN401 - whichever the event is
    return write_frame(pb.RequestEvent(sequence=4, **values))


ERROR = pb.RequestError(request_id=5, code=pb.ErrorCode.ERROR_CODE_ENGINE, message="out\nof", emitted_tokens=3)
CACHED = pb.Admitted(request_id=5, worker_id="w", epoch=1, prompt_tokens=48, cached_tokens=32)
UNKNOWN: Any = 99
STEP = "TARGET step 1 part 1/1, 3 rows (3 ACTIVE), 9 tokens"


@pytest.mark.parametrize(
    ("payload", "kind", "line"),
    [
        (first_batch(), BATCH, f"{STEP}, 2.500 ms ago"),
        (with_weights(first_batch()), BATCH, f"{STEP}, weights 12, 2.500 ms ago"),
        (admitted(1, 4), EVENT, "ADMITTED request 0000000000000001, prompt of 1 tokens"),
        (event(admitted=CACHED), EVENT, "ADMITTED request 0000000000000005, prompt of 48 tokens, 32 of them cached"),
        (event(error=ERROR), EVENT, r"ERROR request 0000000000000005 ENGINE after 3 tokens: out\nof"),
        (first_batch()[:-1], BATCH, "REFUSED "),
        (b"xyz", UNKNOWN, "UNKNOWN payload kind 99, 3 bytes"),
    ],
)
def test_item_in_a_line(payload: bytes, kind: PayloadKind, line: str) -> None:
    (found,) = lines_of(values_of(payload, kind))
    assert found.startswith(f"worker-0/7 #4 {line}")


def test_worker_id_is_printed_escaped() -> None:
    (line,) = lines_of(left_out_values(StreamItem(hello("w\n\x1b[2J"), 1, 5, BATCH, b"", missing_items=3)))
    assert line == r"w\n\x1b[2J/1 3 items left out: 2 to 4"


def test_rows_with_their_tokens() -> None:
    values = values_of(first_batch(), rows=True)
    (row,) = [row for row in values["rows"] if row["request_id"] == f"{2:016x}"]
    true = true_tokens(2, 0, 3)
    assert (row["token_ids"], row["logprobs"]) == (true.ids.tolist(), true.logprobs.tolist())
    lines = lines_of(values)
    assert len(lines) == 4
    tokens = " ".join(f"{token}({logprob:.3f})" for token, logprob in zip(true.ids, true.logprobs, strict=True))
    assert f"  request {2:016x} index {row['batch_index']} position 0 ACTIVE: {tokens}" in lines


def test_scores_and_answers_in_a_line() -> None:
    (chunk,) = true_prompt_scores(5, [7, 8, 9], pb.PromptScoring(top_logprobs=2)).chunks()
    values = values_of(event(prompt_scores=chunk), EVENT)
    assert (values["token_ids"], values["position"], values["alternatives"]) == ([8, 9], 1, 2)
    assert lines_of(values) == ["worker-0/7 #4 SCORED request 0000000000000005, its prompt's tokens 1 to 2 of 3"]
    values = values_of(event(prefilled=pb.Prefilled(request_id=5, transfer_state=b"state")), EVENT)
    assert lines_of(values) == ["worker-0/7 #4 PREFILLED request 0000000000000005, 5 bytes for the decode worker"]
    values = values_of(event(session_prompt=pb.SessionPrompt(request_id=5, session="run", prompt_tokens=2)), EVENT)
    assert lines_of(values) == ["worker-0/7 #4 SESSION request 0000000000000005 of run, prompt of 2 tokens"]
    for place, line in (
        (pb.RoutedExperts(request_id=5, file="w.0.experts", offset=7, length=96), "96 bytes at 7 of w.0.experts"),
        (pb.RoutedExperts(request_id=5, missing="no room"), "no room"),
    ):
        values = values_of(event(routed_experts=place), EVENT)
        assert lines_of(values) == [f"worker-0/7 #4 EXPERTS request 0000000000000005: {line}"]
    for error, state, line in (
        ("", EngineState(weight_version=8, is_paused=True), "done; weights 8, paused"),
        ("no folder", EngineState(weight_version=7), "no folder; weights 7"),
    ):
        answer = ControlAnswer(control_key=2, error=error, state=state)
        values = values_of(event(control_answer=answer), EVENT)
        assert lines_of(values) == [f"worker-0/7 #4 CONTROLLED {line}"]


@pytest.mark.parametrize(("window", "last"), [(2, 1), (1000, 100)])
async def test_nothing_is_missing_without_being_said(window: int, last: int) -> None:
    settings = memory_settings(client__window_frames=window)
    transport, stop = MemoryTransport(settings.bus), asyncio.Event()
    shown: list[Values] = []
    options = argparse.Namespace(rows=False, count=0, request=None)
    data = recording(payloads(requests=4, tokens=300), without=range(7, 12))
    async with Processor(settings, transport=transport) as processor:
        steps = asyncio.create_task(take_all(processor))
        tapping = asyncio.create_task(tap(watched(settings, WORKER, stop, transport), options, shown.append))
        await until(lambda: len(processor.clients.watchers))
        await soon(publish(data, settings, transport))
        await until(lambda: shown and int(shown[-1].get("sequence", 0)) >= last)
        stop.set()
        await soon(tapping)
        steps.cancel()
    sequences: list[int] = []
    left_out = [values for values in shown if values["what"] == "left_out"]
    for values in shown:
        if values["what"] == "left_out":
            run = range(int(values["first_sequence"]), int(values["last_sequence"]) + 1)
            assert values["items"] == len(run)
            sequences.extend(run)
        else:
            sequences.append(int(values["sequence"]))
    assert sequences == list(range(1, sequences[-1] + 1))
    if window > 2:  # then what the stream itself does not have is all that is missing
        assert [(values["first_sequence"], values["items"]) for values in left_out] == [("7", 5)]

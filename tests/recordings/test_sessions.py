"""Sessions: what the requests of a session wrote is assembled exactly, and what is missing is named."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenbus.testing
from tests.cli.helpers import hello
from tests.in_process.builders import BATCH, EVENT
from tokenbus.client import Client
from tokenbus.engines.synthetic import true_tokens
from tokenbus.recordings import session_turns
from tokenbus.recordings.items import Recorder, StreamItem
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import Session, read_sessions, sessions_of
from tokenbus.testing import RowShape, batch
from tokenbus.worker.engine_output import session_events
from tokenbus_contracts import RowStatus, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch
from tokenbus_contracts.generated.request_pb2 import (
    Admitted,
    ErrorCode,
    Generate,
    RequestError,
    RequestEvent,
    TokenPrompt,
)
from tokenbus_contracts.generated.stream_pb2 import PayloadKind

STOP = RowStatus.FINISHED_STOP
_PARENT = "request 0000000000000001: parent: a request of this session, got 0000000000000002, "


class Worker:
    """The stream of a worker, an item at a time; each step comes a second after the one before."""

    def __init__(self, worker_id: str = "w0", epoch: int = 7, clock: int = 0) -> None:
        self.hello = hello(worker_id)
        self.epoch, self.clock = epoch, clock
        self.items: list[StreamItem] = []
        self.lost = 0

    def admit(
        self,
        request_id: int,
        prompt: Sequence[int],
        session: str = "s",
        *,
        parent: int = 0,
        tenant: int = 0,
        **turn: Any,  # noqa: ANN401 - as Admitted has them
    ) -> None:
        admitted = Admitted(request_id=request_id, worker_id="w0", epoch=7, prompt_tokens=len(prompt), **turn)
        self.event(RequestEvent(admitted=admitted))
        asked = Generate(request_id=request_id, session=session, parent=parent, owner=5, tenant=tenant)
        asked.tokens.token_ids[:] = prompt
        for event in session_events(asked):
            self.event(event)

    def event(self, event: RequestEvent) -> None:
        event.sequence = len(self.items) + self.lost + 1
        self._add(EVENT, write_frame(event))

    def step(self, *rows: RowShape) -> None:
        self.clock += 1
        made = LogprobBatch.FromString(encode(batch(rows, step=self.clock)))
        made.header.produced_at_ns = self.clock
        self._add(BATCH, made.SerializeToString())

    def _add(self, kind: PayloadKind, payload: bytes) -> None:
        sequence = len(self.items) + self.lost + 1
        self.items.append(StreamItem(self.hello, self.epoch, sequence, kind, payload))

    def lose(self, count: int) -> None:
        self.items = self.items[:-count]
        self.lost += count

    def answer(self, request_id: int, prompt: Sequence[int], tokens: int = 3, **asked: Any) -> list[int]:  # noqa: ANN401
        """Run a request to its end; return the ids of its prompt and its output."""
        self.admit(request_id, prompt, **asked)
        self.step(RowShape(request_id, 0, tokens - 1))
        self.step(RowShape(request_id, tokens - 1, 1, STOP))
        return [*prompt, *written(request_id, tokens)]


def written(request_id: int, tokens: int) -> list[int]:
    return list(map(int, true_tokens(request_id, 0, tokens).ids))


def assembled(*workers: Worker, label: str = "") -> list[Session]:
    with TurnReader(label) as reader:
        for worker in workers:
            expected = 1
            for item in worker.items:
                item.missing_items, expected = item.sequence - expected, item.sequence + 1
                reader.add(item)
        return list(sessions_of(reader))


def only(*workers: Worker) -> Session:
    (session,) = assembled(*workers)
    return session


@pytest.mark.parametrize("buffered", [1, 1 << 16])
def test_agents_turns_are_one_branch(monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    monkeypatch.setattr(session_turns, "_BUFFER_TOKENS", buffered)
    worker = Worker()
    first = worker.answer(1, [10, 11])
    second = worker.answer(2, [*first, 12])
    session = only(worker)
    (branch,) = session.branches
    assert session.is_complete
    assert (session.name.owner, session.name.tenant, session.name.label) == (5, 0, "s")
    assert branch.token_ids.tolist() == second
    assert branch.is_output.tolist() == [False] * 2 + [True] * 3 + [False] + [True] * 3
    true = np.concatenate([true_tokens(request_id, 0, 3).logprobs for request_id in (1, 2)])
    assert np.array_equal(branch.logprobs[branch.is_output], true)
    assert np.isnan(branch.logprobs[~branch.is_output]).all()
    assert branch.requests == [1, 2]
    assert [(each.branch, each.begin, each.output_tokens, each.status) for each in session.requests] == [
        (0, 2, 3, "FINISHED_STOP"),
        (0, 6, 3, "FINISHED_STOP"),
    ]
    data = np.array(second, "<u4").tobytes() + branch.logprobs.astype("<f4").tobytes()
    assert branch.digest == hashlib.sha256(data).hexdigest()


def test_edited_history_begins_a_branch_where_it_differs() -> None:
    worker = Worker()
    first = worker.answer(1, [10, 11])
    edited = [*first[:3], 77, *first[4:], 12]
    second = worker.answer(2, edited)
    whole, other = only(worker).branches
    assert (whole.token_ids.tolist(), other.token_ids.tolist()) == (first, second)
    assert other.is_output.tolist() == [False] * 2 + [True] + [False] * 3 + [True] * 3
    assert other.logprobs[2] == whole.logprobs[2]
    assert other.divergence is not None
    assert (other.divergence.branch, other.divergence.position) == (0, 3)
    assert other.divergence.before == first[3:]
    assert other.divergence.after == edited[3:]


def test_samples_of_one_prompt_are_branches() -> None:
    worker = Worker()
    sequences = [worker.answer(request_id, [10, 11]) for request_id in (1, 2, 3)]
    session = only(worker)
    assert [branch.token_ids.tolist() for branch in session.branches] == sequences
    assert [branch.divergence and branch.divergence.position for branch in session.branches] == [None, 2, 2]


def sample(worker: Worker, request_id: int, tokens: int) -> list[int]:
    """Run a request that writes what request 1 would; return the ids of its prompt and its output."""
    worker.admit(request_id, [10])
    worker.step(RowShape(1, 0, tokens, STOP))
    made = LogprobBatch.FromString(worker.items[-1].payload)
    made.request_ids[:] = [request_id]
    worker.items[-1].payload = made.SerializeToString()
    return [10, *written(1, tokens)]


@pytest.mark.parametrize("parents", [(5, 6), (6, 5)])
def test_samples_that_wrote_the_same_are_continued_by_their_own_requests(parents: Sequence[int]) -> None:
    worker = Worker()
    sample(worker, 5, 3)
    whole = sample(worker, 6, 3)
    for parent in parents:
        worker.answer(parent + 10, [*whole, parent], parent=parent)
    assert [branch.requests for branch in only(worker).branches] == [[5, 15], [6, 16]]


def test_prompt_continues_a_whole_branch_before_it_leaves_a_longer_one() -> None:
    worker = Worker()
    whole = sample(worker, 5, 2)
    sample(worker, 6, 4)
    worker.answer(7, [*whole, 77])
    assert [branch.requests for branch in only(worker).branches] == [[5, 7], [6]]


def test_sessions_of_others_never_merge() -> None:
    worker = Worker()
    others: list[dict[str, Any]] = [{}, {"tenant": 6}, {"session": "t"}]
    for request_id, asked in enumerate(others, start=1):
        worker.answer(request_id, [10], **asked)
    assert [(each.name.tenant, each.name.label) for each in assembled(worker)] == [(0, "s"), (6, "s"), (0, "t")]
    assert [each.name.label for each in assembled(worker, label="t")] == ["t"]


def test_continued_request_has_each_position_from_its_last_turn() -> None:
    """A lost worker wrote three tokens, of which the client had accepted two."""
    lost, other = Worker("w0"), Worker("w1", epoch=8, clock=100)
    lost.admit(1, [10, 11])
    lost.step(RowShape(1, 0, 3))
    other.admit(9, [10, 11], first_request_id=1, turn=1, first_position=2, reason=ErrorCode.ERROR_CODE_WORKER_LOST)
    other.step(RowShape(9, 2, 2, STOP))
    session = only(lost, other)
    (request,) = session.requests
    (branch,) = session.branches
    assert session.is_complete
    assert branch.token_ids.tolist() == [10, 11, *written(1, 2), *written(9, 4)[2:]]
    assert branch.workers == [(2, "w0"), (4, "w1")]
    assert [(each.request_id, each.status, each.reason) for each in request.attempts] == [
        (1, "ACTIVE", ""),
        (9, "FINISHED_STOP", "WORKER_LOST"),
    ]


@pytest.mark.parametrize("clock", [0, 50])
def test_prefill_and_decode_are_two_parts_of_one_output(clock: int) -> None:
    """The decode worker's admission does not say where its part begins, and its clock may be behind."""
    prefill, decode = Worker("p", clock=25), Worker("d", epoch=8, clock=clock)
    prefill.admit(1, [10])
    prefill.step(RowShape(1, 0, 1, RowStatus.HANDED_OFF))
    decode.admit(1, [10])
    decode.step(RowShape(1, 1, 0, RowStatus.PREFILLING))
    decode.step(RowShape(1, 1, 2, STOP))
    session = only(decode, prefill)
    assert session.is_complete
    assert session.branches[0].token_ids.tolist() == [10, *written(1, 3)]
    assert [each.first_position for each in session.requests[0].attempts] == [0, 1]
    assert session.requests[0].status == "FINISHED_STOP"


@pytest.mark.parametrize("buffered", [1, 1 << 16])
def test_request_id_that_is_used_again_is_another_request(monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    monkeypatch.setattr(session_turns, "_BUFFER_TOKENS", buffered)
    worker, other = Worker(), Worker("w1", epoch=8, clock=50)
    first = worker.answer(1, [10, 11])
    second = worker.answer(1, [*first, 12], tokens=5)
    third = other.answer(1, [*second, 13], parent=1)
    worker.answer(1, [14], session="t")
    session, of_other = assembled(worker, other)
    (branch,) = session.branches
    assert session.is_complete
    assert branch.token_ids.tolist() == third
    assert branch.is_output.tolist() == [False] * 2 + [True] * 3 + [False] + [True] * 5 + [False] + [True] * 3
    assert [(each.request_id, each.output_tokens) for each in session.requests] == [(1, 3), (1, 5), (1, 3)]
    assert of_other.branches[0].token_ids.tolist() == [14, *written(1, 3)]


def test_request_id_is_used_again_with_prefill_and_decode() -> None:
    prefill, decode = Worker("p"), Worker("d", epoch=8)
    prompt = [10]
    for _ in range(2):
        prefill.admit(1, prompt)
        prefill.step(RowShape(1, 0, 1, RowStatus.HANDED_OFF))
        decode.clock = prefill.clock
        decode.admit(1, prompt)
        decode.step(RowShape(1, 1, 2, STOP))
        prefill.clock = decode.clock
        prompt = [*prompt, *written(1, 3)]
    (branch,) = only(prefill, decode).branches
    assert branch.token_ids.tolist() == prompt
    assert branch.requests == [1, 1]


def test_decode_part_without_its_prefill_is_incomplete() -> None:
    decode = Worker()
    decode.admit(1, [10])
    decode.step(RowShape(1, 1, 2, STOP))
    assert only(decode).missing == ["request 0000000000000001: output tokens are missing before position 1"]


def test_parent_comes_first_although_its_clock_is_ahead() -> None:
    ahead, behind = Worker("w0", clock=1000), Worker("w1", epoch=8)
    first = ahead.answer(1, [10, 11])
    second = behind.answer(2, [*first, 12], parent=1)
    (branch,) = only(ahead, behind).branches
    assert branch.token_ids.tolist() == second


def test_parents_in_a_cycle_lose_no_request_and_are_named() -> None:
    worker = Worker()
    first = worker.answer(1, [10], parent=2)
    second = worker.answer(2, [*first, 11], parent=1)
    third = worker.answer(3, [*second, 12], parent=3)
    fourth = worker.answer(4, [*third, 13], parent=1)
    session = only(worker)
    assert sorted(each.request_id for each in session.requests) == [1, 2, 3, 4]
    assert fourth in [branch.token_ids.tolist() for branch in session.branches]
    line = "request {:016x}: parent: an earlier request, got {:016x}, whose parents lead back to this one"
    assert sorted(session.missing) == [line.format(*pair) for pair in ((1, 2), (2, 1), (3, 3))]


def saved(path: Path, worker: Worker, items: Sequence[StreamItem]) -> Path:
    recorder = Recorder(worker.epoch, worker.hello)
    path.write_bytes(b"".join(map(recorder.add, items)))
    return path


@pytest.mark.parametrize("order", [(0, 0), (0, 1), (1, 0), (0, 2, 1), (3, 2), (2, 3)])
def test_recordings_of_one_life_may_overlap_in_any_order(tmp_path: Path, order: Sequence[int]) -> None:
    """The same file twice, a copy, parts that overlap, and one with a hole that another one fills."""
    worker = Worker()
    first = worker.answer(1, [10, 11])
    second = worker.answer(2, [*first, 12])
    items = worker.items
    parts = [items, items, items[3:], items[:6]]
    paths = [saved(tmp_path / str(index), worker, part) for index, part in enumerate(parts)]
    (session,) = read_sessions(*(paths[index] for index in order))
    (branch,) = session.branches
    assert session.is_complete
    assert branch.token_ids.tolist() == second
    holed = saved(tmp_path / "holed", worker, [*items[:3], *items[5:]])
    assert next(read_sessions(holed)).missing
    (whole,) = read_sessions(holed, paths[2])
    assert whole.is_complete
    assert whole.branches[0].digest == branch.digest


def test_request_that_began_before_the_recording_is_missing_as_a_parent(tmp_path: Path) -> None:
    """Its rows do not say to which session it belongs, so only a request that names it can tell."""
    worker = Worker()
    first = worker.answer(1, [10, 11])
    worker.answer(2, [*first, 12], parent=1)
    (session,) = read_sessions(saved(tmp_path / "late", worker, worker.items[2:]))
    assert [each.request_id for each in session.requests] == [2]
    line = "request 0000000000000002: parent: a request of this session, got 0000000000000001, a request that is not"
    assert session.missing == [f"{line} recorded"]


def test_items_between_two_recordings_of_one_life_are_missing(tmp_path: Path) -> None:
    worker = Worker()
    first = worker.answer(1, [10, 11])
    worker.answer(2, [*first, 12])
    worker.answer(3, [13])
    parts = worker.items[:4], worker.items[8:]
    (session,) = read_sessions(*(saved(tmp_path / str(part[0].sequence), worker, part) for part in parts[::-1]))
    assert [each.request_id for each in session.requests] == [1, 3]
    assert session.missing == ["4 items of worker w0 are missing while the session ran"]


def unfinished(worker: Worker) -> None:
    worker.admit(1, [10])
    worker.step(RowShape(1, 0, 2))


def aborted(worker: Worker) -> None:
    unfinished(worker)
    worker.step(RowShape(1, 2, 0, RowStatus.ABORTED))


def failed(worker: Worker) -> None:
    unfinished(worker)
    worker.event(RequestEvent(error=RequestError(request_id=1, code=ErrorCode.ERROR_CODE_ENGINE, message="it broke")))


def hole(worker: Worker) -> None:
    unfinished(worker)
    worker.lose(1)
    worker.step(RowShape(1, 2, 1, STOP))


def hidden(worker: Worker) -> None:
    worker.answer(1, [10])
    event = RequestEvent.FromString(worker.items[1].payload)
    event.session_prompt.token_ids = b""
    worker.items[1].payload = write_frame(event)


def later_gap(worker: Worker) -> None:
    worker.answer(1, [10])
    worker.admit(2, [11], "other")
    worker.lose(2)
    worker.step(RowShape(3))


def parent_elsewhere(worker: Worker) -> None:
    worker.answer(2, [10], session="other")
    worker.answer(1, [11], parent=2)


def parent_unknown(worker: Worker) -> None:
    worker.answer(1, [11], parent=2)


@pytest.mark.parametrize(
    ("fault", "missing"),
    [
        (unfinished, ["request 0000000000000001: its end is not recorded"]),
        (aborted, ["request 0000000000000001: it was aborted"]),
        (failed, ["request 0000000000000001: it ended with ENGINE: it broke"]),
        (
            hole,
            [
                "request 0000000000000001: output tokens are missing before position 2",
                "1 items of worker w0 are missing while the session ran",
            ],
        ),
        (hidden, ["request 0000000000000001: its prompt has 1 tokens, and 0 are recorded"]),
        (later_gap, ["2 items of worker w0 are missing while the session ran"]),
        (
            parent_elsewhere,
            [_PARENT + "a request of session 'other'"],
        ),
        (
            parent_unknown,
            [_PARENT + "a request that is not recorded"],
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(fault: Callable[[Worker], None], missing: list[str]) -> None:
    worker = Worker()
    fault(worker)
    (session,) = (each for each in assembled(worker) if each.name.label == "s")
    assert session.missing == missing
    assert not session.is_complete


def elsewhere(begin: int, end: int) -> Worker:
    """Return a worker that lost items between two steps of requests without a session."""
    worker = Worker("w1", epoch=8, clock=begin - 1)
    worker.step(RowShape(8))
    worker.step(RowShape(8, 1))
    worker.lose(1)
    worker.clock = end - 1
    worker.step(RowShape(8, 2))
    return worker


@pytest.mark.parametrize(("begin", "end", "is_named"), [(10, 30, True), (1, 30, True), (1, 9, False), (90, 99, False)])
def test_gap_of_another_worker_is_named_if_the_session_ran_meanwhile(begin: int, end: int, *, is_named: bool) -> None:
    worker = Worker(clock=20)
    worker.answer(1, [10])
    missing = only(worker, elsewhere(begin, end)).missing
    assert missing == ["1 items of worker w1 are missing while the session ran"] * is_named


@pytest.mark.parametrize("size", [1, 15_360, 15_361, 40_000])
def test_prompt_is_published_in_parts_without_fields_of_newer_versions(size: int) -> None:
    newer = TokenPrompt(token_ids=range(size)).SerializeToString() + b"\x10\x05"
    asked = Generate(request_id=1, session="s", tokens=TokenPrompt.FromString(newer))
    parts = [event.session_prompt for event in session_events(asked)]
    assert [part.position for part in parts] == list(range(0, size, 15_360))
    assert {part.prompt_tokens for part in parts} == {size}
    assert np.frombuffer(b"".join(part.token_ids for part in parts), "<u4").tolist() == list(range(size))


def test_tokens_wait_in_a_file_until_their_session_is_read(tmp_path: Path) -> None:
    """Sessions that ran at once, with more tokens than the reader buffers; they come from two recordings."""
    workers = [Worker("w0"), Worker("w1", epoch=8)]
    expected: dict[str, list[int]] = {}
    for worker, ids in zip(workers, (range(1, 41), range(41, 81)), strict=True):
        for request_id in ids:
            worker.admit(request_id, [request_id], f"s{request_id}")
        for position in range(0, 2000, 8):
            worker.step(*(RowShape(request_id, position, 8) for request_id in ids))
        worker.step(*(RowShape(request_id, 2000, 1, STOP) for request_id in ids))
        expected |= {f"s{request_id}": [request_id, *written(request_id, 2001)] for request_id in ids}
    paths = [tmp_path / worker.hello.worker_id for worker in workers]
    for path, worker in zip(paths, workers, strict=True):
        recorder = Recorder(worker.epoch, worker.hello)
        path.write_bytes(b"".join(map(recorder.add, worker.items)))
    found = {each.name.label: each.branches[0].token_ids.tolist() for each in read_sessions(*paths)}
    assert found == expected


@asynccontextmanager
async def recorded() -> AsyncIterator[tuple[Client, list[StreamItem]]]:
    """Run a bus; its items are all there once it has ended."""
    items: list[StreamItem] = []
    async with tokenbus.testing.bus() as bus, bus.client.watch() as watched:

        async def collect() -> None:
            async for item in watched:
                items.append(item)  # noqa: PERF401 - it is cancelled

        collecting = asyncio.create_task(collect())
        yield bus.client, items
        await bus.settle()
        collecting.cancel()


async def test_everything_that_was_asked_for_is_there() -> None:
    """Entropies, masks and the other distribution's logprobs come with the tokens of a real bus."""
    async with recorded() as (client, items):
        generation = client.generate(
            [1, 2], max_tokens=6, top_logprobs=2, session="s", other_logprobs=True, entropies=True, mask_bound=4
        )
        tokens = [token async for token in generation]
        plain = client.generate([1, 2], max_tokens=2, session="s")
        assert len([token async for token in plain]) == 2
    with TurnReader() as reader:
        for item in items:
            reader.add(item)
        (session,) = sessions_of(reader)
    branch, other = session.branches
    assert session.is_complete
    extras = [token.extras for token in tokens if token.extras is not None]
    assert branch.token_ids[2:].tolist() == [token.id for token in tokens]
    assert branch.logprobs[2:].tolist() == [token.logprob for token in tokens]
    assert branch.ranks[2:].tolist() == [token.rank for token in tokens]
    assert branch.other_logprobs[2:].tolist() == [each.other_logprob for each in extras]
    assert branch.entropies[2:].tolist() == [each.entropy for each in extras]
    assert branch.mask_sizes[2:].tolist() == [each.mask_size for each in extras]
    assert [list(mask) for mask in branch.masks[2:]] == [list(each.mask or ()) for each in extras]
    assert np.isnan(other.logprobs).all()
    assert not other.ranks.any()

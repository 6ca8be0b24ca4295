"""vLLM's requests: the columns of their steps, beside a reading row after row, and their keys on the bus."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.test_columns import Lists, Row, batch_of_arrays, lists
from tests.engines.vllm.test_published import VLLM, FinishReason, configuration, output_of, prefilled, scheduled_of
from tokenbus.engines.vllm import request_id
from tokenbus.engines.vllm.request_ids import ARGUMENT, RequestIds
from tokenbus.engines.vllm.requests import Request, Requests
from tokenbus_contracts import RowStatus

WIDTH = 6
STATUSES = {
    FinishReason.STOP: RowStatus.FINISHED_STOP,
    FinishReason.REPETITION: RowStatus.FINISHED_STOP,
    FinishReason.LENGTH: RowStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RowStatus.ABORTED,
    FinishReason.ERROR: RowStatus.UNRECOVERABLE,
}
STOP_TEXTS = {7: "first", 8: "second", 9: "not among the stops that can be told apart"}
"""By the token that ends each."""


class Detokenizer:
    """As vLLM's, of a model whose tokens 7 to 9 are the stop strings."""

    def update(self, tokens: Sequence[int], stop_terminated: bool) -> str | None:  # noqa: FBT001 - vLLM's
        return None if stop_terminated else STOP_TEXTS.get(tokens[0])


@dataclass
class Open:
    """A request, as a reading of one row after the other has it."""

    key: int
    top_k: int | None
    has_stops: bool
    position: int = 0


@dataclass
class Step:
    """What vLLM's scheduler is given in a step, and what it returns."""

    scheduled: Any
    indices: dict[str, int]
    outputs: list[Any]
    logprobs: Lists


class Reference:
    def __init__(self) -> None:
        self.open: dict[str, Open] = {}

    def abort(self, names: Sequence[str]) -> list[Row]:
        ended = [self.open.pop(name) for name in names if name in self.open]
        return [Row(each.key, each.position, status=RowStatus.ABORTED) for each in ended]

    def rows_of(self, step: Step) -> tuple[list[Row], list[str]]:
        rows, stopped, has_output = [], [], set()
        for output in step.outputs:
            has_output.add(output.request_id)
            if output.request_id in self.open:
                rows.append(self._row(step, output))
                if rows[-1].status is not RowStatus.ACTIVE:
                    del self.open[output.request_id]
                    if output.finish_reason is None:
                        stopped.append(output.request_id)
        scheduled = step.scheduled
        silent = [(name, RowStatus.PREFILLING) for name in scheduled.num_scheduled_tokens]
        silent += [
            (name, RowStatus.PREEMPTED)
            for name in (scheduled.preempted_req_ids or set()) - scheduled.num_scheduled_tokens.keys()
        ]
        for name, status in silent:
            if name in self.open and name not in has_output:
                found = self.open[name]
                rows.append(Row(found.key, found.position, status=status))
        return rows, stopped

    def _row(self, step: Step, output: Any) -> Row:  # noqa: ANN401 - as vLLM's
        found, name, reason = self.open[output.request_id], output.request_id, output.finish_reason
        index, status = step.indices.get(name, 0), STATUSES.get(reason, RowStatus.ACTIVE)
        row = Row(found.key, found.position, (), found.top_k, index, status)
        row.stop = 1 if isinstance(output.stop_reason, int) else 0
        if row.status not in {RowStatus.ABORTED, RowStatus.UNRECOVERABLE}:
            row.token_ids = output.new_token_ids
        for place, token in enumerate(row.token_ids):
            is_last_stop = reason is FinishReason.STOP and place == len(row.token_ids) - 1
            if found.has_stops and token in STOP_TEXTS and not is_last_stop:
                row.token_ids, row.status = row.token_ids[: place + 1], RowStatus.FINISHED_STOP
                row.stop = {7: 2, 8: 3}.get(token, 0)
                break
        if row.token_ids:
            drafts = len(step.scheduled.scheduled_spec_decode_tokens.get(name, ()))
            row.drafts = drafts - (step.scheduled.num_invalid_spec_tokens or {}).get(name, 0)
        found.position += len(row.token_ids)
        return row


def values_of(row: Row, logprobs: Lists) -> tuple[list[float], list[int], list[tuple[float, int]]]:
    if row.top_k is None or not row.token_ids:
        return [], [], []
    starts = logprobs.cu_num_generated_tokens
    first = row.index if starts is None else starts[row.index]
    lines = slice(first, first + len(row.token_ids))
    alternatives: list[tuple[float, int]] = []
    for of_line in zip(
        logprobs.logprobs[lines, 1:].tolist(), logprobs.logprob_token_ids[lines, 1:].tolist(), strict=True
    ):
        pairs = list(zip(*of_line, strict=True))[: row.top_k]
        alternatives += sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
    return logprobs.logprobs[lines, 0].tolist(), logprobs.sampled_token_ranks[lines].tolist(), alternatives


class Core:
    """Makes up what a vLLM might do with some requests."""

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.names: list[str] = []
        """Those that vLLM has, in the order of its batch, some of which have ended on the bus."""
        self._begun = 0

    def begin(self) -> Iterator[tuple[str, Open]]:
        for _ in range(self.chance.integers(0, 6)):
            self._begun += 1
            self.names.insert(self.chance.integers(len(self.names) + 1), f"r{self._begun}")
            top_k = [None, 0, 2, WIDTH][self.chance.integers(4)]
            yield f"r{self._begun}", Open(2**63 + self._begun, top_k, bool(self.chance.random() < 0.2))

    def some(self, share: float) -> list[str]:
        return [name for name in self.names if self.chance.random() < share]

    def step(self, *, is_ordinary: bool) -> Step:
        chance, rare = self.chance, 0.0 if is_ordinary else 0.1
        preempted = set(self.some(rare))
        in_step = [name for name in self.names if name not in preempted]
        drafts = {} if is_ordinary else {name: [-1] * int(chance.integers(1, 4)) for name in self.some(0.4)}
        drafts = {name: drafts[name] for name in in_step if name in drafts}
        batch = chance.permutation(in_step).tolist()  # of vLLM's arrays: it moves rows when requests end
        lengths = [1 + len(drafts.get(name, ())) for name in batch]
        starts = (np.cumsum(lengths) - lengths).tolist()
        logprobs = lists(WIDTH, sum(lengths) or 1, starts if drafts else None, int(chance.integers(2**31)))
        outputs: list[Any] = []
        for name in [*in_step, *([] if is_ordinary else self.some(0.02))]:
            tokens: list[int] = []
            if name in in_step and chance.random() >= rare:  # else a chunk of a prompt, or an error
                index = batch.index(name)
                count = int(chance.integers(1, lengths[index] + 1))
                tokens = logprobs.logprob_token_ids[starts[index] : starts[index] + count, 0].tolist()
            reason = FinishReason(int(chance.integers(5))) if chance.random() < rare else None
            if name not in in_step:
                reason = FinishReason.ERROR
            stop_reason = [None, 5, "text"][chance.integers(3)] if reason is FinishReason.STOP else None
            if (tokens or reason is not None) and name not in {each.request_id for each in outputs}:
                outputs.append(output_of(name, tokens, reason, stop_reason))
        if rare:  # of several clients
            outputs = [outputs[place] for place in chance.permutation(len(outputs))]
        scheduled = scheduled_of(
            dict.fromkeys(in_step, 1),
            scheduled_spec_decode_tokens=drafts,
            preempted_req_ids=(preempted | set(self.some(rare))) or None,
            num_invalid_spec_tokens={name: 1 for name in drafts if chance.random() < 0.3} or None,
        )
        ended = {output.request_id for output in outputs if output.finish_reason is not None}
        self.names = [name for name in self.names if name not in ended]
        return Step(scheduled, {name: place for place, name in enumerate(batch)}, outputs, logprobs)


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_what_reading_row_after_row_gives(seed: int) -> None:
    """Over many steps with everything mixed: the same rows in the same order, and the same requests end."""
    core, reference = Core(seed), Reference()
    requests = Requests(VLLM, configuration())
    statuses = set()
    for _ in range(100):
        is_ordinary = bool(core.chance.random() < 0.6)
        aborted: list[str] = []
        if not is_ordinary:
            for name, new in core.begin():
                reference.open[name] = new
                stops, detokenizer = (("first", "second"), Detokenizer()) if new.has_stops else ((), None)
                requests.add(name, Request(new.key, new.top_k, stops, detokenizer))
            aborted = [*core.some(0.03), "unknown"]
        step = core.step(is_ordinary=is_ordinary)
        wanted = reference.abort(aborted)
        of_step, wanted_stopped = reference.rows_of(step)
        wanted += of_step
        rows = requests.abort(aborted)
        of_columns, stopped = requests.rows_of(step.scheduled, step.indices, step.outputs)
        rows += of_columns
        assert stopped == wanted_stopped
        assert len(requests) == len(reference.open)
        assert all(name in requests for name in reference.open)
        assert len(rows) == len(wanted)
        if not wanted:
            continue
        batch = batch_of_arrays(requests.arrays(rows, step.logprobs))
        for row, want in zip(batch.rows(), wanted, strict=True):
            assert (row.request_id, row.position, row.status) == (want.key, want.position, want.status)
            assert row.token_ids.tolist() == list(want.token_ids)
            assert (row.draft_token_count, row.stop) == (want.drafts, want.stop)
            columns = (row.alternative_logprobs.ravel().tolist(), row.alternative_token_ids.ravel().tolist())
            found = (row.logprobs.tolist(), row.ranks.tolist(), list(zip(*columns, strict=True)))
            assert found == values_of(want, step.logprobs)
            statuses.add(want.status)
    assert statuses >= {RowStatus.ACTIVE, RowStatus.PREFILLING, RowStatus.PREEMPTED, *STATUSES.values()}


def test_keys_find_the_open_requests() -> None:
    requests = Requests(VLLM, configuration())
    for number in range(200):  # more than there are slots at first
        requests.add(f"r{number}", Request(number + 1, None))
    assert requests.abort([f"r{number}" for number in range(100)]).request_ids.tolist() == list(range(1, 101))
    requests.add("again", Request(1, 3))
    assert requests.names_of([1, 2, 150]) == ["r149", "again"]
    assert len(requests) == 101
    (ended,) = requests.abort(["again", "r3"]).top_ks
    assert ended == 3


def test_index_that_is_missing_is_no_other_rows() -> None:
    """A request that vLLM's arrays do not have is not given the values of another."""
    requests = Requests(VLLM, configuration())
    requests.add("first", Request(1, 0))
    rows, _ = requests.rows_of(scheduled_of({"first": 1}), {}, [output_of("first", [5])])
    with pytest.raises(IndexError):
        requests.arrays(rows, Lists(np.array([[5]]), np.zeros((1, 1), np.float32), np.array([1]), None))


def test_first_tokens_tell_of_cached_prompts() -> None:
    """Once for each request, also where a step has the same requests as the one before."""
    requests = Requests(VLLM, configuration())
    requests.add("first", Request(1, None))
    requests.add("second", Request(2, None))
    said = {"first": prefilled(48, 32), "second": prefilled(5, 0)}
    for wanted in ([(1, 48, 32), (2, 5, 0)], []):
        outputs = [output_of(name, [5], prefill_stats=said.pop(name, None)) for name in ("first", "second")]
        requests.rows_of(scheduled_of({"first": 1, "second": 1}), {}, outputs)
        assert requests.cached_prompts == wanted


SUFFIX = "-0a1b2c3d"
"""As vLLM's front end adds it, at random, to the id that it knows."""


def test_any_language_can_compute_the_key() -> None:
    assert request_id("chatcmpl-42") == int(sha256(b"chatcmpl-42").hexdigest()[:16], 16)


def test_clients_know_the_key_by_the_answers_id() -> None:
    """`LLM.generate` counts from 0 in each process, so its requests are known by the random part, too."""
    for known in ("chatcmpl-42", "cmpl-42-0", "cmpl-42-11", "0_cmpl-42-0", "chatcmpl-a_b"):
        assert RequestIds().id_of(known + SUFFIX, None) == request_id(known)
    for whole in ("cmpl-42-0", f"7{SUFFIX}", f"0_7{SUFFIX}"):
        assert RequestIds().id_of(whole, {}) == request_id(whole)


def test_requests_choose_their_keys() -> None:
    last = 2**64 - 1
    for given in (7, "7", last, str(last)):
        assert RequestIds().id_of("cmpl-1-0" + SUFFIX, {ARGUMENT: given}) == int(given)
    keys = RequestIds()
    of_each = [keys.id_of(f"{number}_cmpl-1-0{SUFFIX}", {ARGUMENT: last - 1}) for number in range(3)]
    assert of_each == [last - 1, last, 1]


@pytest.mark.parametrize("given", [0, -1, 2**64, True, 1.5, "x", "\u0667", "9" * 400, None, [7]])
def test_wrong_keys_are_told_and_left(given: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert RequestIds().id_of("cmpl-1-0" + SUFFIX, {ARGUMENT: given}) == request_id("cmpl-1-0")
    assert "request id refused" in caplog.text


def test_key_is_never_given_twice(caplog: pytest.LogCaptureFixture) -> None:
    keys = RequestIds(most=4)
    name = "cmpl-1-0" + SUFFIX
    with caplog.at_level(logging.WARNING):
        given = [keys.id_of(name, {ARGUMENT: 7}) for _ in range(4)]
    assert given == [7, request_id("cmpl-1-0"), request_id(name), request_id(f"{name}#1")]
    assert "request id used before" in caplog.text
    assert keys.id_of("cmpl-2-0", None) == request_id("cmpl-2-0")
    assert keys.id_of("other", {ARGUMENT: 7}) == 7

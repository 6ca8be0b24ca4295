"""read_sessions: the exact tokens of sessions from recordings or logs, as docs/training.md explains."""

import asyncio
import hashlib
import heapq
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.recordings.items import RecordingError, StreamItem, read_recording
from tokenbus.recordings.routed_experts import RoutedExperts
from tokenbus.recordings.session_turns import (
    MASK,
    NO_IDS,
    VALUES,
    Attempt,
    Columns,
    Gap,
    Ids,
    SessionName,
    Turn,
    TurnReader,
)
from tokenbus_contracts import RowStatus

_SHOWN_IDS = 16
"""Maximum number of ids on each side of a divergence."""
_COMPLETE = frozenset({"FINISHED_STOP", "FINISHED_LENGTH"})
_END_OF = {"ACTIVE": "its end is not recorded", "ABORTED": "it was aborted"}


class Span(NamedTuple):
    """The start of consecutive tokens in a branch that have the same value."""

    begin: int
    """Position of the span's first token in the branch."""
    value: Any


@dataclass(slots=True)
class SessionRequest:
    """A request of a session."""

    request_id: int
    """Id of the request's first turn."""
    parent: int
    """Id of the preceding request, or 0 if unknown."""
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    status: str
    """Status of the last row, such as FINISHED_STOP, ERROR after an error, or ACTIVE without a recorded end."""
    error: str
    attempts: list[Attempt]
    branch: int = -1
    """Index of the branch with the output, or -1 if there is none because the prompt is incomplete."""
    begin: int = 0
    """Position of the first output token in the branch."""
    routed_experts: RoutedExperts | None = None


@dataclass(slots=True)
class Divergence:
    """The position at which a branch departs from an earlier branch."""

    branch: int
    position: int
    """Number of tokens that both branches share."""
    before: list[int]
    """Token ids of the earlier branch after the shared tokens, at most 16."""
    after: list[int]
    """Token ids of the new branch after the shared tokens, at most 16."""


@dataclass(slots=True)
class Branch:
    """A sequence of tokens; each array has one value per token."""

    token_ids: Ids
    is_output: npt.NDArray[np.bool_]
    """Whether the model generated the token."""
    logprobs: npt.NDArray[np.float32]
    """Logprobs, with NaN for tokens without a requested logprob and for tokens of prompts."""
    ranks: Ids
    """Ranks from 1, with 0 for tokens without a logprob."""
    other_logprobs: npt.NDArray[np.float32]
    entropies: npt.NDArray[np.float32]
    mask_sizes: Ids
    """Number of ids that sampling could choose from, or 0 if unknown."""
    masks: list[Ids]
    """Ids that sampling could choose from, or empty if unknown or above the request's bound."""
    weight_versions: list[Span]
    workers: list[Span]
    requests: list[int]
    """Ids of the requests whose outputs the branch has, in order."""
    divergence: Divergence | None = None
    """Divergence from an earlier branch, or None if the branch shares no token with an earlier one."""

    @classmethod
    def without_tokens(cls) -> "Branch":
        return _Path().branch()

    @property
    def digest(self) -> str:
        """SHA-256 of the ids as little-endian uint32, followed by the logprobs as little-endian float32."""
        data = self.token_ids.astype("<u4").tobytes() + self.logprobs.astype("<f4").tobytes()
        return hashlib.sha256(data).hexdigest()


@dataclass(slots=True)
class Session:
    """The requests of one session, and their tokens as branches.

    Example:
        def complete_only(path: str) -> list[tokenbus.Session]:
            return [session for session in tokenbus.read_sessions(path) if session.is_complete]
    """

    name: SessionName
    requests: list[SessionRequest]
    branches: list[Branch]
    missing: list[str]
    """Descriptions of missing or inconsistent data; empty for a complete session."""

    @property
    def is_complete(self) -> bool:
        """Whether no data is missing."""
        return not self.missing


def read_sessions(*sources: str | os.PathLike[str], label: str = "") -> Iterator[Session]:
    """Iterate over the sessions in recordings or durable logs.

    Pass the recordings of all workers of a session together, in any order; they may overlap. The tokens of one session
    and of all open requests are in memory. Ended requests are in a temporary file.

    Args:
        sources: recordings, or addresses of logs (`nats://127.0.0.1:4222/log`), which are read to their ends. In a
            running event loop, read a log in another thread.
        label: the label of the sessions to return; default: all sessions.

    Raises:
        OSError: a file cannot be read.
        RecordingError: a recording is broken.
        AddressError: no server of a log answers.
        LogError: a log does not exist.

    Example:
        def outputs(path: str) -> list[list[int]]:
            branches = [branch for session in tokenbus.read_sessions(path) for branch in session.branches]
            return [branch.token_ids[branch.is_output].tolist() for branch in branches]
    """
    faults: list[RecordingError] = []
    with TurnReader(label) as reader:
        for item in items_of(sources, faults):
            reader.add(item)
        if faults:
            raise faults[0]
        yield from sessions_of(reader)


def is_log(source: str | os.PathLike[str]) -> bool:
    return "://" in str(source)


def items_of(sources: Sequence[str | os.PathLike[str]], faults: list[RecordingError]) -> Iterator[StreamItem]:
    """Yield the items of recordings and durable logs; the items of each worker incarnation are in order.

    A broken recording ends at its fault, which is added to `faults`. Other errors are those of `read_sessions`.
    """
    recordings = [source for source in sources if not is_log(source)]
    if len(recordings) == 1:  # a single source may be a pipe, which can be read only once
        yield from _up_to_fault(recordings[0], faults)
    else:
        yield from _merged_recordings(recordings, faults)
    for source in filter(is_log, sources):
        yield from _items_of_log(str(source))


def _merged_recordings(sources: Sequence[str | os.PathLike[str]], faults: list[RecordingError]) -> Iterator[StreamItem]:
    of_life: dict[tuple[str, int], list[str | os.PathLike[str]]] = {}
    for source in sources:
        first = next(_up_to_fault(source, faults), None)
        if first is not None:
            of_life.setdefault((first.worker_id, first.epoch), []).append(source)
    for same_life in of_life.values():
        yield from heapq.merge(*(_up_to_fault(each, faults) for each in same_life), key=attrgetter("sequence"))


def _up_to_fault(source: str | os.PathLike[str], faults: list[RecordingError]) -> Iterator[StreamItem]:
    try:
        yield from read_recording(source)
    except RecordingError as error:
        faults.append(error)


def _items_of_log(address: str) -> Iterator[StreamItem]:
    from tokenbus.recordings.durable_log.reader import read_log  # noqa: PLC0415 - its library is an extra

    with asyncio.Runner() as runner:
        items = read_log(address)
        while (item := runner.run(_next(items))) is not None:
            yield item


async def _next(items: AsyncIterator[StreamItem]) -> StreamItem | None:
    return await anext(items, None)


def sessions_of(reader: TurnReader, faults: Sequence[str] = ()) -> Iterator[Session]:
    """Yield the sessions of a reader's items, and add the given faults to the missing data of each session."""
    for name, turns in reader.turns():
        session = _assembled(name, turns, reader.session_of, reader.gaps)
        session.missing += faults
        yield session


@dataclass(slots=True)
class _Output:
    """Output tokens of one turn in a branch; each column has one value per token."""

    begin: int
    worker_id: str
    columns: Columns

    def first(self, count: int) -> "_Output":
        return _Output(self.begin, self.worker_id, {name: each[:count] for name, each in self.columns.items()})


class _Path:
    """The tokens of a branch that is being assembled from requests."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.uint32)
        self.outputs: list[_Output] = []
        self.requests: list[int] = []
        self.divergence: Divergence | None = None

    def shared_with(self, prompt: Ids) -> int:
        """Return the number of leading ids that a prompt and the branch have in common."""
        size = min(prompt.size, self.ids.size)
        differing = np.flatnonzero(prompt[:size] != self.ids[:size])
        return int(differing[0]) if differing.size else size

    def fork(self, size: int) -> "_Path":
        """Return a new branch with the first `size` tokens of this branch."""
        path = _Path()
        path.ids = self.ids[:size]
        path.outputs = [each.first(size - each.begin) for each in self.outputs if each.begin < size]
        return path

    def add(self, request: SessionRequest, prompt: Ids, outputs: Sequence[tuple[Turn, Columns]]) -> None:
        """Append the rest of a request's prompt, which begins with this branch's tokens, and the request's output."""
        self.requests.append(request.request_id)
        request.begin = begin = prompt.size
        for turn, columns in outputs:
            self.outputs.append(_Output(begin, turn.attempt.worker_id, columns))
            begin += columns["token_id"].size
        self.ids = np.concatenate([prompt, *(columns["token_id"] for _, columns in outputs)])

    def branch(self) -> Branch:
        size, outputs = self.ids.size, self.outputs
        values = {name: np.full(size, fill, kind) for name, (kind, fill) in VALUES.items()}
        masks: list[Ids] = [NO_IDS] * size
        is_output = np.zeros(size, np.bool_)
        for each in outputs:
            place = slice(each.begin, each.begin + each.columns["token_id"].size)
            is_output[place] = True
            for name, column in values.items():
                column[place] = each.columns[name]
            masks[place] = each.columns[MASK]
        versions = [
            Span(each.begin + int(index), int(each.columns["weight_version"][index]))
            for each in outputs
            for index in np.flatnonzero(np.diff(each.columns["weight_version"], prepend=np.uint64(2**64 - 1)))
        ]
        return Branch(
            token_ids=self.ids,
            is_output=is_output,
            logprobs=values["logprob"],
            ranks=values["rank"],
            other_logprobs=values["other_logprob"],
            entropies=values["entropy"],
            mask_sizes=values["mask_size"],
            masks=masks,
            weight_versions=_merged(versions),
            workers=_merged([Span(each.begin, each.worker_id) for each in outputs if each.columns["token_id"].size]),
            requests=self.requests,
            divergence=self.divergence,
        )


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Remove each span that has the same value as the previous span."""
    return [span for index, span in enumerate(spans) if not index or span.value != spans[index - 1].value]


def _assembled(
    name: SessionName, turns: Sequence[Turn], session_of: Mapping[int, SessionName], gaps: Sequence[Gap]
) -> Session:
    ids = {each for turn in turns for each in (turn.first_id, turn.attempt.request_id)}
    requests: list[SessionRequest] = []
    paths: list[_Path] = []
    missing: list[str] = []
    for of_it, is_in_cycle in _parents_first(_by_request(turns)):
        first_id, outputs = of_it[0].first_id, _outputs_of(_in_order(of_it))
        request, prompt, faults = _request_of(first_id, of_it, outputs)
        requests.append(request)
        if request.parent and request.parent not in ids:
            of_parent = session_of.get(request.parent)
            of_other = f"a request of session {of_parent.label!r}" if of_parent else "a request that is not recorded"
            faults.append(f"parent: a request of this session, got {request.parent:016x}, {of_other}")
        if is_in_cycle:
            faults.append(f"parent: an earlier request, got {request.parent:016x}, whose parents lead back to this one")
        missing += [f"request {first_id:016x}: {fault}" for fault in faults]
        if prompt is not None:
            request.branch = _place(paths, prompt, request.parent)
            paths[request.branch].add(request, prompt, outputs)
    begun, ended = min(turn.begun_at for turn in turns), max(turn.ended_at for turn in turns)
    missing += [
        f"{gap.items} items of worker {gap.worker_id} are missing while the session ran"
        for gap in gaps
        if gap.begin <= ended and begun <= gap.end
    ]
    return Session(name, requests, [path.branch() for path in paths], missing)


def _by_request(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns of each request, ordered by time; several requests may have used the same id."""
    requests: list[list[Turn]] = []
    of_id: dict[int, list[list[Turn]]] = {}
    for turn in sorted(turns, key=attrgetter("started_at")):
        of_same_id = of_id.setdefault(turn.first_id, [])
        for parts in reversed(of_same_id):
            if all(_are_of_one_request(part, turn) for part in parts):
                parts.append(turn)
                break
        else:
            of_same_id.append([turn])
            requests.append(of_same_id[-1])
    return requests


def _are_of_one_request(one: Turn, other: Turn) -> bool:
    """Return whether two turns can belong to one request; both name the same first turn, but ids may be reused."""
    if one.attempt.turn != other.attempt.turn:
        return True
    prefill, decode = sorted((one, other), key=_is_decode)
    is_behind = not decode.tokens or decode.tokens[0]["position"][0] >= prefill.end
    return is_behind and not _is_decode(prefill) and _is_decode(decode)


def _is_decode(turn: Turn) -> bool:
    """Return False for a turn of a prefill worker, which hands the request to a decode worker, and else True."""
    return turn.attempt.status != RowStatus.HANDED_OFF.name


def _parents_first(requests: Sequence[list[Turn]]) -> list[tuple[list[Turn], bool]]:
    """Order requests by time, but parents before children, because the clocks of hosts may differ.

    Return a flag with each request, set if the chain of its parents leads back to the request.
    """
    first_use: dict[int, int] = {}
    for index, turns in enumerate(requests):
        first_use.setdefault(turns[0].first_id, index)
    placed: dict[int, None] = {}
    in_cycles: set[int] = set()
    for index in range(len(requests)):
        waiting: dict[int, None] = {}
        ancestor: int | None = index
        while ancestor is not None and ancestor not in placed and ancestor not in waiting:
            waiting[ancestor] = None
            ancestor = first_use.get(requests[ancestor][0].parent)
        if ancestor is not None and ancestor in waiting:
            descendants = list(waiting)
            in_cycles.update(descendants[descendants.index(ancestor) :])
        placed |= dict.fromkeys(reversed(waiting))
    return [(requests[index], index in in_cycles) for index in placed]


def _in_order(turns: list[Turn]) -> list[Turn]:
    """Sort a request's turns, and let a decode worker's output begin after the output of its prefill worker."""
    turns.sort(key=lambda turn: (turn.attempt.turn, _is_decode(turn)))
    for before, after in pairwise(turns):
        if before.attempt.turn == after.attempt.turn:
            after.attempt.first_position = max(after.attempt.first_position, before.end)
    return turns


def _outputs_of(turns: Sequence[Turn]) -> list[tuple[Turn, Columns]]:
    """Return the output of each turn; each position belongs to the latest turn that begins at or before it."""
    found, end = [], 2**32
    for turn in reversed(turns):
        columns = turn.columns()
        count = int(np.searchsorted(columns["position"], end))
        found.append((turn, {name: each[:count] for name, each in columns.items()}))
        end = min(end, turn.attempt.first_position)
    return found[::-1]


def _request_of(
    first_id: int, turns: Sequence[Turn], outputs: Sequence[tuple[Turn, Columns]]
) -> tuple[SessionRequest, Ids | None, list[str]]:
    """Return a request, its prompt (None if incomplete), and a list of its missing data."""
    faults = []
    prompts = [np.frombuffer(b"".join(turn.prompt), "<u4") for turn in turns]
    longest = max(prompts, key=len)
    length, last = max(turn.prompt_tokens for turn in turns), turns[-1].attempt
    if longest.size < length:
        faults.append(f"its prompt has {length} tokens, and {longest.size} are recorded")
    positions = np.concatenate([columns["position"] for _, columns in outputs])
    holes = np.flatnonzero(np.diff(positions.astype(np.int64), prepend=-1) != 1)
    if holes.size:
        faults.append(f"output tokens are missing before position {positions[holes[0]]}")
    if last.status not in _COMPLETE:
        faults.append(_END_OF.get(last.status, f"it ended with {last.error or last.status}"))
    if turns[-1].lost_experts:
        faults.append(f"its routed experts are missing: {turns[-1].lost_experts}")
    request = SessionRequest(
        request_id=first_id,
        parent=turns[0].parent,
        prompt_tokens=length,
        cached_tokens=turns[0].cached_tokens,
        output_tokens=int(positions.size),
        status=last.status,
        error=last.error,
        attempts=[turn.attempt for turn in turns],
        routed_experts=turns[-1].routed_experts,
    )
    is_whole = longest.size == length and not holes.size
    return request, longest if is_whole else None, faults


def _place(paths: list[_Path], prompt: Ids, parent: int) -> int:
    """Return the index of the branch that a prompt continues, or of a new branch.

    A prompt continues the branch with which it shares the most tokens. If several branches share that many, the first
    choice is the parent's branch, the second a branch that the prompt contains as a whole, the third the latest branch.
    """

    def rank(index: int) -> tuple[int, bool, bool, int]:
        path = paths[index]
        shared = path.shared_with(prompt)
        return shared, parent in path.requests, shared == path.ids.size, index

    shared, _, is_whole, best = max(map(rank, range(len(paths))), default=(0, False, False, -1))
    if is_whole:
        return best
    if not shared:
        paths.append(_Path())
        return len(paths) - 1
    paths.append(paths[best].fork(shared))
    before, after = (ids[shared : shared + _SHOWN_IDS].tolist() for ids in (paths[best].ids, prompt))
    paths[-1].divergence = Divergence(best, shared, before, after)
    return len(paths) - 1

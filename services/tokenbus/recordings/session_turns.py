"""TurnReader: collects the turns of session requests from items, and stores ended turns in a temporary file."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenbus.recordings.items import StreamItem
from tokenbus.recordings.routed_experts import RoutedExperts
from tokenbus.recordings.token_columns import TokenBuffer
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import Admitted, ErrorCode, RequestEvent, SessionPrompt

_BUFFER_TOKENS = 1 << 16
_BUFFER_BYTES = 1 << 23
VALUES: dict[str, tuple[type[np.generic], float]] = {
    "logprob": (np.float32, np.nan),
    "rank": (np.uint32, 0),
    "other_logprob": (np.float32, np.nan),
    "entropy": (np.float32, np.nan),
    "mask_size": (np.uint32, 0),
}
"""Type of each token column, and the value that means unknown, by column name."""
MASK = "mask_token_ids"
_ARRAYS = ("position", "token_id", "weight_version", *VALUES)
Columns = dict[str, Any]
"""Columns of tokens by name: arrays, except for the sampling masks, which are a list with one array per token."""
Ids = npt.NDArray[np.uint32]
NO_IDS: Ids = np.zeros(0, np.uint32)
_Life = tuple[str, int]


class SessionName(NamedTuple):
    """The name of a session; sessions of different owners or tenants never merge, even with equal labels."""

    owner: int
    """Owner of the session, which is the `Client.owner` of the requesting client."""
    tenant: int
    """Tenant for whom the client sent the request, or 0 for the client itself."""
    label: str


@dataclass(slots=True)
class Attempt:
    """A part of a request that one worker computed."""

    request_id: int
    worker_id: str
    epoch: int
    turn: int = 0
    first_position: int = 0
    """Position of the attempt's first token in the request's output."""
    weight_version: int = 0
    """Version of the worker's weights at admission."""
    reason: str = ""
    """Reason why the previous turn stopped, or empty for the first turn."""
    status: str = RowStatus.ACTIVE.name
    """Status of the last row, ERROR after an error, or ACTIVE if no end was recorded."""
    error: str = ""


@dataclass(slots=True)
class Turn:
    """Everything that one worker published about a request."""

    attempt: Attempt
    begun_at: int
    """Time of the worker's last step before the admission, or else of its first step, in ns by the worker's clock."""
    first_id: int
    """Id of the request's first turn."""
    started_at: int = 0
    """Time of the turn's first token, or of its end if it has no token."""
    ended_at: int = 0
    name: SessionName | None = None
    parent: int = 0
    cached_tokens: int | None = None
    prompt_tokens: int = 0
    routed_experts: RoutedExperts | None = None
    lost_experts: str = ""
    """Reason why the engine lacks the routed experts, or empty if it has them or nobody requested them."""
    prompt: list[bytes] = field(default_factory=list)
    """Recorded chunks of the prompt, from its beginning to the first missing chunk."""
    tokens: list[Columns] = field(default_factory=list)

    def admit(self, admitted: Admitted) -> None:
        attempt = self.attempt
        self.first_id = admitted.first_request_id or attempt.request_id
        self.cached_tokens = admitted.cached_tokens if admitted.HasField("cached_tokens") else None
        attempt.turn, attempt.first_position = admitted.turn, admitted.first_position
        attempt.weight_version = admitted.weight_version
        attempt.reason = _name_of(admitted.reason) if admitted.reason else ""

    def add_prompt(self, chunk: SessionPrompt) -> None:
        self.name = SessionName(chunk.owner, chunk.tenant, chunk.session)
        self.parent, self.prompt_tokens = chunk.parent, chunk.prompt_tokens
        if chunk.position == sum(map(len, self.prompt)) // 4:
            self.prompt.append(chunk.token_ids)

    def add_tokens(self, columns: Columns, places: npt.NDArray[np.int64]) -> None:
        """Add the tokens at the given indexes of a buffer's columns."""
        self.started_at = self.started_at or int(columns["produced_at_ns"][places[0]])
        mine: Columns = {name: columns[name][places] for name in _ARRAYS}
        offsets, values = columns[MASK]
        if values.size:
            mine[MASK] = [values[offsets[place] : offsets[place + 1]] for place in places]
        self.tokens.append(mine)

    @property
    def end(self) -> int:
        """Position after the turn's last token."""
        return int(self.tokens[-1]["position"][-1]) + 1 if self.tokens else self.attempt.first_position

    def columns(self) -> Columns:
        """Return the columns of all tokens of the turn."""
        if not self.tokens:
            return dict.fromkeys(_ARRAYS, NO_IDS) | {MASK: []}
        joined: Columns = {name: np.concatenate([each[name] for each in self.tokens]) for name in _ARRAYS}
        joined[MASK] = [mask for each in self.tokens for mask in each.get(MASK, [NO_IDS] * each["rank"].size)]
        return joined


def _extension(array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_TYPES.index(array.dtype), array.tobytes())


def _array(number: int, data: memoryview) -> npt.NDArray[Any]:
    return np.frombuffer(data, _TYPES[number])


_TYPES = [np.dtype(each) for each in (np.uint32, np.uint64, np.float32)]
"""Data types of a turn's arrays."""
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_extension)
_DECODER = msgspec.msgpack.Decoder(Turn, ext_hook=_array)


@dataclass(slots=True)
class Gap:
    """A number of missing or invalid items in a worker's stream."""

    worker_id: str
    items: int
    begin: int
    """Time of the worker's step before the gap, or 0 at the beginning."""
    end: int = 2**64 - 1
    """Time of the worker's step after the gap, or the default if no step follows."""


class TurnReader:
    """Collects turns by session; stores ended turns in a file, and open turns in memory."""

    def __init__(self, label: str = "", name: SessionName | None = None) -> None:
        """Create a reader of all sessions, of the sessions with a label, or of one session."""
        self._label, self._name = label, name
        self._file = tempfile.TemporaryFile(prefix="tokenbus-sessions-")  # noqa: SIM115 - closed in __exit__
        self._stored: dict[SessionName, list[tuple[int, int]]] = {}
        """Offset and size of each stored turn in the file, by session."""
        self.session_of: dict[int, SessionName] = {}
        """Session names of all requests, by turn id."""
        self._open: dict[tuple[_Life, int], Turn] = {}
        self._ended: dict[_Life, dict[int, Turn]] = defaultdict(dict)
        """Turns whose last tokens are still in the buffer, by incarnation and turn id."""
        self._buffers: dict[_Life, TokenBuffer] = defaultdict(TokenBuffer)
        self._times: dict[_Life, int] = defaultdict(int)
        """Time of the last step, by worker incarnation."""
        self._sequences: dict[_Life, int] = {}
        """Sequence of the last item, by worker incarnation."""
        self.gaps: list[Gap] = []
        self._last_gaps: dict[_Life, list[Gap]] = defaultdict(list)
        """Gaps after the last step, by worker incarnation."""
        self.items = 0
        self.refused_items = 0
        """Number of invalid items."""

    def __enter__(self) -> "TurnReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def stored_bytes(self) -> int:
        """Size of the file with ended turns."""
        return self._file.seek(0, os.SEEK_END)

    def add(self, item: StreamItem) -> None:
        """Add an item unless it is repeated; the items of each worker incarnation must be added in order."""
        life = item.worker_id, item.epoch
        last = self._sequences.get(life, item.sequence - item.missing_items - 1)
        if item.sequence <= last:
            return
        self._sequences[life] = item.sequence
        self.items += 1
        if missing := item.sequence - last - 1:
            self._add_gap(life, missing)
        try:
            if item.batch is not None:
                self._add_batch(life, item, item.batch)
            elif item.event is not None:
                self._add_event(life, item.event)
        except ContractError:
            self.refused_items += 1
            self._add_gap(life, 1)

    def turns(self) -> Iterator[tuple[SessionName, list[Turn]]]:
        """Yield the names and turns of sessions, ordered by the end of their first turn; add no items afterwards."""
        for life in list(self._buffers):
            self._flush(life)
        for (life, _), turn in self._open.items():
            self._store(turn, self._times[life])
        for name, places in self._stored.items():
            yield name, [self._loaded(offset, size) for offset, size in places]

    def _add_gap(self, life: _Life, items: int) -> None:
        gap = Gap(life[0], items, self._times[life])
        self.gaps.append(gap)
        self._last_gaps[life].append(gap)

    def _add_batch(self, life: _Life, item: StreamItem, batch: LogprobBatch) -> None:
        if (now := batch.header.produced_at_ns) != 0:
            self._pass_time(life, now)
        if batch.header.kind != BatchKind.TARGET:
            return
        buffer = self._buffers[life]
        buffer.add(item)
        for row in np.flatnonzero(batch.statuses >= RowStatus.HANDED_OFF).tolist():
            self._end(life, int(batch.request_ids[row]), RowStatus(batch.statuses[row]).name)
        if buffer.tokens >= _BUFFER_TOKENS or buffer.payload_bytes >= _BUFFER_BYTES:
            self._flush(life)

    def _pass_time(self, life: _Life, now: int) -> None:
        for gap in self._last_gaps.pop(life, ()):
            gap.end = now
        if not self._times[life]:
            for (of, _), turn in self._open.items():
                if of == life:
                    turn.begun_at = now
        self._times[life] = now

    def _add_event(self, life: _Life, event: RequestEvent) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                self._turn(life, event.admitted.request_id).admit(event.admitted)
            case "session_prompt":
                self._turn(life, event.session_prompt.request_id).add_prompt(event.session_prompt)
            case "routed_experts":
                turn, found = self._turn(life, event.routed_experts.request_id), event.routed_experts
                turn.lost_experts = found.missing
                turn.routed_experts = RoutedExperts.of(found) if found.file else None
            case "error":
                reason = f"{_name_of(event.error.code)}: {event.error.message}"
                self._end(life, event.error.request_id, "ERROR", reason)

    def _turn(self, life: _Life, request_id: int) -> Turn:
        turn = self._open.get((life, request_id))
        if turn is None:
            if request_id in self._ended[life]:
                self._flush(life)
            turn = Turn(Attempt(request_id, *life), self._times[life], request_id)
            self._open[life, request_id] = turn
        return turn

    def _end(self, life: _Life, request_id: int, status: str, error: str = "") -> None:
        turn = self._open.pop((life, request_id), None)
        if turn is not None and turn.name is not None:
            turn.attempt.status, turn.attempt.error = status, error
            self._ended[life][request_id] = turn

    def _flush(self, life: _Life) -> None:
        """Assign the buffered tokens of an incarnation to its turns, and store the ended turns."""
        ended = self._ended.pop(life, {})
        turns = {request_id: turn for (of, request_id), turn in self._open.items() if of == life and turn.name} | ended
        columns = self._buffers[life].take()
        order = np.argsort(columns["request_id"], kind="stable")
        ids, begins = np.unique(columns["request_id"][order], return_index=True)
        for request_id, places in zip(ids.tolist(), np.split(order, begins)[1:], strict=True):
            if request_id in turns:
                turns[request_id].add_tokens(columns, places)
        for turn in ended.values():
            self._store(turn, self._times[life])

    def _store(self, turn: Turn, now: int) -> None:
        if turn.name is None:
            return
        turn.ended_at = now
        turn.started_at = turn.started_at or now
        self.session_of[turn.attempt.request_id] = self.session_of[turn.first_id] = turn.name
        if self._label in ("", turn.name.label) and self._name in (None, turn.name):
            data = _ENCODER.encode(turn)
            place = self._file.seek(0, os.SEEK_END), len(data)
            self._file.write(data)
            self._stored.setdefault(turn.name, []).append(place)

    def _loaded(self, offset: int, size: int) -> Turn:
        self._file.seek(offset)
        return _DECODER.decode(self._file.read(size))


def _name_of(code: ErrorCode) -> str:
    return ErrorCode.Name(code).removeprefix("ERROR_CODE_") if code in ErrorCode.values() else str(code)

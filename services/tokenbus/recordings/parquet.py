"""Parquet files of a worker's stream, with one row per token or per request; needs the extra `parquet`."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from google.protobuf.json_format import MessageToDict

from tokenbus.recordings.items import StreamItem, public_hello
from tokenbus.recordings.token_columns import Columns, Lists, TokenBuffer, TokenKind
from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, RowStatus, Scoring, ValueKind
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestEvent

_NO_TOKENS = TokenBuffer().take()
EXTRAS = tuple(_NO_TOKENS)[-6:]
"""Names of the optional columns of a token."""
_NULLABLE = {"logprob", "rank", *EXTRAS}
_NAMES = {
    column: pa.array([members.get(value, "") for value in range(max(members) + 1)])
    for column, members in {
        "kind": {each.value: each.name for each in TokenKind},
        "status": {each.value: each.name for each in RowStatus},
        "scoring": {each.value: each.name for each in Scoring},
        "value_kind": {each.value: each.name for each in ValueKind},
    }.items()
}


def _type_of(name: str, values: npt.NDArray[Any] | Lists) -> pa.DataType:
    if name in _NAMES:
        return pa.dictionary(pa.uint8(), pa.string())
    if isinstance(values, Lists):  # lists of non-nullable elements are faster to write
        return pa.large_list(pa.field("element", pa.from_numpy_dtype(values.values.dtype), nullable=False))
    return pa.from_numpy_dtype(values.dtype)


SCHEMA = pa.schema([pa.field(name, _type_of(name, each), name in _NULLABLE) for name, each in _NO_TOKENS.items()])
"""Columns of the table with one row per token; a null means that the value was not requested."""
_GROUP_TOKENS = 1 << 16
_GROUP_BYTES = 1 << 23
"""Limits of a row group's size in tokens and bytes; a single item or request may exceed them."""
_PAGE_BYTES = 1 << 16
_SPLIT = (pa.float32(), pa.uint32())
_REPETITIVE = ["kind", "status", "scoring", "value_kind", "draft_token_count", "weight_version", "step", "sequence"]
_ORDERED = ["request_id", "position", "kind", "weight_version", "step", "sequence", "produced_at_ns"]
_SCORES = ["position", "token_id", "logprob", "rank", "alternative_token_ids", "alternative_logprobs"]
_OF_REQUEST = {
    TokenKind.TARGET: ("", [*_SCORES, "draft_token_count", "weight_version", "step", "produced_at_ns", *EXTRAS]),
    TokenKind.DRAFT: ("draft_", [*_SCORES, "step"]),
    TokenKind.PROMPT: ("prompt_", _SCORES),
}
"""By kind of token: the token columns that become a request's list columns, and the prefix of the new names."""
_KINDS = 4


def _lists_of(column: pa.Field) -> pa.DataType:
    return pa.large_list(column.with_name("element"))


def _plural(name: str) -> str:
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name.removesuffix('s')}s"


def _leaves(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the type of each Parquet column, by column path."""
    found = {}
    for column in schema:
        path, kind = column.name, column.type
        while pa.types.is_large_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        found[path] = kind
    return found


def _column(kind: pa.DataType, default: str | None = None) -> Any:  # noqa: ANN401
    return field(default=default, metadata={"type": kind})


@dataclass(slots=True)
class _Request:
    """The columns of a request other than the lists of its tokens."""

    number: int
    """Number of the request in the file; it is not written as a column."""
    request_id: int = _column(pa.uint64())
    prompt_tokens: int | None = _column(pa.uint32())
    cached_tokens: int | None = _column(pa.uint32())
    first_request_id: int | None = _column(pa.uint64())
    turn: int | None = _column(pa.uint32())
    first_position: int | None = _column(pa.uint32())
    reason: str | None = _column(pa.string())
    status: str = _column(pa.string(), RowStatus.ACTIVE.name)
    error: str | None = _column(pa.string())


_REQUEST_TYPES = {each.name: each.metadata["type"] for each in fields(_Request) if each.metadata}
REQUEST_SCHEMA = pa.schema(
    [
        *(pa.field(name, kind, nullable=name not in {"request_id", "status"}) for name, kind in _REQUEST_TYPES.items()),
        *(
            pa.field(prefix + _plural(name), _lists_of(SCHEMA.field(name)), nullable=False)
            for prefix, names in _OF_REQUEST.values()
            for name in names
        ),
    ]
)


def _token_batch(tokens: Columns) -> pa.RecordBatch:
    columns = [_column_of(name, tokens[name]) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _column_of(name: str, values: npt.NDArray[Any] | Lists) -> pa.Array:
    """Return an Arrow column; in nullable columns, NaN, 0 and empty lists become null."""
    kind, is_nullable = SCHEMA.field(name).type, name in _NULLABLE
    if isinstance(values, Lists):
        is_null = pa.array(values.offsets[1:] == values.offsets[:-1]) if is_nullable else None
        return pa.LargeListArray.from_arrays(values.offsets, pa.array(values.values), kind, mask=is_null)
    if name in _NAMES:
        return pa.DictionaryArray.from_arrays(pa.array(values), _NAMES[name])
    if not is_nullable:
        return pa.array(values, kind)
    is_null = np.isnan(values) if values.dtype.kind == "f" else values == 0
    return pa.array(values, kind, mask=is_null if is_null.any() else None)


class TokenFile:
    """Writes the items of one worker incarnation in stream order, with one row per token."""

    rows = "tokens"
    schema = SCHEMA
    _depth = 0
    """Nesting depth of the lists in a column that has one value per token."""
    _statistics_columns: Sequence[str] = _ORDERED
    """Columns with statistics, by which readers skip row groups."""

    def __init__(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        leaves = _leaves(self.schema)
        # For list values, byte stream split with snappy gives smaller files than zstd alone.
        # Pages of this size fit into the CPU's cache.
        lists = [path for path in leaves if path.count(".list") > self._depth]
        self._writer = pq.ParquetWriter(
            path,
            self.schema,
            store_schema=False,  # names are stored as strings, because few readers support Arrow's dictionaries
            compression=dict.fromkeys(leaves, "zstd") | dict.fromkeys(lists, "snappy"),
            use_byte_stream_split=[path for path in lists if leaves[path] in _SPLIT],
            data_page_size=_PAGE_BYTES,
            use_dictionary=_REPETITIVE,
            write_statistics=list(self._statistics_columns),
        )
        self._buffer = TokenBuffer()
        self._last: StreamItem | None = None
        self._first_sequence = 0
        self.items = 0
        self.tokens = 0
        self.refused_items = 0
        """Number of invalid items."""

    @property
    def missing_items(self) -> int:
        """Number of missing items before the last item."""
        return self._last.sequence - self._first_sequence + 1 - self.items if self._last else 0

    def add(self, item: StreamItem) -> None:
        """Write the tokens of an item; items must be added in order."""
        self._first_sequence = self._first_sequence or item.sequence
        self._last = item
        self.items += 1
        try:
            self._add(item)
        except ContractError:
            self.refused_items += 1

    def close(self) -> None:
        """Write the buffered tokens and the metadata, and close the file."""
        self._write()
        self._writer.add_key_value_metadata(self._metadata())
        self._writer.close()

    def _add(self, item: StreamItem) -> None:
        self._buffer.add(item)
        if self._buffer.tokens >= _GROUP_TOKENS or self._buffer.payload_bytes >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if self._buffer.tokens:
            self.tokens += self._buffer.tokens
            self._writer.write_batch(_token_batch(self._buffer.take()))

    def _metadata(self) -> dict[str, str]:
        metadata = {"tokenbus.rows": self.rows, "tokenbus.writer": f"tokenbus {version('tokenbus')}"}
        if self._last is None:
            return metadata
        last = self._last
        recording = {
            "worker_id": last.worker_id,
            "epoch": str(last.epoch),
            "first_sequence": str(self._first_sequence),
            "last_sequence": str(last.sequence),
            "items": self.items,
            "missing_items": self.missing_items,
            "refused_items": self.refused_items,
            "hello": MessageToDict(public_hello(last.hello), preserving_proto_field_name=True),
        }
        return metadata | {"tokenbus.schema": last.schema_version, "tokenbus.recording": json.dumps(recording)}


class RequestFile(TokenFile):
    """Writes one row per request in the order in which requests end; the tokens of open requests stay in memory."""

    rows = "requests"
    schema = REQUEST_SCHEMA
    _depth = 1
    _statistics_columns = tuple(_REQUEST_TYPES)

    def __init__(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        super().__init__(path)
        self._count = 0
        self._latest: dict[int, _Request] = {}
        """Unwritten requests by id."""
        self._ended: list[_Request] = []
        self._codes: list[npt.NDArray[np.int64]] = []
        """The code of each unwritten token: the number of its request times `_KINDS`, plus the token's kind."""
        self._held = SCHEMA.empty_table()
        """Tokens of the requests that were still open at the last write."""

    def close(self) -> None:
        """Write all requests and close the file; requests without an end have the status ACTIVE."""
        self._ended += [each for each in self._latest.values() if each.status == RowStatus.ACTIVE.name]
        super().close()

    def _add(self, item: StreamItem) -> None:
        self._buffer.add(item)
        header = None
        if item.batch is not None:
            header = item.batch.header
            self._note_rows(item.batch)
        elif item.event is not None:
            self._note_event(item.event)
        held, tokens, size = self._held, self._buffer.tokens, self._buffer.payload_bytes
        # Each write copies the tokens of open requests, so a write waits for at least as many new tokens.
        is_due = tokens >= max(_GROUP_TOKENS, held.num_rows) or (size >= _GROUP_BYTES and size >= held.nbytes)
        if is_due and (header is None or not (header.draft_follows or header.part_index + 1 < header.part_count)):
            self._write()

    def _request(self, request_id: int, *, begins: bool) -> _Request:
        """Return the latest request with an id. Create one if none exists or, with `begins`, the latest has ended."""
        request = self._latest.get(request_id)
        if request is None or (begins and request.status != RowStatus.ACTIVE.name):
            self._count += 1
            request = self._latest[request_id] = _Request(self._count, request_id)
        return request

    def _end(self, request: _Request, status: str, error: str | None = None) -> None:
        if request.status == RowStatus.ACTIVE.name:
            request.status, request.error = status, error
            self._ended.append(request)

    def _note_rows(self, batch: LogprobBatch) -> None:
        is_target = batch.header.kind == BatchKind.TARGET
        requests = [self._request(key, begins=is_target) for key in batch.request_ids.tolist()]
        codes = np.array([each.number * _KINDS for each in requests], np.int64) + batch.header.kind
        self._codes.append(np.repeat(codes, batch.token_counts))
        if is_target:
            for row in np.flatnonzero(batch.statuses >= RowStatus.HANDED_OFF).tolist():
                self._end(requests[row], RowStatus(batch.statuses[row]).name)

    def _note_event(self, event: RequestEvent) -> None:
        match event.WhichOneof("event"):
            case "admitted":
                request = self._request(event.admitted.request_id, begins=True)
                request.prompt_tokens = event.admitted.prompt_tokens or None
                if event.admitted.HasField("cached_tokens"):
                    request.cached_tokens = event.admitted.cached_tokens
                request.first_request_id = event.admitted.first_request_id or request.request_id
                request.turn, request.first_position = event.admitted.turn, event.admitted.first_position
                request.reason = _name_of(event.admitted.reason) if event.admitted.reason else None
            case "error":
                error = event.error
                text = f"{_name_of(error.code)}: {error.message}"
                self._end(self._request(error.request_id, begins=False), "ERROR", text)
            case "prompt_scores":
                request = self._request(event.prompt_scores.request_id, begins=True)
                count = len(event.prompt_scores.token_ids) // 4
                self._codes.append(np.full(count, request.number * _KINDS + TokenKind.PROMPT, np.int64))

    def _write(self) -> None:
        """Write the ended requests, and keep the tokens of all other requests in memory."""
        self.tokens += self._buffer.tokens
        tokens = pa.concat_tables([self._held, pa.Table.from_batches([_token_batch(self._buffer.take())])])
        codes = np.concatenate([*self._codes, np.zeros(0, np.int64)])
        ended, self._ended = self._ended, []
        numbers = pa.array([each.number for each in ended], pa.int64())
        places = pc.index_in(pa.array(codes // _KINDS), numbers).fill_null(-1).to_numpy()
        keys = places * _KINDS + codes % _KINDS
        taken = np.flatnonzero(places >= 0)
        taken = taken[np.argsort(keys[taken], kind="stable")]
        for requests, some in _groups(len(ended), keys[taken]):
            which = keys[taken[some]] - requests.start * _KINDS
            self._writer.write_table(_request_table(ended[requests], tokens.take(taken[some]), which))
        self._held, self._codes = tokens.take(np.flatnonzero(places < 0)), [codes[places < 0]]
        self._latest = {each.request_id: each for each in self._latest.values() if each.status == RowStatus.ACTIVE.name}


def _name_of(code: ErrorCode) -> str:
    return ErrorCode.Name(code).removeprefix("ERROR_CODE_") if code in ErrorCode.values() else str(code)


def _groups(requests: int, keys: npt.NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Yield two slices for each row group: its requests, and their tokens."""
    ends = np.searchsorted(keys, np.arange(1, requests + 1) * _KINDS)
    begin, done = 0, 0
    while begin < requests:
        end = max(begin + 1, int(np.searchsorted(ends, done + _GROUP_TOKENS, side="right")))
        yield slice(begin, end), slice(done, int(ends[end - 1]))
        begin, done = end, int(ends[end - 1])


def _request_table(requests: list[_Request], tokens: pa.Table, keys: npt.NDArray[np.int64]) -> pa.Table:
    """Return one row per request; a token's key is the index of its request times `_KINDS`, plus the token's kind."""
    columns: list[Any] = [
        pa.array([getattr(each, name) for each in requests], kind) for name, kind in _REQUEST_TYPES.items()
    ]
    for kind, (_, names) in _OF_REQUEST.items():
        mine = np.flatnonzero(keys % _KINDS == kind)
        offsets = np.searchsorted(keys[mine] // _KINDS, np.arange(len(requests) + 1))
        of_kind = tokens.select(names).take(mine)
        columns += [
            pa.LargeListArray.from_arrays(offsets, of_kind[name].combine_chunks(), _lists_of(SCHEMA.field(name)))
            for name in names
        ]
    return pa.Table.from_arrays(columns, schema=REQUEST_SCHEMA)

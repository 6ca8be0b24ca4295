"""The Arrow schema of a row for each token, and tables of it; needs the extra parquet."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenbus_contracts import RowStatus, Scoring, ValueKind
from tokenbus_services.token_columns import ExtraColumns, Lists, TokenColumns, TokenKind

_NAME = pa.dictionary(pa.uint8(), pa.string())


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of lists of a type, whose elements are never null: Parquet writes these in less time."""
    return pa.large_list(pa.field("element", kind, nullable=False))


_OF_ALL = {
    "request_id": pa.uint64(),
    "position": pa.uint32(),
    "token_id": pa.uint32(),
    "logprob": pa.float32(),
    "rank": pa.uint32(),
    "alternative_token_ids": list_of(pa.uint32()),
    "alternative_logprobs": list_of(pa.float32()),
    "kind": _NAME,
    "status": _NAME,
    "scoring": _NAME,
    "value_kind": _NAME,
    "draft_token_count": pa.uint8(),
    "proposal_token_ids": list_of(pa.uint32()),
    "weight_version": pa.uint64(),
    "step": pa.uint64(),
    "sequence": pa.uint64(),
    "produced_at_ns": pa.uint64(),
}
EXTRAS = {
    "other_logprob": pa.float32(),
    "entropy": pa.float32(),
    "given_token_ids": list_of(pa.uint32()),
    "given_logprobs": list_of(pa.float32()),
    "mask_size": pa.uint32(),
    "mask_token_ids": list_of(pa.uint32()),
}
"""What requests may ask for of each token beside its logprob."""
_NULLABLE = {"logprob", "rank", *EXTRAS}
SCHEMA = pa.schema([pa.field(name, kind, nullable=name in _NULLABLE) for name, kind in (_OF_ALL | EXTRAS).items()])
"""A token's columns, each as `TokenColumns` and `ExtraColumns` say; null where its request did not ask for it."""
_NAMES = {
    column: pa.array([members.get(value, "") for value in range(max(members) + 1)])
    for column, members in {
        "kind": {each.value: each.name for each in TokenKind},
        "status": {each.value: each.name for each in RowStatus},
        "scoring": {each.value: each.name for each in Scoring},
        "value_kind": {each.value: each.name for each in ValueKind},
    }.items()
}


def token_batch(tokens: TokenColumns) -> pa.RecordBatch:
    """Return tokens as a batch of the schema."""
    columns = [_column_of(name, getattr(tokens, name)) for name in _OF_ALL]
    columns += _extra_arrays(tokens.extras, tokens.token_id.size)
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _extra_arrays(extras: ExtraColumns | None, tokens: int) -> list[pa.Array]:
    """Return the columns of so many tokens' extras; None: none has any."""
    if extras is None:
        zeros = pa.py_buffer(np.zeros(tokens + 1, np.int64))  # shared: no memory as long as it is only read
        return [_nulls(kind, tokens, zeros) for kind in EXTRAS.values()]
    return [_column_of(name, getattr(extras, name)) for name in EXTRAS]


def _nulls(kind: pa.DataType, count: int, zeros: pa.Buffer) -> pa.Array:
    children = [pa.array([], kind.value_type)] if pa.types.is_large_list(kind) else None
    return pa.Array.from_buffers(kind, count, [zeros, zeros], null_count=count, children=children)


def _column_of(name: str, values: npt.NDArray[Any] | Lists) -> pa.Array:
    """Return one of the schema's columns, null where the values say that the token has none."""
    kind, is_nullable = SCHEMA.field(name).type, name in _NULLABLE
    if isinstance(values, Lists):
        lacks = pa.array(values.offsets[1:] == values.offsets[:-1]) if is_nullable else None
        return pa.LargeListArray.from_arrays(values.offsets, pa.array(values.values), kind, mask=lacks)
    if name in _NAMES:
        return pa.DictionaryArray.from_arrays(pa.array(values), _NAMES[name])
    if not is_nullable:
        return pa.array(values, kind)
    lacks = np.isnan(values) if values.dtype.kind == "f" else values == 0
    return pa.array(values, kind, mask=lacks if lacks.any() else None)

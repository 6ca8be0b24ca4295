"""The Arrow schema of a row for each token, and tables of it; needs the extra arrow."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenbus_contracts import RowStatus, Scoring, ValueKind
from tokenbus_services.token_columns import Lists, TokenColumns, TokenKind

_NAME = pa.dictionary(pa.uint8(), pa.string())


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of lists of a type, whose elements are never null: Parquet writes these in less time."""
    return pa.large_list(pa.field("element", kind, nullable=False))


SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=name in {"logprob", "rank"})
        for name, kind in {
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
        }.items()
    ]
)
"""A token's columns, each as `TokenColumns` says; logprob and rank are null where the token is not scored."""
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
    lacks = None if tokens.is_scored.all() else ~tokens.is_scored
    columns = [column_of(name, getattr(tokens, name), lacks) for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def column_of(name: str, values: npt.NDArray[Any] | Lists, lacks: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return one of the schema's columns; `lacks` says which tokens are not scored, None: none."""
    kind = SCHEMA.field(name).type
    if isinstance(values, Lists):
        return pa.LargeListArray.from_arrays(values.offsets, pa.array(values.values), kind)
    if name in _NAMES:
        return pa.DictionaryArray.from_arrays(pa.array(values), _NAMES[name])
    return pa.array(values, kind, mask=lacks if name in {"logprob", "rank"} else None)

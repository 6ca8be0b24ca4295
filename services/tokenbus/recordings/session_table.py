"""SessionFile: sessions as a Parquet or Arrow file, with one row per branch; needs the extra `parquet`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenbus.recordings.sessions import Branch, Session

_GROUP_TOKENS = 1 << 16
"""Minimum number of tokens in each row group except the last."""
_SPAN = [("begin", pa.uint32())]
_ATTEMPT = pa.struct(
    [
        ("request_id", pa.uint64()),
        ("worker_id", pa.string()),
        ("epoch", pa.uint64()),
        ("turn", pa.uint32()),
        ("first_position", pa.uint32()),
        ("weight_version", pa.uint64()),
        ("reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
    ]
)
_EXPERTS = pa.struct(
    [
        ("file", pa.string()),
        ("offset", pa.uint64()),
        ("length", pa.uint64()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.uint32())),
        ("position", pa.uint32()),
        ("digest", pa.string()),
    ]
)
_REQUEST = pa.struct(
    [
        ("request_id", pa.uint64()),
        ("parent", pa.uint64()),
        ("prompt_tokens", pa.uint32()),
        ("cached_tokens", pa.uint32()),
        ("output_tokens", pa.uint32()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("attempts", pa.list_(_ATTEMPT)),
        ("branch", pa.int32()),
        ("begin", pa.uint32()),
        ("routed_experts", _EXPERTS),
    ]
)
_DIVERGENCE = pa.struct(
    [
        ("branch", pa.int32()),
        ("position", pa.uint32()),
        ("before", pa.list_(pa.uint32())),
        ("after", pa.list_(pa.uint32())),
        ("before_text", pa.string()),
        ("after_text", pa.string()),
    ]
)
_OF_TOKENS = {
    "token_ids": pa.uint32(),
    "is_output": pa.bool_(),
    "logprobs": pa.float32(),
    "ranks": pa.uint32(),
    "other_logprobs": pa.float32(),
    "entropies": pa.float32(),
    "mask_sizes": pa.uint32(),
}
_NEVER_NULL = ("token_ids", "is_output")
SCHEMA = pa.schema(
    [
        ("session", pa.string()),
        ("owner", pa.uint64()),
        ("tenant", pa.uint64()),
        ("branch", pa.int32()),
        *((name, pa.large_list(kind)) for name, kind in _OF_TOKENS.items()),
        ("mask_token_ids", pa.large_list(pa.list_(pa.uint32()))),
        ("weight_versions", pa.list_(pa.struct([*_SPAN, ("value", pa.uint64())]))),
        ("workers", pa.list_(pa.struct([*_SPAN, ("value", pa.string())]))),
        ("requests", pa.list_(_REQUEST)),
        ("divergence", _DIVERGENCE),
        ("digest", pa.string()),
        ("is_complete", pa.bool_()),
        ("missing", pa.list_(pa.string())),
    ]
)
"""Columns of a session file, which docs/training.md explains."""
_NO_BRANCH = Branch.without_tokens()


class SessionFile:
    """Writes sessions to an Arrow file or a Parquet file."""

    def __init__(self, path: Path, *, is_arrow: bool, text_of: Callable[[Sequence[int]], str | None]) -> None:
        metadata = {"tokenbus.rows": "sessions", "tokenbus.writer": f"tokenbus {version('tokenbus')}"}
        schema = SCHEMA.with_metadata(metadata)
        self._writer = pa.ipc.new_file(path, schema) if is_arrow else pq.ParquetWriter(path, schema, compression="zstd")
        self._text_of = text_of
        self._rows: list[tuple[Session, int, Branch]] = []
        self._waiting = 0
        self.sessions = self.incomplete_sessions = self.branches = self.tokens = 0

    def add(self, session: Session) -> None:
        """Write one row per branch of a session, and one row without tokens for requests without a branch."""
        self.sessions += 1
        self.incomplete_sessions += not session.is_complete
        self.branches += len(session.branches)
        self._rows += [(session, index, branch) for index, branch in enumerate(session.branches)]
        if any(request.branch < 0 for request in session.requests):
            self._rows.append((session, -1, _NO_BRANCH))
        self._waiting += sum(branch.token_ids.size for branch in session.branches)
        if self._waiting >= _GROUP_TOKENS:
            self._write()

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _write(self) -> None:
        if not self._rows:
            return
        branches = [branch for _, _, branch in self._rows]
        columns = {name: _lists(name, kind, branches) for name, kind in _OF_TOKENS.items()}
        others = pa.RecordBatch.from_pylist([self._row(*row) for row in self._rows], _OTHERS)
        columns |= dict(zip(_OTHERS.names, others.columns, strict=True))
        self._writer.write_table(pa.Table.from_pydict({name: columns[name] for name in SCHEMA.names}, SCHEMA))
        self.tokens += self._waiting
        self._rows, self._waiting = [], 0

    def _row(self, session: Session, index: int, branch: Branch) -> dict[str, Any]:
        divergence = None if branch.divergence is None else asdict(branch.divergence)
        if divergence is not None:
            divergence |= {f"{side}_text": self._text_of(divergence[side]) for side in ("before", "after")}
        return {
            "session": session.name.label,
            "owner": session.name.owner,
            "tenant": session.name.tenant,
            "branch": index,
            "mask_token_ids": branch.masks,
            "weight_versions": [span._asdict() for span in branch.weight_versions],
            "workers": [span._asdict() for span in branch.workers],
            "requests": [asdict(request) for request in session.requests if request.branch == index],
            "divergence": divergence,
            "digest": branch.digest,
            "is_complete": session.is_complete,
            "missing": session.missing,
        }


_OTHERS = pa.schema([column for column in SCHEMA if column.name not in _OF_TOKENS])


def _lists(name: str, kind: pa.DataType, branches: Sequence[Branch]) -> pa.Array:
    """Return a column with one value per token; NaN and 0 become null if they mean an unknown value."""
    arrays = [getattr(branch, name) for branch in branches]
    values = np.concatenate(arrays)
    is_null = None
    if name not in _NEVER_NULL:
        is_null = np.isnan(values) if values.dtype.kind == "f" else values == 0
    offsets = np.cumsum([0, *(each.size for each in arrays)])
    return pa.LargeListArray.from_arrays(offsets, pa.array(values, kind, mask=is_null))

"""StepAssembler: makes batches from the arrays of an engine's step, which may come from any framework."""

import contextlib
from typing import Any

import numpy as np

from tokenbus.worker.extra_columns import extra_columns
from tokenbus.worker.ragged import Host, Ragged, of_rows, on_host, request_ids_of
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import (
    BatchHeader,
    BatchKind,
    ContractError,
    Limits,
    LogprobBatch,
    RowStatus,
    Rule,
    Scoring,
    ValueKind,
)

_LOWEST = np.float32(-9999)  # replaces minus infinity, as in OpenAI's API
_HEADER_BYTES = 512  # maximum size of the header, and of the keys and lengths of all columns
_NONE_U1, _NONE_U4, _NONE_F4 = (np.zeros(0, np.dtype(kind)) for kind in ("u1", "<u4", "<f4"))
_CHECKED_BY_ROW = (
    *("positions", "token_ids", "ranks", "alternative_token_ids", "proposal_token_ids"),
    *("given_token_ids", "mask_sizes", "mask_token_ids"),
)
_FLOORED = frozenset(("other_logprobs", "given_logprobs"))
_INVALID = 2**32 - 1
_ALL = np.ones(4096, np.bool_)
_SCORINGS = np.array([Scoring.NONE, Scoring.FULL], np.uint8)  # indexed by whether the row is scored
_LOGPROBS = (ValueKind.RAW_LOGPROBS, ValueKind.PROCESSED_LOGPROBS)


class StepAssembler:
    """Makes batches from one engine's steps. The publisher later sets the worker, the epoch and the sequence.

    Example:
        import numpy as np

        assembler = tokenbus.StepAssembler(tokenbus.Limits.default(), vocabulary_size=64)
        step = tokenbus.StepArrays(
            request_ids=np.array([7], np.uint64), positions=[0], token_counts=[1], token_ids=np.array([42])
        )
        (batch,) = assembler.assemble(step)
        assert batch.token_ids.tolist() == [42]
    """

    def __init__(self, limits: Limits, vocabulary_size: int = 0) -> None:
        self._limits = limits
        self._vocabulary_size = vocabulary_size
        self._last_step = 0

    def assemble(self, arrays: StepArrays) -> list[LogprobBatch]:
        """Return a step's batch, in as many parts as it needs.

        Raises ContractError for arrays that contradict each other. Errors within a single row are found later, when the
        batch is encoded.
        """
        request_ids = request_ids_of(arrays.request_ids)
        rows = request_ids.size
        counts = of_rows("token_counts", arrays.token_counts, rows)
        scored = self._scored(arrays, rows)
        kept = None if arrays.kept_counts is None else of_rows("kept_counts", arrays.kept_counts, rows)
        ragged = Ragged(counts, kept, scored)
        top_ks, other_ids, other_values = self._alternatives(arrays, ragged, scored, rows)
        statuses = _statuses(arrays, ragged.counts, rows)
        columns: dict[str, Host] = {
            "request_ids": request_ids,
            "batch_indices": _batch_indices(arrays, rows),
            "positions": of_rows("positions", arrays.positions, rows),
            "statuses": statuses,
            "token_counts": ragged.counts,
            "draft_token_counts": _or_none(arrays.draft_token_counts, "draft_token_counts", rows),
            "proposal_counts": _or_none(arrays.proposal_counts, "proposal_counts", rows),
            "scorings": _scorings(scored, rows),
            "top_ks": top_ks,
            "token_ids": ragged.flat("token_ids", arrays.token_ids),
            "logprobs": _NONE_F4 if scored is None else _floored(arrays, ragged.scored("logprobs", arrays.logprobs)),
            "ranks": _NONE_U4 if scored is None else ragged.scored("ranks", arrays.ranks),
            "alternative_token_ids": other_ids,
            "alternative_logprobs": other_values,
            "proposal_token_ids": _proposals(arrays, rows),
            "stops": _stops(arrays, statuses, rows),
        }
        if extras := extra_columns(arrays, ragged, scored):
            columns |= extras | {name: _floored(arrays, extras[name]) for name in _FLOORED & extras.keys()}
        header = self._header(arrays, rows, scored)
        try:
            batch = LogprobBatch(header, **columns)
        except ContractError:
            # Clip numbers that are too large for their columns, so that the encoder refuses only the affected rows.
            clipped = {name: _clipped(columns[name]) for name in _CHECKED_BY_ROW if name in columns}
            batch = LogprobBatch(header, **(columns | clipped))
        self._last_step = max(self._last_step, batch.header.step)
        return self._in_parts(batch, arrays.parts)

    def _header(self, arrays: StepArrays, rows: int, scored: Host | None) -> BatchHeader:
        is_target = arrays.kind is BatchKind.TARGET
        return BatchHeader(
            "",
            epoch=1,
            sequence=1,
            step=arrays.step or self._last_step + is_target or 1,
            step_rows=rows,
            kind=arrays.kind,
            phase=arrays.phase,
            method=arrays.method,
            value_kind=ValueKind.UNSPECIFIED if scored is None else arrays.value_kind,
            vocabulary_size=self._vocabulary_size,
            weight_version=arrays.weight_version,
            draft_follows=arrays.draft_follows,
        )

    def _scored(self, arrays: StepArrays, rows: int) -> Host | None:
        if arrays.logprobs is None:
            if arrays.scored is not None and on_host("scored", arrays.scored).any():
                raise ContractError("logprobs", "one for each token of the scored rows", "none", rule=Rule.LENGTH)
            return None
        if arrays.ranks is None:
            raise ContractError("ranks", "one for each logprob", "none", rule=Rule.LENGTH)
        if arrays.scored is None:
            return _ALL[:rows] if rows <= _ALL.size else np.ones(rows, np.bool_)
        scored = of_rows("scored", arrays.scored, rows).astype(np.bool_)
        return scored if scored.any() else None

    def _alternatives(
        self, arrays: StepArrays, ragged: Ragged, scored: Host | None, rows: int
    ) -> tuple[Host, Host, Host]:
        ids = arrays.alternative_token_ids
        wanted = None if arrays.top_ks is None else of_rows("top_ks", arrays.top_ks, rows)
        if scored is None or ids is None:
            if scored is not None and wanted is not None and wanted[scored].any():
                raise ContractError("alternative_token_ids", "as many as top_ks says", "none", rule=Rule.LENGTH)
            return np.zeros(rows, np.uint8), _NONE_U4, _NONE_F4
        if arrays.alternative_logprobs is None:
            raise ContractError("alternative_logprobs", "one for each alternative", "none", rule=Rule.LENGTH)
        ids = on_host("alternative_token_ids", ids)
        values = on_host("alternative_logprobs", arrays.alternative_logprobs)
        if ids.shape != values.shape:
            limit = f"shape {ids.shape}, as alternative_token_ids"
            raise ContractError("alternative_logprobs", limit, f"shape {values.shape}", rule=Rule.LENGTH)
        if ids.ndim == 1:
            if wanted is None:
                raise ContractError("top_ks", "one for each row of alternatives in one line", "none", rule=Rule.LENGTH)
            wanted = np.where(scored, wanted, 0)
            return wanted, *_already_flat(arrays, ids, values, ragged, wanted)
        width = ids.shape[-1]
        wanted = np.where(scored, width if wanted is None else wanted, 0)
        if rows and int(wanted.max()) > width:
            row = int(wanted.argmax())
            raise ContractError(f"top_ks[{row}]", f"{width}, as many as were given", int(wanted[row]), rule=Rule.MAX)
        ids = ragged.scored("alternative_token_ids", ids, 2)
        values = ragged.scored("alternative_logprobs", values, 2)
        most = int(wanted.max()) if rows else 0
        scored_top_ks = wanted[scored]
        if int(scored_top_ks.min()) == most:
            ids, values = ids[:, :most], values[:, :most]
        else:
            cut = np.arange(width) < np.repeat(scored_top_ks, ragged.counts[scored])[:, None]
            return wanted, ids[cut], _floored(arrays, values[cut])
        return wanted, ids.reshape(-1), _floored(arrays, values.reshape(-1))

    def _in_parts(self, batch: LogprobBatch, least: int) -> list[LogprobBatch]:
        """Split the batch into at least `least` parts, or into more parts if the limits on rows and bytes need more."""
        rows, limits = batch.row_count, self._limits
        room = max(1, limits.max_message_bytes - _HEADER_BYTES)
        if batch.nbytes <= room:
            parts = min(rows, max(least, -(-rows // limits.max_rows)))
            cuts = np.array_split(np.arange(rows), parts) if parts > 1 else []
        else:
            ends = batch.runs(min(limits.max_rows, -(-rows // least)), room)
            cuts = np.split(np.arange(rows), ends[:-1])
        if len(cuts) <= 1:
            return [batch]
        header = batch.header._replace(part_count=len(cuts))
        return [
            LogprobBatch.of_views(header._replace(part_index=index), batch.select(cut).columns)
            for index, cut in enumerate(cuts)
        ]


def _clipped(values: Host) -> Host:
    if values.dtype.kind not in "iu":
        return values
    return np.where((values < 0) | (values > _INVALID), _INVALID, values)


def _batch_indices(arrays: StepArrays, rows: int) -> Host:
    if arrays.index_to_batch_id is None:
        return np.arange(rows, dtype=np.uint32)
    indices = of_rows("index_to_batch_id", arrays.index_to_batch_id, rows)
    seen = np.zeros(rows, np.bool_)
    if indices.dtype.kind == "u" or not rows or indices.min() >= 0:
        with contextlib.suppress(IndexError):
            seen[indices] = True
    if np.count_nonzero(seen) != rows:
        limit = f"each place from 0 to {rows - 1} once"
        raise ContractError("index_to_batch_id", limit, f"{np.unique(indices).size} places", rule=Rule.UNIQUE)
    return indices


def _statuses(arrays: StepArrays, counts: Host, rows: int) -> Host:
    if arrays.statuses is None:
        return np.where(counts > 0, np.uint8(RowStatus.ACTIVE), np.uint8(RowStatus.IDLE))
    return of_rows("statuses", arrays.statuses, rows)


def _stops(arrays: StepArrays, statuses: Host, rows: int) -> Host:
    if arrays.stops is None:
        return _NONE_U1
    stops = of_rows("stops", arrays.stops, rows)[statuses == RowStatus.FINISHED_STOP]
    return stops if stops.any() else _NONE_U1


def _scorings(scored: Host | None, rows: int) -> Host:
    return np.full(rows, Scoring.NONE, np.uint8) if scored is None else _SCORINGS[scored.view(np.uint8)]


def _or_none(array: Any, name: str, rows: int) -> Host:  # noqa: ANN401 - any framework's
    return np.zeros(rows, np.uint8) if array is None else of_rows(name, array, rows)


def _proposals(arrays: StepArrays, rows: int) -> Host:
    if arrays.proposal_counts is None:
        if arrays.proposal_token_ids is not None and on_host("proposal_token_ids", arrays.proposal_token_ids).size:
            raise ContractError("proposal_counts", "one for each row of proposals", "none", rule=Rule.LENGTH)
        return _NONE_U4
    counts = of_rows("proposal_counts", arrays.proposal_counts, rows)
    ids = () if arrays.proposal_token_ids is None else arrays.proposal_token_ids
    return Ragged(counts, None, None).flat("proposal_token_ids", ids)


def _already_flat(arrays: StepArrays, ids: Host, values: Host, ragged: Ragged, wanted: Host) -> tuple[Host, Host]:
    """Return the ids and logprobs of the kept tokens' alternatives, as flat arrays."""
    per_token = np.repeat(wanted.astype(np.intp), ragged.given)
    if ids.size != int(per_token.sum()):
        limit = f"{int(per_token.sum())} elements, as top_ks and token_counts say"
        raise ContractError("alternative_token_ids", limit, ids.size, rule=Rule.LENGTH)
    if ragged.kept is not None:
        kept = np.repeat(ragged.kept, per_token)
        ids, values = ids[kept], values[kept]
    return ids, _floored(arrays, values)


def _floored(arrays: StepArrays, values: Host) -> Host:
    if arrays.value_kind in _LOGPROBS:
        return np.maximum(values, _LOWEST, dtype=np.float32, casting="same_kind")
    return np.where(np.isneginf(values), _LOWEST, values).astype(np.float32)

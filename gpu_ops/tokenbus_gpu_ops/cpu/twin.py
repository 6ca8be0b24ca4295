"""Tokens, a block of rows at a time, and their results written where the body has them."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_gpu_ops.body import Body
from tokenbus_gpu_ops.columns import FaultReason
from tokenbus_gpu_ops.cpu.block import Blocks, Totals
from tokenbus_gpu_ops.cpu.selection import Found, first_of_each, of_one_row
from tokenbus_gpu_ops.cpu.values import Doubles, row_of, values_of
from tokenbus_gpu_ops.plan import Index, Plan
from tokenbus_gpu_ops.tensor import Tensor


def compute(
    plan: Plan, body: Body, logits: Tensor, ids: npt.NDArray[np.int32], *, as_logits: bool
) -> npt.NDArray[np.uint8]:
    """Return the memory with the results of all tokens, laid out as the body says."""
    memory = np.zeros(body.end, np.uint8)
    body.write_prefixes(memory)
    results = _Results(plan, body, memory, as_logits=as_logits)
    results.columns[0][:] = ids
    blocks = Blocks(logits)
    with np.errstate(all="ignore"):  # infinities and NaN are looked for, and reported
        for begin in range(0, plan.scored, blocks.rows_at_once):
            tokens = _Tokens.of(plan, slice(begin, min(begin + blocks.rows_at_once, plan.scored)))
            sampled = blocks.at(tokens.rows, ids[plan.details.tokens[tokens.places]])
            totals = blocks.pass_over(tokens.rows, sampled, int(tokens.wanted.max(initial=0)))
            faults = _faults(blocks, tokens.rows, totals)
            logs = totals.logs
            values = values_of(sampled, logs, as_logits=as_logits)
            memory[tokens.places] = faults
            results.columns[1][tokens.places] = np.where(faults == 0, values, np.float32(np.nan))
            results.columns[2][tokens.places] = np.where(faults == 0, totals.above + 1, 0)
            if totals.found is not None:
                results.put_alternatives(blocks, tokens, totals.found, logs, faults)
    return memory


class _Tokens(NamedTuple):
    """Some scored tokens that follow one another."""

    places: slice
    rows: Index
    wanted: Index
    alternatives_at: Index

    @classmethod
    def of(cls, plan: Plan, places: slice) -> "_Tokens":
        details = plan.details
        return cls(places, details.logits_rows[places], details.top_ks[places], details.alternatives_at[places])


class _Results:
    """The columns that results are written into."""

    def __init__(self, plan: Plan, body: Body, memory: npt.NDArray[np.uint8], *, as_logits: bool) -> None:
        self.columns = [body.column(memory, which) for which in range(len(body.places))]
        self._plan = plan
        self._as_logits = as_logits

    def put_alternatives(
        self, blocks: Blocks, tokens: _Tokens, found: Found, logs: Doubles, faults: npt.NDArray[np.uint8]
    ) -> None:
        *_, ids, values = self.columns
        places = tokens.alternatives_at
        for token in np.flatnonzero(faults):
            values[places[token] : places[token] + tokens.wanted[token]] = np.nan
        wanted = np.where(faults == 0, tokens.wanted, 0)
        found_values = values_of(found.logits, logs[found.rows], as_logits=self._as_logits)
        chosen, within = first_of_each(found.rows, found.ids, found_values, wanted)
        targets = places[found.rows[chosen]] + within
        ids[targets] = found.ids[chosen]
        values[targets] = found_values[chosen]
        # Where a value that was left out is as large as the last one taken, a lower id may have been left out.
        some = np.flatnonzero(wanted)
        last = values[places[some] + wanted[some] - 1]
        for token in some[values_of(found.dropped[some], logs[some], as_logits=self._as_logits) >= last]:
            row = row_of(blocks.logits, int(tokens.rows[token]))
            at = slice(places[token], places[token] + wanted[token])
            ids[at], values[at] = of_one_row(
                row, logs[token : token + 1], int(wanted[token]), as_logits=self._as_logits
            )


def _faults(blocks: Blocks, rows: Index, totals: Totals) -> npt.NDArray[np.uint8]:
    faults = np.zeros(rows.size, np.uint8)
    faults[totals.largest == -np.inf] = FaultReason.ALL_MASKED
    for place in np.flatnonzero(np.isnan(totals.largest) | (totals.largest == np.inf)):
        # The kernels' largest number passes over NaN, and an infinity is what they tell of first.
        infinite = bool((row_of(blocks.logits, int(rows[place])) == np.inf).any())
        faults[place] = FaultReason.INFINITE if infinite else FaultReason.NOT_A_NUMBER
    return faults

"""Requests: the open requests of vLLM, and the conversion of vLLM's steps to rows."""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tokenbus.engines.vllm.columns import NO_ROWS, UNSCORED, Lines, Logprobs, Rows, method_of, step_arrays
from tokenbus.engines.vllm.prompts import PromptsToScore
from tokenbus.worker import StepArrays
from tokenbus_contracts import RowStatus, ValueKind
from tokenbus_contracts.batch import FIRST_STOP_TEXT, STOP_TOKEN

_LEAST_SLOTS = 64
_ACTIVE = int(RowStatus.ACTIVE)  # converted to an int, because numpy converts enum members slowly
_WHOLE = (RowStatus.FINISHED_STOP, RowStatus.FINISHED_LENGTH)
_NOWHERE = np.iinfo(np.intp).max


class Request(NamedTuple):
    """A request that vLLM has just accepted."""

    request_id: int
    top_k: int | None
    """Number of alternatives, or None for a request without logprobs."""
    stops: Sequence[str] = ()
    """Stop strings, at most as many as the column `stops` can represent."""
    detokenizer: Any = None
    """vLLM's IncrementalDetokenizer, for a request with stop strings."""
    position: int = 0
    """Position of the first token."""
    leaves: bool = False
    """Whether a decode worker continues the request after the first token."""


class _Batch:
    """Requests with outputs in a step, and their slots. The next step usually has the same requests."""

    def __init__(self, names: Sequence[str], slots: Lines) -> None:
        self.names = names
        self.members = frozenset(names)
        self.slots = slots
        self._given: dict[str, int] | None = None
        self._indices = slots

    def indices_in(self, given: Mapping[str, int]) -> Lines:
        """Return each request's index in vLLM's arrays for a step."""
        if given != self._given:
            self._given = dict(given)
            self._indices = np.array([given.get(name, _NOWHERE) for name in self.names], np.intp)
        return self._indices


class Requests:
    """The open requests of vLLM in columns with one value per slot, so that most rows need no Python objects."""

    def __init__(self, vllm: SimpleNamespace, config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
        reasons = vllm.FinishReason
        self._stop = reasons.STOP
        self._statuses = {
            reasons.STOP: RowStatus.FINISHED_STOP,
            reasons.REPETITION: RowStatus.FINISHED_STOP,
            reasons.LENGTH: RowStatus.FINISHED_LENGTH,
            reasons.ABORT: RowStatus.ABORTED,
            reasons.ERROR: RowStatus.UNRECOVERABLE,
        }
        speculative = config.speculative_config
        self._method = method_of(None if speculative is None else speculative.method)
        self._value_kind = ValueKind[str(config.model_config.logprobs_mode).upper()]
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._batch = _Batch([], NO_ROWS.indices)
        self._request_ids = np.zeros(0, np.uint64)
        self._positions = np.zeros(0, np.uint32)
        self._top_ks = np.zeros(0, np.int16)
        self._with_stops: dict[str, Request] = {}
        self._leaving: set[str] = set()
        self._states: dict[int, bytes] = {}
        self.prompts = PromptsToScore()
        self.cached_prompts: list[tuple[int, int, int]] = []
        """Cached prompts of the requests that got their first token in the last step, as in `StepArrays`."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def add(self, name: str, request: Request) -> None:
        if not self._free:
            self._grow()
        slot = self._slots[name] = self._free.pop()
        self._request_ids[slot], self._positions[slot] = request.request_id, request.position
        self._top_ks[slot] = UNSCORED if request.top_k is None else request.top_k
        if request.detokenizer is not None:
            self._with_stops[name] = request
        if request.leaves:
            self._leaving.add(name)

    def names_of(self, request_ids: Iterable[int]) -> list[str]:
        """Return vLLM's names of the open requests that have one of these ids."""
        wanted = frozenset(request_ids)
        return [name for name, slot in self._slots.items() if int(self._request_ids[slot]) in wanted] if wanted else []

    def abort(self, names: Iterable[str]) -> Rows:
        """Remove requests and return their last rows. Unknown names are ignored."""
        found = [name for name in names if name in self._slots]
        rows = self._empty_rows(dict.fromkeys(found, RowStatus.ABORTED))
        self._remove(found)
        return rows

    def arrays(self, rows: Rows, logprobs: Logprobs) -> StepArrays:
        """Convert rows to a step, or raise ValueError if vLLM's logprobs do not match the rows."""
        return step_arrays(rows, logprobs, method=self._method, value_kind=self._value_kind)

    def taken_states(self) -> dict[int, bytes]:
        """Remove and return the connector's states of the requests that move to a decode worker."""
        states, self._states = self._states, {}
        return states

    def rows_of(self, scheduled: Any, indices: dict[str, int], outputs: Sequence[Any]) -> tuple[Rows, list[str]]:  # noqa: ANN401
        """Return a step's rows and the names of requests that a stop string ended, and remove all ended requests."""
        names = [output.request_id for output in outputs]
        if names != self._batch.names:
            outputs = [output for output in outputs if output.request_id in self._slots]
            names = [output.request_id for output in outputs]
            self._batch = _Batch(names, self._slots_of(names))
            self.cached_prompts = self._cached_prompts(outputs)
        elif self.cached_prompts:
            self.cached_prompts = []
        tokens = [output.new_token_ids for output in outputs]
        ends = {}
        reasons = [output.finish_reason for output in outputs]
        if self._with_stops or reasons.count(None) < len(reasons):
            for index, output in enumerate(outputs):
                if reasons[index] is not None or names[index] in self._with_stops:
                    tokens[index], status, stop = self._read(output)
                    if status is not RowStatus.ACTIVE:
                        ends[index] = status, stop
        rows = self._rows(self._batch.slots, tokens)
        rows.indices = self._batch.indices_in(indices)
        for index, end in ends.items():
            rows.statuses[index], rows.stops[index] = end
        if scheduled.scheduled_spec_decode_tokens:
            rows.draft_token_counts[:] = _drafts(scheduled, names, tokens)
        silent = self._silent(scheduled)
        self._remove([names[index] for index in ends])
        return rows + silent, [names[index] for index in ends if reasons[index] is None]

    def _cached_prompts(self, outputs: Sequence[Any]) -> list[tuple[int, int, int]]:
        firsts = [(output.request_id, output.prefill_stats) for output in outputs if output.prefill_stats is not None]
        return [
            (int(self._request_ids[self._slots[name]]), stats.num_prompt_tokens, stats.num_cached_tokens)
            for name, stats in firsts
        ]

    def _rows(self, slots: Lines, tokens: Sequence[Sequence[int]]) -> Rows:
        """Return rows of status ACTIVE with these tokens, and advance the positions of the slots."""
        try:  # this fast path needs one token per request
            token_ids, counts = array("I", [token for (token,) in tokens]), np.ones(slots.size, np.uint8)
        except ValueError:
            token_ids = array("I", chain.from_iterable(tokens))
            counts = np.fromiter(map(len, tokens), np.uint8, slots.size)
        positions = self._positions[slots]
        self._positions[slots] = positions + counts
        return Rows(
            request_ids=self._request_ids[slots],
            positions=positions,
            statuses=np.full(slots.size, _ACTIVE, np.uint8),
            token_counts=counts,
            token_ids=np.asarray(token_ids),
            draft_token_counts=np.zeros(slots.size, np.uint8),
            stops=np.zeros(slots.size, np.uint8),
            top_ks=self._top_ks[slots],
            indices=np.zeros(slots.size, np.intp),
        )

    def _empty_rows(self, statuses: Mapping[str, RowStatus]) -> Rows:
        if not statuses:
            return NO_ROWS
        rows = self._rows(self._slots_of(statuses), [()] * len(statuses))
        rows.statuses[:] = list(statuses.values())
        return rows

    def _silent(self, scheduled: Any) -> Rows:  # noqa: ANN401
        """Return the rows of requests without output in a step."""
        in_step, preempted = scheduled.num_scheduled_tokens.keys(), scheduled.preempted_req_ids or set()
        if not preempted and in_step <= self._batch.members:
            return NO_ROWS
        silent = dict.fromkeys(in_step, RowStatus.PREFILLING) | dict.fromkeys(preempted - in_step, RowStatus.PREEMPTED)
        known = self._slots.keys() - self._batch.members
        return self._empty_rows({name: status for name, status in silent.items() if name in known})

    def _read(self, output: Any) -> tuple[Sequence[int], RowStatus, int]:  # noqa: ANN401
        """Return the kept tokens of an output, the request's status, and the stop that ended the request."""
        reason = output.finish_reason
        status = RowStatus.ACTIVE if reason is None else self._statuses[reason]
        tokens = [] if status in {RowStatus.ABORTED, RowStatus.UNRECOVERABLE} else output.new_token_ids
        stop = STOP_TOKEN if isinstance(output.stop_reason, int) else 0
        request = self._with_stops.get(output.request_id)
        if status in _WHOLE and output.request_id in self.prompts.alone:
            return [], RowStatus.FINISHED_LENGTH, 0
        if request is not None:
            kept, text = _until_stop(request.detokenizer, tokens, is_stop=reason == self._stop)
            if text is not None:
                tokens, status = tokens[:kept], RowStatus.FINISHED_STOP
                stop = FIRST_STOP_TEXT + request.stops.index(text) if text in request.stops else 0
        if status is RowStatus.FINISHED_LENGTH and output.request_id in self._leaving:
            status = RowStatus.HANDED_OFF
            if output.kv_transfer_params:
                request_id = int(self._request_ids[self._slots[output.request_id]])
                self._states[request_id] = json.dumps(output.kv_transfer_params).encode()
        return tokens, status, stop

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._free.append(self._slots.pop(name))
            self._with_stops.pop(name, None)
            self._leaving.discard(name)
            self.prompts.remove(name)
            self._batch = _Batch([], NO_ROWS.indices)

    def _slots_of(self, names: Iterable[str]) -> Lines:
        return np.array([self._slots[name] for name in names], np.intp)

    def _grow(self) -> None:
        size = self._request_ids.size
        more = max(size, _LEAST_SLOTS)
        self._free += range(size, size + more)
        for column in ("_request_ids", "_positions", "_top_ks"):
            setattr(self, column, np.pad(getattr(self, column), (0, more)))


def _drafts(scheduled: Any, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[int]:  # noqa: ANN401
    """Return the number of verified draft tokens of each row."""
    drafts = scheduled.scheduled_spec_decode_tokens
    # vLLM does not verify drafts that violate a structured output.
    invalid = scheduled.num_invalid_spec_tokens or {}
    return [
        len(drafts.get(name, ())) - invalid.get(name, 0) if kept else 0
        for name, kept in zip(names, tokens, strict=True)
    ]


def _until_stop(detokenizer: Any, tokens: Sequence[int], *, is_stop: bool) -> tuple[int, str | None]:  # noqa: ANN401
    """Return the number of tokens up to the end of a stop string (or of all tokens), and the stop string or None.

    Tokens are added one by one, because versions of vLLM differ in the tokens that they keep after a stop string.
    `is_stop` says that the last token is a stop token or the end token.
    """
    for count, token in enumerate(tokens, 1):
        if text := detokenizer.update([token], is_stop and count == len(tokens)):
            return count, text
    return len(tokens), None

"""EnginePublisher: publishes an engine's steps and events, and ends the requests whose rows cannot be published."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.step import LEAVES
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.worker.active import ActiveRequests
from tokenbus.worker.assembler import StepAssembler
from tokenbus.worker.errors import RetentionFullError
from tokenbus.worker.publisher import Publisher
from tokenbus.worker.ragged import request_ids_of
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, ContractError, Limits, LogprobBatch, RowStatus, Scoring, encode
from tokenbus_contracts.generated.control_pb2 import ControlAnswer
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Prefilled, PromptScoresChunk

_log = logger("worker")
_EMPTY_ROW = {
    "statuses": RowStatus.IDLE,
    "token_counts": 0,
    "draft_token_counts": 0,
    "proposal_counts": 0,
    "scorings": Scoring.NONE,
    "top_ks": 0,
}
"""Replaces a row that breaks the contract, so that every other row keeps its batch index."""


class EnginePublisher:
    """Publishes for one engine. One thread at a time uses it, which need not be the engine's.

    The engine must end the requests that this ends: `take_aborts` returns them.
    """

    def __init__(self, publisher: Publisher, vocabulary_size: int) -> None:
        self.publisher = publisher
        self.settings, self.counts, self.epoch = publisher.settings, publisher.counts, publisher.epoch
        self._limits = publisher.settings.limits
        self._assembler = StepAssembler(self._limits, vocabulary_size)
        self.active = ActiveRequests()
        self._aborts: deque[int] = deque()
        self._repeated_log = DeduplicatedLog()
        # What comes for the engine.
        self.take_requests, self.take_controls = publisher.take_requests, publisher.take_controls
        self.take_no_more = publisher.take_no_more

    @property
    def is_running(self) -> bool:
        """Whether it publishes."""
        return self.publisher.is_running

    def controlled(self, answer: ControlAnswer) -> None:
        """Publish a command's answer; without room it is dropped, and the operator's call times out."""
        with contextlib.suppress(RetentionFullError):
            self.publisher.controlled(answer)

    def take_aborts(self) -> list[int]:
        """Return the ids of the requests to abort in the engine, since the last call; any thread may call this."""
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        return aborts

    def admitted(self, key: int, prompt_tokens: int, cached_tokens: int | None = None) -> None:
        """Publish that the engine admitted a request."""
        self._publish_event(self.publisher.admitted, key, prompt_tokens, cached_tokens)

    def scored(self, chunk: PromptScoresChunk) -> None:
        """Publish what the engine says of some of a prompt's tokens."""
        self._publish_event(self.publisher.scored, chunk)

    def prefilled(self, prefilled: Prefilled) -> None:
        """Publish a request's transfer state."""
        self._publish_event(self.publisher.prefilled, prefilled)

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Publish that a request ended with an error."""
        self.active.end([key])
        self._publish_event(self.publisher.failed_request, key, code, message)

    def _publish_event(self, publish: Callable[..., int], *arguments: object) -> None:
        try:
            publish(*arguments)
        except RetentionFullError as full:
            self._end_unpublished(full)

    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step; a row that cannot be published ends its own request and no other."""
        try:
            batches = self._assembler.assemble(arrays)
        except ContractError as error:
            self._end_refused(_request_ids_of(arrays), error)
            return
        except Exception as error:  # noqa: BLE001 - arrays of any kind end this step's requests alone
            self.refuse(_request_ids_of(arrays), f"{type(error).__name__}: {error}")
            return
        for batch in batches:
            try:
                self._publish(batch)
            except RetentionFullError as full:
                self._end_unpublished(full)

    def refuse(self, keys: Iterable[int], reason: str) -> None:
        """End the requests of a step whose arrays cannot be published."""
        self._end_refused(keys, ContractError("step", "arrays", reason))

    def _publish(self, batch: LogprobBatch) -> None:
        try:
            self.publisher.publish(batch)
        except ContractError as error:
            self._publish_valid_rows(batch, error)
        else:
            self._end_finished(batch)

    def _publish_valid_rows(self, batch: LogprobBatch, error: ContractError) -> None:
        try:
            valid, faults = isolate(self.publisher.addressed(batch), self._limits, error)
            self.publisher.publish(valid)
        except ContractError:
            if batch.header.part_count > 1:  # or the step would never be complete, and end other parts' requests
                with contextlib.suppress(ContractError, RetentionFullError):
                    self.publisher.publish(_with_empty_rows(batch, np.ones(batch.row_count, np.bool_)))
            self._end_refused(batch.request_ids.tolist(), error)
            return
        self._end_finished(valid)
        for key, fault in faults.items():
            self._end_refused([key], fault)

    def _end_finished(self, batch: LogprobBatch) -> None:
        leaving = LEAVES[batch.statuses]
        if batch.header.kind is BatchKind.TARGET and leaving.any():
            self.active.end(batch.request_ids[leaving].tolist())

    def _end_refused(self, keys: Iterable[int], error: ContractError) -> None:
        # One line, however many requests make an engine break the contract.
        self._repeated_log.begin(
            "contract", _log.error, "requests ended: their batch breaks the contract", reason=str(error)
        )
        for key in filter(None, keys):
            self._aborts.append(key)
            self.failed(key, ErrorCode.ERROR_CODE_ENGINE, f"its batch breaks the contract: {error}")

    def _end_unpublished(self, full: RetentionFullError) -> None:
        """End the requests of a batch that found no room; the gap that is left in the stream names them."""
        # One line, however long nothing is acknowledged: new requests may come all the while.
        self._repeated_log.begin("room", _log.error, "requests ended: no room", requests_ended=len(full.request_ids))
        self.active.end(full.request_ids)
        self._aborts.extend(full.request_ids)


def isolate(batch: LogprobBatch, limits: Limits, error: ContractError) -> tuple[LogprobBatch, dict[int, ContractError]]:
    """Return a batch with empty rows in the place of those that break the contract, and their errors by request id.

    Raises the given error if it is not the fault of single rows.
    """
    if not batch.has_consistent_lengths():
        raise error
    faults: dict[int, ContractError] = {}
    invalid = np.zeros(batch.row_count, np.bool_)
    for row, key in enumerate(batch.request_ids.tolist()):
        try:
            encode(batch.select([row]), limits)
        except ContractError as fault:
            invalid[row] = True
            faults[key] = fault
    if not faults or 0 in faults:
        raise error
    valid = _with_empty_rows(batch, invalid)
    try:
        encode(valid, limits)
    except ContractError:
        raise error from None
    return valid, faults


def _with_empty_rows(batch: LogprobBatch, empty: npt.NDArray[np.bool_]) -> LogprobBatch:
    """Return a batch with some rows empty and moved behind the others; their batch indices stay."""
    columns = batch.select(np.flatnonzero(~empty)).columns
    rows = np.flatnonzero(empty)
    for name in ("request_ids", "batch_indices", "positions"):
        columns[name] = np.concatenate([columns[name], getattr(batch, name)[rows]])
    for name, value in _EMPTY_ROW.items():
        columns[name] = np.concatenate([columns[name], np.full(rows.size, value, np.uint8)])
    for name in ("extras", "given_counts", "mask_bounds"):
        if name in columns and columns[name].size:
            columns[name] = np.concatenate([columns[name], np.zeros(rows.size, columns[name].dtype)])
    return LogprobBatch.of_views(batch.header, columns)


def _request_ids_of(arrays: StepArrays) -> list[int]:
    try:
        keys: list[int] = request_ids_of(arrays.request_ids).tolist()
    except ContractError:
        return []
    return keys

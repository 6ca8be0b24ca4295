"""EnginePublisher: publishes an engine's steps and events, and ends the requests whose rows cannot be published."""

import contextlib
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tokenbus.delivery.step import LEAVES
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.worker.active import ActiveRequests
from tokenbus.worker.assembler import StepAssembler
from tokenbus.worker.engine_output import EngineOutput
from tokenbus.worker.errors import RetentionFullError
from tokenbus.worker.publisher import Publisher
from tokenbus.worker.ragged import valid_request_ids
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import BatchKind, ContractError, Limits, LogprobBatch, RowStatus, Scoring, encode
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestEvent

_log = logger("worker")
_EMPTY_ROW = {
    "statuses": RowStatus.IDLE,
    "token_counts": 0,
    "draft_token_counts": 0,
    "proposal_counts": 0,
    "scorings": Scoring.NONE,
    "top_ks": 0,
}
"""Columns of the empty row that replaces an invalid row, so that all other rows keep their batch indices."""


class EnginePublisher(EngineOutput):
    """Publishes for one engine. Only one thread at a time may call the methods.

    The engine must abort the requests that `take_aborts` returns.
    """

    def __init__(self, publisher: Publisher, vocabulary_size: int) -> None:
        self.publisher = publisher
        self.settings, self.counts, self.epoch = publisher.settings, publisher.counts, publisher.epoch
        self.take_requests, self.take_controls = publisher.take_requests, publisher.take_controls
        self.take_no_more = publisher.take_no_more
        self._limits = publisher.settings.limits
        self._assembler = StepAssembler(self._limits, vocabulary_size)
        self.active = ActiveRequests()
        self._aborts: deque[int] = deque()
        self._repeated_log = DeduplicatedLog()

    @property
    def is_running(self) -> bool:
        return self.publisher.is_running

    def take_aborts(self) -> list[int]:
        """Return the requests that have lost rows since the last call. Any thread may call this method."""
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        return aborts

    def publish_event(self, event: RequestEvent) -> None:
        """Publish an event. If retention is full, the event's request ends, or the operator's call times out."""
        if event.HasField("error"):
            self.active.end([event.error.request_id])
        try:
            self.publisher.publish_event(event)
        except RetentionFullError as full:
            if full.request_ids:
                self._end_unpublished(full)

    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step. A row that cannot be published ends only its own request."""
        try:
            batches = self._assembler.assemble(arrays)
        except ContractError as error:
            self._end_invalid(valid_request_ids(arrays.request_ids), error)
            return
        except Exception as error:  # noqa: BLE001 - arrays of any kind end only this step's requests
            self.refuse(valid_request_ids(arrays.request_ids), f"{type(error).__name__}: {error}")
            return
        for batch in batches:
            try:
                self._publish(batch)
            except RetentionFullError as full:
                self._end_unpublished(full)

    def refuse(self, request_ids: Iterable[int], reason: str) -> None:
        """End the requests of a step whose arrays cannot be published."""
        self._end_invalid(request_ids, ContractError("step", "arrays", reason))

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
            # If this part were omitted, the step would stay incomplete, and the requests of its other parts would fail.
            if batch.header.part_count > 1:
                with contextlib.suppress(ContractError, RetentionFullError):
                    self.publisher.publish(_with_empty_rows(batch, np.ones(batch.row_count, np.bool_)))
            self._end_invalid(batch.request_ids.tolist(), error)
            return
        self._end_finished(valid)
        for request_id, fault in faults.items():
            self._end_invalid([request_id], fault)

    def _end_finished(self, batch: LogprobBatch) -> None:
        leaving = LEAVES[batch.statuses]
        if batch.header.kind is BatchKind.TARGET and leaving.any():
            self.active.end(batch.request_ids[leaving].tolist())

    def _end_invalid(self, request_ids: Iterable[int], error: ContractError) -> None:
        # Write only one log line at a time, even if many requests make an engine break the contract.
        self._repeated_log.begin(
            "contract", _log.error, "requests ended: their batch breaks the contract", reason=str(error)
        )
        for request_id in filter(None, request_ids):
            self._aborts.append(request_id)
            self.failed(request_id, ErrorCode.ERROR_CODE_ENGINE, f"its batch breaks the contract: {error}")

    def _end_unpublished(self, full: RetentionFullError) -> None:
        """End the requests of an item for which retention was full. A gap in the stream names these requests."""
        # Write only one log line until the next ack, because new requests may arrive all the time.
        self._repeated_log.begin("room", _log.error, "requests ended: no room", requests_ended=len(full.request_ids))
        self.active.end(full.request_ids)
        self._aborts.extend(full.request_ids)


def isolate(batch: LogprobBatch, limits: Limits, error: ContractError) -> tuple[LogprobBatch, dict[int, ContractError]]:
    """Return a batch with empty rows in place of invalid rows, and the errors of the invalid rows by request id.

    Raises `error` if it is not caused by single rows.
    """
    if not batch.has_consistent_lengths():
        raise error
    faults: dict[int, ContractError] = {}
    invalid = np.zeros(batch.row_count, np.bool_)
    for row, request_id in enumerate(batch.request_ids.tolist()):
        try:
            encode(batch.select([row]), limits)
        except ContractError as fault:
            invalid[row] = True
            faults[request_id] = fault
    if not faults or 0 in faults:
        raise error
    valid = _with_empty_rows(batch, invalid)
    try:
        encode(valid, limits)
    except ContractError:
        raise error from None
    return valid, faults


def _with_empty_rows(batch: LogprobBatch, empty: npt.NDArray[np.bool_]) -> LogprobBatch:
    """Return a batch in which some rows are empty and moved to the end. All rows keep their batch indices."""
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

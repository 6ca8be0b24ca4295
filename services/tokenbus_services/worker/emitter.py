"""Emitter: what an engine's steps and its word of requests become in the stream, and what is ended for want of that."""

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping

from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode
from tokenbus_services.delivery.step import LEAVES
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.worker.active_requests import BegunRequests
from tokenbus_services.worker.arrays import keys_of
from tokenbus_services.worker.assembler import StepAssembler
from tokenbus_services.worker.errors import RetentionFullError
from tokenbus_services.worker.handoff.sender import HandoffSender
from tokenbus_services.worker.isolation import emptied, isolated
from tokenbus_services.worker.publisher import Publisher
from tokenbus_services.worker.step import StepArrays

_log = logger("worker")


class Emitter:
    """Publishes for one engine; one thread at a time uses it, which need not be the engine's.

    What it ends on the way, the engine is to end too: `take_aborts` says which.
    """

    def __init__(self, publisher: Publisher, vocabulary_size: int, handoffs: HandoffSender | None = None) -> None:
        """Take the publisher, the engine's vocabulary, and what sends a prefill engine's requests on."""
        self.publisher = publisher
        self._limits = publisher.settings.limits
        self._assembler = StepAssembler(self._limits, vocabulary_size)
        self._handoffs = handoffs
        self.begun = BegunRequests(hands_off=handoffs is not None)
        self._aborts: deque[int] = deque()
        self._repeated_log = DeduplicatedLog()

    def take_aborts(self) -> list[int]:
        """Return the requests that the engine is to end, since the last call; for any thread."""
        taken = []
        while self._aborts:
            taken.append(self._aborts.popleft())
        return taken

    def admitted(self, key: int, prompt_tokens: int) -> None:
        """Tell that the engine took a request."""
        try:
            self.publisher.admitted(key, prompt_tokens)
        except RetentionFullError as full:
            self._no_room(full)

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Tell that a request ended with an error."""
        self.begun.end([key])
        try:
            self.publisher.failed_request(key, code, message)
        except RetentionFullError as full:
            self._no_room(full)

    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step; what cannot be published ends its own requests and no others."""
        try:
            batches = self._assembler.assemble(arrays)
        except ContractError as error:
            self._refused(_keys_of(arrays), error)
            return
        except Exception as error:  # noqa: BLE001 - whatever an engine returns, it ends that step's requests alone
            self._refused(_keys_of(arrays), ContractError("step", "arrays", f"{type(error).__name__}: {error}"))
            return
        handed_off: set[int] = set()
        for batch in batches:
            handed_off |= self._publish(batch)
        self._hand_off(arrays.states, handed_off)

    def _publish(self, batch: LogprobBatch) -> set[int]:
        """Publish a batch, and return the requests that it hands off."""
        try:
            self.publisher.publish(batch)
        except RetentionFullError as full:
            self._no_room(full)
            return set()
        except ContractError as error:
            return self._publish_rest(batch, error)
        return self._settle(batch)

    def _publish_rest(self, batch: LogprobBatch, error: ContractError) -> set[int]:
        """Publish what keeps the contract of a batch that does not, and end the requests of the other rows."""
        try:
            rest, faults = isolated(self.publisher.addressed(batch), self._limits, error)
            self.publisher.publish(rest)
        except ContractError:
            if batch.header.part_count > 1:  # or the step would never be whole, and others' requests end with it
                with contextlib.suppress(ContractError, RetentionFullError):
                    self.publisher.publish(emptied(batch))
            self._refused(batch.request_keys.tolist(), error)
            return set()
        except RetentionFullError as full:
            self._no_room(full)
            return set()
        handed_off = self._settle(rest)
        for key, fault in faults.items():
            self._refused([key], fault)
        return handed_off

    def _settle(self, batch: LogprobBatch) -> set[int]:
        if batch.header.kind is not BatchKind.TARGET:
            return set()
        leaving, is_handed_off = LEAVES[batch.statuses], batch.statuses == RowStatus.HANDED_OFF
        handed_off: list[int] = batch.request_keys[is_handed_off].tolist()
        if leaving.any():
            self.begun.leave(handed_off)
            self.begun.end(batch.request_keys[leaving & ~is_handed_off].tolist())
        return set(handed_off)

    def _hand_off(self, states: Mapping[int, bytes], handed_off: set[int]) -> None:
        """Send on what this step handed off, after its rows were published; others of it have ended."""
        for key, state in states.items():
            generate = self.begun.take_asked(key)
            if key not in handed_off:
                continue
            if generate is None or self._handoffs is None:
                self.failed(key, ErrorCode.ERROR_CODE_HANDOFF, "this worker has nothing to hand it off with")
                continue
            try:
                self._handoffs.send(generate, state)
            except ValueError as error:
                self.failed(key, ErrorCode.ERROR_CODE_HANDOFF, str(error))

    def _refused(self, keys: Iterable[int], error: ContractError) -> None:
        # One line, however many requests make an engine break the contract.
        self._repeated_log.begin(
            "contract", _log.error, "requests ended: their batch breaks the contract", reason=str(error)
        )
        for key in filter(None, keys):
            self._aborts.append(key)
            self.failed(key, ErrorCode.ERROR_CODE_ENGINE, f"its batch breaks the contract: {error}")

    def _no_room(self, full: RetentionFullError) -> None:
        """End what the gap names that was left in the stream: the processor learns of it there."""
        _log.error("requests ended: no room", requests_ended=len(full.request_keys))
        self.begun.end(full.request_keys)
        self._aborts.extend(full.request_keys)


def _keys_of(arrays: StepArrays) -> list[int]:
    try:
        keys: list[int] = keys_of(arrays.request_keys).tolist()
    except ContractError:
        return []
    return keys

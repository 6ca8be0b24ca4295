"""The engine's loop: takes requests, computes steps and publishes them, and ends what goes wrong."""

import threading
from collections.abc import Callable, Iterable, Mapping

from tokenbus_contracts import BatchKind, ContractError, LogprobBatch, RowStatus
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_services.logs import logger
from tokenbus_services.worker.arrays import on_host
from tokenbus_services.worker.assembler import StepAssembler
from tokenbus_services.worker.engine import Engine, EngineBrokenError
from tokenbus_services.worker.errors import NotRunningError, RetentionFullError
from tokenbus_services.worker.handoff.sender import HandoffSender
from tokenbus_services.worker.isolation import isolated
from tokenbus_services.worker.publisher import LEAVES, Publisher
from tokenbus_services.worker.step import StepArrays
from tokenbus_services.worker.taken import TakenOver

_log = logger("worker")
_IDLE_SECONDS = 0.1
_STOPPING = "the worker is stopping"


class EngineLoop:
    """Runs one engine with one publisher, on the engine's own thread."""

    def __init__(self, publisher: Publisher, engine: Engine, handoffs: HandoffSender | None = None) -> None:
        """Take both, and what sends a prefill engine's requests on; who made them closes them."""
        self._handoffs = handoffs
        self._given: dict[int, Generate] = {}
        self._publisher = publisher
        self._engine = engine
        self._settings = publisher.settings
        self._assembler = StepAssembler(self._settings.limits, engine.vocabulary_size)
        self._open: set[int] = set()
        self._failed_in_a_row = 0

    def serve(self, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
        """Take requests, compute steps and publish them, until told to stop; `pace` is called before each step.

        An engine that is broken ends its requests, and this, with its error.
        """
        while not stop.is_set():
            try:
                self._take_all(0 if self._engine.has_work else _IDLE_SECONDS)
                if not self._engine.has_work:
                    continue
                if pace is not None:
                    pace()
                self.compute()
            except NotRunningError:
                return

    def finish(self, seconds: float, now: Callable[[], float]) -> None:
        """Compute and publish steps until the engine has nothing left, for at most so many seconds.

        Requests that come now end with an error that says why; what the engine has not finished in time ends when the
        publisher leaves.
        """
        deadline = now() + seconds
        try:
            self._refuse_new()
            while self._engine.has_work and now() < deadline:
                self.compute()
                self._refuse_new()
        except NotRunningError:
            return

    def compute(self) -> None:
        """Compute one step and publish all of it; what cannot be published ends its own requests and no others."""
        try:
            step = self._engine.step()
        except EngineBrokenError as error:
            self._end_all(f"the engine is broken: {error}")
            raise
        except Exception as error:  # noqa: BLE001 - whatever an engine raises ends its requests, and not its worker
            self._step_failed(error)
            return
        self._failed_in_a_row = 0
        for arrays in step:
            try:
                batches = self._assembler.assemble(arrays)
            except ContractError as error:
                self._refused(_keys_of(arrays), error)
                continue
            for batch in batches:
                self._publish(batch)
            self._hand_off(arrays.states)

    # Requests.

    def _take_all(self, seconds: float) -> None:
        requests = self._publisher.take_requests(seconds)
        for taken in self._publisher.take_handoffs():
            self._take_over(taken)
        for request in requests:
            if isinstance(request, Generate):
                self._admit(request)
            else:
                self._engine.abort(request.request_key)

    def _admit(self, generate: Generate) -> None:
        key = generate.request_key
        try:
            prompt_tokens = self._engine.admit(generate)
        except ValueError as error:
            self._fail(key, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error))
            return
        if self._handoffs is not None:
            self._given[key] = generate
        self._admitted(key, prompt_tokens)

    def _take_over(self, taken: TakenOver) -> None:
        key = taken.generate.request_key
        try:
            prompt_tokens = self._engine.admit(taken.generate, taken.state)
        except ValueError as error:
            self._publisher.forget(key)
            taken.answer(str(error) or "the engine does not take it")
            return
        self._admitted(key, prompt_tokens)
        taken.answer("")

    def _admitted(self, key: int, prompt_tokens: int) -> None:
        self._open.add(key)
        try:
            self._publisher.admitted(key, prompt_tokens)
        except RetentionFullError as full:
            self._end(full)

    def _refuse_new(self) -> None:
        for taken in self._publisher.take_handoffs():
            self._publisher.forget(taken.generate.request_key)
            taken.answer(_STOPPING)
        for request in self._publisher.take_requests():
            if isinstance(request, Generate):
                self._fail(request.request_key, ErrorCode.ERROR_CODE_OVERLOADED, _STOPPING)
            else:
                self._engine.abort(request.request_key)

    def _hand_off(self, states: Mapping[int, bytes]) -> None:
        """Send on what this step handed off, after its rows were published."""
        for key, state in states.items():
            generate = self._given.pop(key, None)
            if generate is None or self._handoffs is None:
                self._fail(key, ErrorCode.ERROR_CODE_HANDOFF, "this worker has nothing to hand it off with")
                continue
            try:
                self._handoffs.send(generate, state)
            except ValueError as error:
                self._fail(key, ErrorCode.ERROR_CODE_HANDOFF, str(error))

    # Batches.

    def _publish(self, batch: LogprobBatch) -> None:
        try:
            self._publisher.publish(batch)
        except RetentionFullError as full:
            self._end(full)
        except ContractError as error:
            self._publish_rest(batch, error)
        else:
            self._settle(batch)

    def _publish_rest(self, batch: LogprobBatch, error: ContractError) -> None:
        """Publish what keeps the contract of a batch that does not, and end the requests of the other rows."""
        try:
            rest, faults = isolated(self._publisher.addressed(batch), self._settings.limits, error)
            self._publisher.publish(rest)
        except ContractError:
            self._refused(batch.request_keys.tolist(), error)
            return
        except RetentionFullError as full:
            self._end(full)
            return
        self._settle(rest)
        for key, fault in faults.items():
            self._refused([key], fault)

    def _settle(self, batch: LogprobBatch) -> None:
        if batch.header.kind is BatchKind.TARGET:
            leaving = LEAVES[batch.statuses]
            if leaving.any():
                self._open.difference_update(batch.request_keys[leaving].tolist())
                ended = leaving & (batch.statuses != RowStatus.HANDED_OFF)
                for key in batch.request_keys[ended].tolist() if self._given else ():
                    self._given.pop(key, None)

    # Ends.

    def _step_failed(self, error: Exception) -> None:
        """End what the engine had: nobody knows what of the step was computed. One that fails each time is broken."""
        self._publisher.counts.failed_steps += 1
        self._failed_in_a_row += 1
        _log.error("step failed", requests_ended=len(self._open), exc_info=error)
        self._end_all(f"the engine failed: {type(error).__name__}: {error}")
        if self._failed_in_a_row >= self._settings.worker.failed_steps:
            raise EngineBrokenError(f"{self._failed_in_a_row} steps failed one after the other, the last with: {error}")

    def _end_all(self, message: str) -> None:
        for key in sorted(self._open):
            self._fail(key, ErrorCode.ERROR_CODE_ENGINE, message)
            self._engine.abort(key)

    def _refused(self, keys: Iterable[int], error: ContractError) -> None:
        _log.error("requests ended: their batch breaks the contract", reason=str(error))
        for key in filter(None, keys):
            self._fail(key, ErrorCode.ERROR_CODE_ENGINE, f"its batch breaks the contract: {error}")
            self._engine.abort(key)

    def _fail(self, key: int, code: ErrorCode, message: str) -> None:
        self._open.discard(key)
        self._given.pop(key, None)
        try:
            self._publisher.failed_request(key, code, message)
        except RetentionFullError as full:
            self._end(full)

    def _end(self, full: RetentionFullError) -> None:
        """End what the gap names that was left in the stream: the processor learns of it there."""
        _log.error("requests ended: no room", requests_ended=len(full.request_keys))
        for key in full.request_keys:
            self._open.discard(key)
            self._given.pop(key, None)
            self._engine.abort(key)


def _keys_of(arrays: StepArrays) -> list[int]:
    try:
        return [int(key) for key in on_host("request_keys", arrays.request_keys).reshape(-1).tolist()]
    except (ContractError, TypeError, ValueError):
        return []

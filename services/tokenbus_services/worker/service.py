"""The engine's loop: takes requests, computes steps and hands them on, and ends what goes wrong."""

import threading
from collections.abc import Callable
from typing import Protocol

from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_services.logs import logger
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.engine import Engine, EngineBrokenError
from tokenbus_services.worker.errors import NotRunningError
from tokenbus_services.worker.step import StepArrays
from tokenbus_services.worker.taken import TakenOver

_log = logger("worker")
_IDLE_SECONDS = 0.1
_STOPPING = "the worker is stopping"


class Outlet(Protocol):
    """Where what the engine says goes: an Emitter, or what uses one in a thread of its own."""

    def admitted(self, key: int, prompt_tokens: int) -> None:
        """Tell that the engine took a request."""

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Tell that a request ended with an error."""

    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step."""


class EngineLoop:
    """Runs one engine, on the engine's own thread."""

    def __init__(self, engine: Engine, emitter: Emitter, outlet: Outlet | None = None) -> None:
        """Take the engine and what publishes for it, here or, through an outlet, elsewhere; others close both."""
        self._engine = engine
        self._emitter = emitter
        self._outlet: Outlet = outlet or emitter
        self._publisher = emitter.publisher
        self._failed_in_a_row = 0

    def serve(self, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
        """Take requests, compute steps and publish them, until told to stop; `pace` is called before each step.

        An engine that is broken ends its requests, and this, with its error.
        """
        while not stop.is_set() and self._publisher.is_running:
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
        """Compute one step and hand all of it on."""
        try:
            step = self._engine.step()
            for arrays in step:
                if arrays.states:
                    self._emitter.begun.leave(arrays.states)
                self._outlet.emit(arrays)
        except NotRunningError:
            raise
        except EngineBrokenError as error:
            self._end_all(f"the engine is broken: {error}")
            raise
        except Exception as error:  # noqa: BLE001 - whatever an engine raises ends its requests, and not its worker
            self._step_failed(error)
            return
        self._failed_in_a_row = 0
        self._end_what_was_ended()

    def _take_all(self, seconds: float) -> None:
        requests = self._publisher.take_requests(seconds)
        for taken in self._publisher.take_handoffs():
            self._take_over(taken)
        for request in requests:
            if isinstance(request, Generate):
                self._admit(request)
            else:
                self._engine.abort(request.request_key)
        self._end_what_was_ended()

    def _admit(self, generate: Generate) -> None:
        try:
            prompt_tokens = self._engine.admit(generate)
        except ValueError as error:
            self._outlet.failed(generate.request_key, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error))
            return
        self._emitter.begun.begin(generate)
        self._outlet.admitted(generate.request_key, prompt_tokens)

    def _take_over(self, taken: TakenOver) -> None:
        key = taken.generate.request_key
        try:
            prompt_tokens = self._engine.admit(taken.generate, taken.state)
        except ValueError as error:
            self._publisher.forget(key)
            taken.answer(str(error) or "the engine does not take it")
            return
        self._emitter.begun.begin(taken.generate)
        self._outlet.admitted(key, prompt_tokens)
        taken.answer("")

    def _refuse_new(self) -> None:
        for taken in self._publisher.take_handoffs():
            self._publisher.forget(taken.generate.request_key)
            taken.answer(_STOPPING)
        for request in self._publisher.take_requests():
            if isinstance(request, Generate):
                self._outlet.failed(request.request_key, ErrorCode.ERROR_CODE_OVERLOADED, _STOPPING)
            else:
                self._engine.abort(request.request_key)
        self._end_what_was_ended()

    def _end_what_was_ended(self) -> None:
        for key in self._emitter.take_aborts():
            self._engine.abort(key)

    def _step_failed(self, error: Exception) -> None:
        """End what the engine had: nobody knows what of the step was computed. One that fails each time is broken."""
        self._publisher.counts.failed_steps += 1
        self._failed_in_a_row += 1
        _log.error("step failed", exc_info=error)
        self._end_all(f"the engine failed: {type(error).__name__}: {error}")
        if self._failed_in_a_row >= self._publisher.settings.worker.failed_steps:
            raise EngineBrokenError(f"{self._failed_in_a_row} steps failed one after the other, the last with: {error}")

    def _end_all(self, message: str) -> None:
        for key in self._emitter.begun.end_all():
            self._outlet.failed(key, ErrorCode.ERROR_CODE_ENGINE, message)
            self._engine.abort(key)

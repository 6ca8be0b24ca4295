"""The engine's loop: takes requests, computes steps and hands them on, and ends what goes wrong."""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_services.clock import SystemClock
from tokenbus_services.delivery.errors import brief
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.worker.emitter import Emitter
from tokenbus_services.worker.engine import Engine, EngineBrokenError, EngineStepError
from tokenbus_services.worker.errors import NotRunningError
from tokenbus_services.worker.step import StepArrays
from tokenbus_services.worker.taken import TakenOver

_log = logger("worker")
_IDLE_SECONDS = 0.1
_STOPPING = "the worker is stopping"
_MOST_PROMPT_TOKENS = 2**32 - 1


class Outlet(Protocol):
    """Where what the engine says goes: an Emitter, or what uses one in a thread of its own."""

    def admitted(self, key: int, prompt_tokens: int) -> None:
        """Tell that the engine took a request."""

    def failed(self, key: int, code: ErrorCode, message: str) -> None:
        """Tell that a request ended with an error."""

    def emit(self, arrays: StepArrays) -> None:
        """Publish one batch of a step."""


class _RefusedError(Exception):
    """A request does not begin: why, as its client is told."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineLoop:
    """Runs one engine, on the engine's own thread.

    What the engine raises for a request ends that request, at most the engine's others too, and never this. A request
    whose deadline comes ends here, whether a processor is there or not.
    """

    def __init__(
        self,
        engine: Engine,
        emitter: Emitter,
        outlet: Outlet | None = None,
        *,
        unix_ms: Callable[[], int] | None = None,
    ) -> None:
        """Take the engine and what publishes for it, here or, through an outlet, elsewhere; others close both.

        Deadlines are compared with `unix_ms`, by default the system's clock.
        """
        self._engine = engine
        self._emitter = emitter
        self._outlet: Outlet = outlet or emitter
        self._publisher = emitter.publisher
        self._unix_ms = unix_ms or SystemClock().unix_ms
        self._repeated_log = DeduplicatedLog()
        self._untried: list[int] = []
        """The requests that were admitted since the last step that succeeded."""
        self._failed_in_a_row = 0

    def serve(self, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
        """Take requests, compute steps and publish them, until told to stop; `pace` is called before each step.

        An engine that is broken ends its requests, and this, with its error.
        """
        while not stop.is_set() and self._publisher.is_running:
            try:
                self._take_all(0 if self._engine.has_work else _IDLE_SECONDS)
                if not self._engine.has_work:
                    self._untried.clear()
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
            self._end_all_as_broken(error)
            raise
        except Exception as error:  # noqa: BLE001 - whatever an engine raises ends its requests, and not its worker
            self._step_failed(error)
            return
        self._failed_in_a_row = 0
        self._untried.clear()
        self._end_what_was_ended()

    def _take_all(self, seconds: float) -> None:
        requests = self._publisher.take_requests(seconds)
        for taken in self._publisher.take_handoffs():
            self._take_over(taken)
        for request in requests:
            if isinstance(request, Generate):
                self._admit(request)
            else:
                self._abort(request.request_key)
        self._end_what_was_ended()

    def _admit(self, generate: Generate) -> None:
        key = generate.request_key
        try:
            prompt_tokens = self._admitted(generate)
        except _RefusedError as refused:
            self._outlet.failed(key, refused.code, str(refused))
            return
        self._outlet.admitted(key, prompt_tokens)

    def _take_over(self, taken: TakenOver) -> None:
        key = taken.generate.request_key
        try:
            prompt_tokens = self._admitted(taken.generate, taken.state)
        except _RefusedError as refused:
            self._publisher.forget(key)
            taken.answer(brief(str(refused), refused.code))
            return
        self._outlet.admitted(key, prompt_tokens)
        taken.answer("")

    def _admitted(self, generate: Generate, state: bytes | None = None) -> int:
        """Have the engine take a request, and return how long its prompt is in tokens."""
        key, deadline = generate.request_key, generate.deadline_unix_ms
        if deadline and (late := self._unix_ms() - deadline) >= 0:
            message = f"deadline_unix_ms: a moment to come, got one {late} ms ago"
            raise _RefusedError(ErrorCode.ERROR_CODE_DEADLINE, message)
        try:
            prompt_tokens = int(self._engine.admit(generate) if state is None else self._engine.admit(generate, state))
        except ValueError as error:
            raise _RefusedError(ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error)) from None
        except EngineBrokenError as error:
            self._outlet.failed(key, ErrorCode.ERROR_CODE_ENGINE, f"the engine is broken: {error}")
            self._end_all_as_broken(error)
            raise
        except Exception as error:  # noqa: BLE001 - whatever a request makes an engine raise, it ends that request
            message = self._engine_error("admit", key, error)
            self._abort(key)  # an engine that kept a part of it must not compute that
            raise _RefusedError(ErrorCode.ERROR_CODE_ENGINE, message) from None
        self._emitter.begun.begin(generate)
        self._untried.append(key)
        return min(max(prompt_tokens, 1), _MOST_PROMPT_TOKENS)

    def _abort(self, key: int) -> None:
        """Have the engine end a request; one for which that fails has ended here."""
        try:
            self._engine.abort(key)
        except EngineBrokenError as error:
            self._end_all_as_broken(error)
            raise
        except Exception as error:  # noqa: BLE001 - as above
            message = self._engine_error("abort", key, error)
            for known in self._emitter.begun.end([key]):
                self._outlet.failed(known, ErrorCode.ERROR_CODE_ENGINE, message)

    def _engine_error(self, doing: str, key: int, error: Exception) -> str:
        """Count and log that the engine failed for one request, and return what its client is told."""
        self._publisher.counts.engine_errors += 1
        kind = type(error).__name__
        self._repeated_log.begin((doing, kind), _log.error, "engine error", doing=doing, request_key=key, reason=error)
        return f"the engine failed: {kind}: {error}"

    def _refuse_new(self) -> None:
        for taken in self._publisher.take_handoffs():
            self._publisher.forget(taken.generate.request_key)
            taken.answer(_STOPPING)
        for request in self._publisher.take_requests():
            if isinstance(request, Generate):
                self._outlet.failed(request.request_key, ErrorCode.ERROR_CODE_OVERLOADED, _STOPPING)
            else:
                self._abort(request.request_key)
        self._end_what_was_ended()

    def _end_what_was_ended(self) -> None:
        """End in the engine what could not be published, and what has come to its deadline."""
        for key in self._emitter.take_aborts():
            self._abort(key)
        overdue = self._emitter.begun.end_overdue(self._unix_ms())
        self._end(overdue, ErrorCode.ERROR_CODE_DEADLINE, "its deadline came before its last token")

    def _step_failed(self, error: Exception) -> None:
        """End the requests that a step may have failed for.

        Only steps that failed without a request that may be the reason say that the engine is broken: one is named, or
        has not been in a step that succeeded. An engine that is broken fails also when these have ended.
        """
        self._publisher.counts.failed_steps += 1
        self._repeated_log.begin(("step", type(error).__name__), _log.error, "step failed", exc_info=error)
        begun = self._emitter.begun
        is_whole = isinstance(error, EngineStepError)
        ended = begun.end(error.keys) if isinstance(error, EngineStepError) else []
        if not ended:
            ended = begun.end(self._untried)
            self._untried.clear()
        self._failed_in_a_row += not ended
        if not ended or not is_whole:
            ended += begun.end_all()
        self._end(ended, ErrorCode.ERROR_CODE_ENGINE, f"the engine failed: {type(error).__name__}: {error}")
        if self._failed_in_a_row >= self._publisher.settings.worker.failed_steps:
            raise EngineBrokenError(f"{self._failed_in_a_row} steps failed one after the other, the last with: {error}")

    def _end(self, keys: Iterable[int], code: ErrorCode, message: str) -> None:
        """Publish that requests end, and end them in the engine."""
        for key in keys:
            self._outlet.failed(key, code, message)
            self._abort(key)

    def _end_all_as_broken(self, error: EngineBrokenError) -> None:
        for key in self._emitter.begun.end_all():
            self._outlet.failed(key, ErrorCode.ERROR_CODE_ENGINE, f"the engine is broken: {error}")

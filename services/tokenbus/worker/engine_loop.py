"""EngineLoop: admits requests, computes steps, publishes them, and ends the requests that fail."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np

from tokenbus.clock import SystemClock
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.worker.command_runner import CommandRunner
from tokenbus.worker.engine import Engine, EngineBrokenError, EngineStepError, FullEngine
from tokenbus.worker.engine_output import EngineOutput, session_events
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.publishing import PublisherClient
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import (
    Abort,
    ContinuationPolicy,
    ErrorCode,
    Generate,
    Prefilled,
    RequestEvent,
)
from tokenbus_contracts.schema import bounds_in

_log = logger("worker")
_IDLE_SECONDS = 0.1
_STOPPING = "the worker is stopping"
_MOST_FAILED = 4096
_MOST_PROMPT_TOKENS = 2**32 - 1
_MOST_STATE = bounds_in(Prefilled.DESCRIPTOR.fields_by_name["transfer_state"].GetOptions()).max_bytes


class EngineLoop:
    """Runs one engine on the engine's thread.

    An exception of the engine ends requests, but only an EngineBrokenError ends the loop. The loop also ends requests
    at their deadlines, even without a processor.
    """

    def __init__(
        self,
        engine: Engine,
        client: PublisherClient,
        out: EngineOutput | None = None,
        *,
        unix_ms: Callable[[], int] | None = None,
    ) -> None:
        """Create a loop over an engine and a publisher. The caller must close both objects.

        Steps go to `out`, or by default to the publisher. `unix_ms` is the clock of deadlines, by default the system's.
        """
        self._engine = cast("FullEngine", engine)  # the engine may lack any optional member
        self._client = client
        self._out = out or client
        self._unix_ms = unix_ms or SystemClock().unix_ms
        self._has_cache = hasattr(engine, "kv_cache_usage")
        self._note_cache()
        self._commands = CommandRunner(engine, self._abort_all, self._out.publish_event, self._unix_ms)
        self._repeated_log = DeduplicatedLog()
        self._untried: list[int] = []  # requests admitted since the last successful step
        self._is_finishing = False
        self._failed_in_a_row = 0
        self._failed: dict[int, None] = {}
        """Failed requests, oldest first, whose last rows the engine has not returned yet."""

    def serve(self, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
        """Admit requests and publish steps until `stop` is set. `pace` is called before each step.

        Raises EngineBrokenError after ending the requests of a broken engine.
        """
        with contextlib.suppress(NotRunningError):
            while not stop.is_set() and self._client.is_running:
                self.turn(0 if self._engine.has_work else _IDLE_SECONDS, pace)

    def turn(self, seconds: float = 0, pace: Callable[[], None] | None = None) -> None:
        """Wait at most `seconds` for requests and commands, and compute a step if the engine has work."""
        with self._ending_requests_if_broken():
            self._take_requests(seconds)
            self._run_commands()
            if not self._engine.has_work:
                self._untried.clear()
                return
            if pace is not None:
                pace()
            self.compute()
            if self._commands.is_waiting and not self._engine.has_work:
                self._run_commands()

    def finish(self, seconds: float, now: Callable[[], float]) -> None:
        """Compute and publish steps until the engine has no work, for at most `seconds`.

        New requests end with an error. Unfinished requests end when the publisher leaves the processor.
        """
        deadline = now() + seconds
        with contextlib.suppress(NotRunningError), self._ending_requests_if_broken():
            self._is_finishing = True
            self._take_requests(0)
            self._run_commands()
            while self._engine.has_work and now() < deadline:
                self.compute()
                self._take_requests(0)
                self._run_commands()

    def compute(self) -> None:
        try:
            step = self._engine.step()
            for arrays in step:
                for prompt in arrays.cached_prompts:
                    self._out.admitted(*prompt)
                for scores in arrays.prompt_scores:
                    for chunk in scores.chunks():
                        self._out.publish_event(RequestEvent(prompt_scores=chunk))
                for request_id, state in arrays.transfer_states.items():
                    self._publish_transfer_state(request_id, state)
                if self._failed:
                    self._hide_last_rows(arrays)
                self._out.emit(arrays)
        except (NotRunningError, EngineBrokenError):
            raise
        except Exception as error:  # noqa: BLE001 - it ends requests, not the worker
            self._step_failed(error)
            return
        self._failed_in_a_row = 0
        self._untried.clear()
        self._note_cache()
        self._end_aborted_and_overdue()

    def _note_cache(self) -> None:
        if self._has_cache:
            self._client.counts.kv_cache = 1 + min(1000, round(1000 * self._engine.kv_cache_usage))

    def _run_commands(self) -> None:
        self._commands.take(self._client.take_controls())
        if self._is_finishing:
            self._commands.refuse_all(_STOPPING)
            return
        self._client.counts.commands = 1
        try:
            self._commands.turn()
        finally:
            self._client.counts.commands = 0

    def _take_requests(self, seconds: float) -> None:
        for request in self._client.take_requests(seconds):
            if isinstance(request, Abort):
                self._abort(request.request_id)
            elif self._is_finishing:
                self._out.failed(request.request_id, ErrorCode.ERROR_CODE_OVERLOADED, _STOPPING)
            else:
                self._admit(request)
        self._end_aborted_and_overdue()

    def _admit(self, generate: Generate) -> None:
        request_id, deadline = generate.request_id, generate.deadline_unix_ms
        if deadline and (late := self._unix_ms() - deadline) >= 0:
            message = f"deadline_unix_ms: must be in the future, but it passed {late} ms ago"
            self._out.failed(request_id, ErrorCode.ERROR_CODE_DEADLINE, message)
            return
        try:
            if generate.continuation.token_ids and not getattr(self._engine, "continues_requests", False):
                raise ValueError("continuation: none with this engine, which cannot continue from tokens")  # noqa: TRY301
            self._check_weights(generate)
            self._check_token_scoring(generate)
            if generate.session and generate.HasField("text"):
                generate = self._with_ids(generate)
            prompt_tokens = int(self._engine.admit(generate))
        except ValueError as error:
            self._out.failed(request_id, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error))
        except EngineBrokenError as error:
            self._out.failed(request_id, ErrorCode.ERROR_CODE_ENGINE, f"the engine is broken: {error}")
            raise
        except Exception as error:  # noqa: BLE001 - it ends only this request
            message = self._engine_error("admit", request_id, error)
            self._abort(request_id)  # the engine may have stored a part of the request
            self._out.failed(request_id, ErrorCode.ERROR_CODE_ENGINE, message)
        else:
            self._client.active.add(generate)
            self._untried.append(request_id)
            prompt_tokens = min(max(prompt_tokens, 1), _MOST_PROMPT_TOKENS)
            self._out.admitted(request_id, prompt_tokens, 0 if self._has_cache else None)
            for event in session_events(generate) if generate.session else ():
                self._out.publish_event(event)

    def _with_ids(self, generate: Generate) -> Generate:
        """Return a copy of a request with token ids in place of the text prompt."""
        if not hasattr(self._engine, "encode"):
            raise ValueError("session: with this engine only for a prompt of token ids, got a text")
        made = Generate()
        made.CopyFrom(generate)
        made.tokens.token_ids[:] = self._engine.encode(generate.text.text)
        return made

    def _check_weights(self, generate: Generate) -> None:
        continuation, version = generate.continuation, getattr(self._engine, "weight_version", 0)
        is_same = generate.continuation_policy == ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS
        if is_same and continuation.token_ids and continuation.weight_version != version:
            raise ValueError(f"continuation.weight_version: the worker's, {version}, got {continuation.weight_version}")

    def _check_token_scoring(self, generate: Generate) -> None:
        """Raise ValueError if the request asks for scores that the engine does not offer."""
        if not generate.HasField("token_scoring"):
            return
        if not generate.HasField("top_logprobs"):
            raise ValueError("token_scoring: only together with top_logprobs, got none")
        offered = getattr(self._engine, "token_scores", ())
        for field, _ in generate.token_scoring.ListFields():
            if field.name not in offered:
                raise ValueError(f"token_scoring.{field.name}: none with this engine")
        most = self._engine.vocabulary_size
        for index, token_id in enumerate(generate.token_scoring.token_ids):
            if token_id >= most:
                raise ValueError(f"token_scoring.token_ids[{index}]: below {most}, got {token_id}")

    def _abort(self, request_id: int) -> None:
        try:
            self._engine.abort(request_id)
        except EngineBrokenError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            message = self._engine_error("abort", request_id, error)
            for known in self._client.active.end([request_id]):
                self._out.failed(known, ErrorCode.ERROR_CODE_ENGINE, message)

    def _abort_all(self) -> None:
        for request_id in self._client.active.request_ids:
            self._abort(request_id)

    def _engine_error(self, method: str, request_id: int, error: Exception) -> str:
        self._client.counts.engine_errors += 1
        kind = type(error).__name__
        self._repeated_log.begin(
            (method, kind), _log.error, "engine error", doing=method, request_id=request_id, reason=error
        )
        return f"the engine failed: {kind}: {error}"

    def _end_aborted_and_overdue(self) -> None:
        for request_id in self._client.take_aborts():
            self._abort(request_id)
        overdue = self._client.active.end_overdue(self._unix_ms())
        self._end(overdue, ErrorCode.ERROR_CODE_DEADLINE, "its deadline came before its last token")

    def _step_failed(self, error: Exception) -> None:
        """End the requests that may have made a step fail.

        An EngineStepError ends the named requests, or else the requests admitted since the last successful step. Any
        other exception ends all requests. If no request could be the cause, all requests end, and too many of these
        failures in a row raise EngineBrokenError.
        """
        self._client.counts.failed_steps += 1
        self._repeated_log.begin(("step", type(error).__name__), _log.error, "step failed", exc_info=error)
        active = self._client.active
        is_whole = isinstance(error, EngineStepError)
        ended = active.end(error.request_ids) if isinstance(error, EngineStepError) else []
        if not ended:
            ended = active.end(self._untried)
            self._untried.clear()
        self._failed_in_a_row += not ended
        if not ended or not is_whole:
            ended += active.end_all()
        self._end(ended, ErrorCode.ERROR_CODE_ENGINE, f"the engine failed: {type(error).__name__}: {error}")
        if self._failed_in_a_row >= self._client.settings.worker.failed_steps:
            raise EngineBrokenError(f"{self._failed_in_a_row} steps failed one after the other, the last with: {error}")

    def _end(self, request_ids: Iterable[int], code: ErrorCode, message: str) -> None:
        for request_id in request_ids:
            self._out.failed(request_id, code, message)
            self._abort(request_id)
            self._failed[request_id] = None
        while len(self._failed) > _MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _publish_transfer_state(self, request_id: int, state: bytes) -> None:
        if len(state) <= _MOST_STATE:
            prefilled = Prefilled(request_id=request_id, transfer_state=state)
            self._out.publish_event(RequestEvent(prefilled=prefilled))
        else:
            message = f"prefilled.transfer_state: at most {_MOST_STATE} bytes, got {len(state)}"
            self._end(self._client.active.end([request_id]), ErrorCode.ERROR_CODE_ENGINE, message)

    def _hide_last_rows(self, arrays: StepArrays) -> None:
        """Mark the last rows of failed requests as failed, because a processor may have missed the error events."""
        request_ids, statuses = np.asarray(arrays.request_ids), np.array(arrays.statuses)
        is_last = np.isin(request_ids, np.fromiter(self._failed, np.uint64)) & (statuses == RowStatus.ABORTED)
        statuses[is_last] = RowStatus.UNRECOVERABLE
        arrays.statuses = statuses
        for request_id in request_ids[is_last].tolist():
            del self._failed[request_id]

    @contextlib.contextmanager
    def _ending_requests_if_broken(self) -> Iterator[None]:
        try:
            yield
        except EngineBrokenError as error:
            for request_id in self._client.active.end_all():
                self._out.failed(request_id, ErrorCode.ERROR_CODE_ENGINE, f"the engine is broken: {error}")
            raise

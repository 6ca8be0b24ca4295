"""EngineLoop: admits requests, computes steps, publishes them, and ends the requests that fail."""

import threading
from collections.abc import Callable, Iterable

import numpy as np

from tokenbus.clock import SystemClock
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.worker.command_runner import CommandRunner
from tokenbus.worker.engine import (
    CachesPrompts,
    ContinuesRequests,
    Engine,
    EngineBrokenError,
    EngineStepError,
    ScoresTokens,
)
from tokenbus.worker.errors import NotRunningError
from tokenbus.worker.publisher_thread import PublisherThread
from tokenbus.worker.publishing import PublisherClient
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, ErrorCode, Generate, Prefilled
from tokenbus_contracts.schema import bounds_in

_log = logger("worker")
_IDLE_SECONDS = 0.1
_STOPPING = "the worker is stopping"
_MOST_FAILED = 4096
_MOST_PROMPT_TOKENS = 2**32 - 1
_MOST_STATE = bounds_in(Prefilled.DESCRIPTOR.fields_by_name["transfer_state"].GetOptions()).max_bytes


class _RefusedError(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineLoop:
    """Runs one engine, on the engine's own thread.

    An exception of the engine ends requests, and the loop only if it is an EngineBrokenError. A request whose deadline
    passes ends here, whether a processor is connected or not.
    """

    def __init__(
        self,
        engine: Engine,
        client: PublisherClient,
        out: PublisherThread | PublisherClient | None = None,
        *,
        unix_ms: Callable[[], int] | None = None,
    ) -> None:
        """Take the engine, its publisher, and the thread that publishes, if any; the caller closes all.

        Deadlines are compared with `unix_ms`, by default the system's clock.
        """
        self._engine = engine
        self._client = client
        self._out = out or client
        self._unix_ms = unix_ms or SystemClock().unix_ms
        self._cache = engine if isinstance(engine, CachesPrompts) else None
        self._note_cache()
        self._commands = CommandRunner(engine, self._abort_all, self._out.controlled, self._unix_ms)
        self._repeated_log = DeduplicatedLog()
        self._untried: list[int] = []
        """The ids of the requests that were admitted since the last step that succeeded."""
        self._failed_in_a_row = 0
        self._failed: dict[int, None] = {}
        """Requests that ended with an error here, the oldest first, until the engine's last row of each."""

    def serve(self, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
        """Admit requests, compute steps and publish them until `stop` is set; `pace` is called before each step.

        Raises EngineBrokenError if the engine breaks, after its requests have ended.
        """
        while not stop.is_set() and self._client.is_running:
            try:
                self.turn(0 if self._engine.has_work else _IDLE_SECONDS, pace)
            except NotRunningError:
                return

    def turn(self, seconds: float = 0, pace: Callable[[], None] | None = None) -> None:
        """Take what has come, and wait at most so many seconds for some; then compute a step, if there is work."""
        self._take_all(seconds)
        self._do_as_told()
        if not self._engine.has_work:
            self._untried.clear()
            return
        if pace is not None:
            pace()
        self.compute()
        if self._commands.is_waiting and not self._engine.has_work:
            self._do_as_told()

    def finish(self, seconds: float, now: Callable[[], float]) -> None:
        """Compute and publish steps until the engine has nothing left, for at most so many seconds.

        Requests that come meanwhile end with an error. Those that the engine has not finished in time end when the
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
        """Compute one step and publish its batches."""
        try:
            step = self._engine.step()
            for arrays in step:
                for prompt in arrays.cached_prompts:
                    self._out.admitted(*prompt)
                for scores in arrays.prompt_scores:
                    for chunk in scores.chunks():
                        self._out.scored(chunk)
                for key, state in arrays.transfer_states.items():
                    self._pass_on(key, state)
                if self._failed:
                    self._hide_last_rows(arrays)
                self._out.emit(arrays)
        except NotRunningError:
            raise
        except EngineBrokenError as error:
            self._end_all_as_broken(error)
            raise
        except Exception as error:  # noqa: BLE001 - it ends the engine's requests, and not the worker
            self._step_failed(error)
            return
        self._failed_in_a_row = 0
        self._untried.clear()
        self._note_cache()
        self._end_aborted_and_overdue()

    def _note_cache(self) -> None:
        if self._cache is not None:
            self._client.counts.kv_cache = 1 + min(1000, round(1000 * self._cache.kv_cache_usage))

    def _do_as_told(self) -> None:
        self._commands.take(self._client.take_controls())
        self._client.counts.commands = 1
        try:
            self._commands.turn()
        except EngineBrokenError as error:
            self._end_all_as_broken(error)
            raise
        finally:
            self._client.counts.commands = 0

    def _take_all(self, seconds: float) -> None:
        requests = self._client.take_requests(seconds)
        for request in requests:
            if isinstance(request, Generate):
                self._admit(request)
            else:
                self._abort(request.request_id)
        self._end_aborted_and_overdue()

    def _admit(self, generate: Generate) -> None:
        key = generate.request_id
        try:
            prompt_tokens = self._admitted(generate)
        except _RefusedError as refused:
            self._out.failed(key, refused.code, str(refused))
        else:
            self._out.admitted(key, prompt_tokens, None if self._cache is None else 0)

    def _admitted(self, generate: Generate) -> int:
        key, deadline = generate.request_id, generate.deadline_unix_ms
        if deadline and (late := self._unix_ms() - deadline) >= 0:
            message = f"deadline_unix_ms: a moment to come, got one {late} ms ago"
            raise _RefusedError(ErrorCode.ERROR_CODE_DEADLINE, message)
        try:
            if generate.continuation.token_ids and not isinstance(self._engine, ContinuesRequests):
                raise ValueError("continuation: none with this engine, which cannot go on from tokens")  # noqa: TRY301
            self._check_weights(generate)
            self._check_token_scoring(generate)
            prompt_tokens = int(self._engine.admit(generate))
        except ValueError as error:
            raise _RefusedError(ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error)) from None
        except EngineBrokenError as error:
            self._out.failed(key, ErrorCode.ERROR_CODE_ENGINE, f"the engine is broken: {error}")
            self._end_all_as_broken(error)
            raise
        except Exception as error:  # noqa: BLE001 - it ends this request, and no other
            message = self._engine_error("admit", key, error)
            self._abort(key)  # an engine that kept a part of the request must not compute it
            raise _RefusedError(ErrorCode.ERROR_CODE_ENGINE, message) from None
        self._client.active.add(generate)
        self._untried.append(key)
        return min(max(prompt_tokens, 1), _MOST_PROMPT_TOKENS)

    def _check_weights(self, generate: Generate) -> None:
        asked, found = generate.continuation, getattr(self._engine, "weight_version", 0)
        is_same = generate.continuation_policy == ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS
        if is_same and asked.token_ids and asked.weight_version != found:
            raise ValueError(f"continuation.weight_version: the worker's, {found}, got {asked.weight_version}")

    def _check_token_scoring(self, generate: Generate) -> None:
        """Raise a ValueError for what the engine does not say of tokens: it might ignore what it does not know."""
        if not generate.HasField("token_scoring"):
            return
        if not generate.HasField("top_logprobs"):
            raise ValueError("token_scoring: one beside top_logprobs, got one without")
        offered = self._engine.token_scores if isinstance(self._engine, ScoresTokens) else ()
        for field, _ in generate.token_scoring.ListFields():
            if field.name not in offered:
                raise ValueError(f"token_scoring.{field.name}: none with this engine")
        most = self._engine.vocabulary_size
        for place, token_id in enumerate(generate.token_scoring.token_ids):
            if token_id >= most:
                raise ValueError(f"token_scoring.token_ids[{place}]: below {most}, got {token_id}")

    def _abort(self, key: int) -> None:
        try:
            self._engine.abort(key)
        except EngineBrokenError as error:
            self._end_all_as_broken(error)
            raise
        except Exception as error:  # noqa: BLE001 - as above
            message = self._engine_error("abort", key, error)
            for known in self._client.active.end([key]):
                self._out.failed(known, ErrorCode.ERROR_CODE_ENGINE, message)

    def _abort_all(self) -> None:
        for key in self._client.active.keys:
            self._abort(key)

    def _engine_error(self, doing: str, key: int, error: Exception) -> str:
        self._client.counts.engine_errors += 1
        kind = type(error).__name__
        self._repeated_log.begin((doing, kind), _log.error, "engine error", doing=doing, request_id=key, reason=error)
        return f"the engine failed: {kind}: {error}"

    def _refuse_new(self) -> None:
        for request in self._client.take_requests():
            if isinstance(request, Generate):
                self._out.failed(request.request_id, ErrorCode.ERROR_CODE_OVERLOADED, _STOPPING)
            else:
                self._abort(request.request_id)
        self._commands.take(self._client.take_controls())
        self._commands.refuse_all(_STOPPING)
        self._end_aborted_and_overdue()

    def _end_aborted_and_overdue(self) -> None:
        for key in self._client.take_aborts():
            self._abort(key)
        overdue = self._client.active.end_overdue(self._unix_ms())
        self._end(overdue, ErrorCode.ERROR_CODE_DEADLINE, "its deadline came before its last token")

    def _step_failed(self, error: Exception) -> None:
        """End the requests that a failed step may be the fault of; raise EngineBrokenError after too many failures.

        A request may be at fault if the error names it, or if it has not been in a step that succeeded. Only a step
        that fails without such a request counts towards a broken engine, which keeps failing when they have ended.
        """
        self._client.counts.failed_steps += 1
        self._repeated_log.begin(("step", type(error).__name__), _log.error, "step failed", exc_info=error)
        active = self._client.active
        is_whole = isinstance(error, EngineStepError)
        ended = active.end(error.keys) if isinstance(error, EngineStepError) else []
        if not ended:
            ended = active.end(self._untried)
            self._untried.clear()
        self._failed_in_a_row += not ended
        if not ended or not is_whole:
            ended += active.end_all()
        self._end(ended, ErrorCode.ERROR_CODE_ENGINE, f"the engine failed: {type(error).__name__}: {error}")
        if self._failed_in_a_row >= self._client.settings.worker.failed_steps:
            raise EngineBrokenError(f"{self._failed_in_a_row} steps failed one after the other, the last with: {error}")

    def _end(self, keys: Iterable[int], code: ErrorCode, message: str) -> None:
        for key in keys:
            self._out.failed(key, code, message)
            self._abort(key)
            self._failed[key] = None
        while len(self._failed) > _MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _pass_on(self, key: int, state: bytes) -> None:
        """Publish a request's transfer state; end the request if the state is too large."""
        if len(state) <= _MOST_STATE:
            self._out.prefilled(Prefilled(request_id=key, transfer_state=state))
        else:
            message = f"prefilled.transfer_state: at most {_MOST_STATE} bytes, got {len(state)}"
            self._end(self._client.active.end([key]), ErrorCode.ERROR_CODE_ENGINE, message)

    def _hide_last_rows(self, arrays: StepArrays) -> None:
        """Replace ABORTED in rows of requests that have failed: a processor that missed the error would believe it."""
        keys, statuses = np.asarray(arrays.request_ids), np.array(arrays.statuses)
        is_last = np.isin(keys, np.fromiter(self._failed, np.uint64)) & (statuses == RowStatus.ABORTED)
        statuses[is_last] = RowStatus.UNRECOVERABLE
        arrays.statuses = statuses
        for key in keys[is_last].tolist():
            del self._failed[key]

    def _end_all_as_broken(self, error: EngineBrokenError) -> None:
        for key in self._client.active.end_all():
            self._out.failed(key, ErrorCode.ERROR_CODE_ENGINE, f"the engine is broken: {error}")

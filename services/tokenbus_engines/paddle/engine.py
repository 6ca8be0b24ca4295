"""PaddleEngine: speculative decoding with multi-token-prediction heads, step by step for all requests at once."""

from collections.abc import Sequence

from tokenbus_contracts import RowStatus, SpeculativeMethod
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.admission import check_role
from tokenbus_engines.emission import phase_of, raise_failed
from tokenbus_engines.paddle.decoder import Decoder
from tokenbus_engines.paddle.emission import Outcome, step_arrays
from tokenbus_engines.paddle.handoff import RequestStates
from tokenbus_engines.paddle.requests import PaddleOptions, Request, refused, request_of
from tokenbus_engines.paddle.runner import Runner
from tokenbus_engines.paddle.scheduler import Plan, Scheduler
from tokenbus_engines.paddle.tokenizer import VOCABULARY_SIZE
from tokenbus_services.logs import logger
from tokenbus_services.worker import EngineStepError
from tokenbus_services.worker.step import StepArrays

_log = logger("worker")


class PaddleEngine:
    """An engine over bytes. A text begins with a token of its own, and ends with another."""

    def __init__(self, options: PaddleOptions | None = None) -> None:
        """Read the weights and allocate the cache.

        A WeightsError, a DeviceError or a ValueError says in one line why there is no engine.
        """
        self._options = options = options or PaddleOptions()
        self._runner = Runner(options)
        heads = self._runner.shape.draft_heads
        if options.speculate > heads:
            raise refused("speculate", f"at most {heads}, as many as the weights have heads", options.speculate)
        self._states = RequestStates(self._runner.shape, self._runner.fingerprint, options.context)
        self._decoder = Decoder(self._runner, options.speculate)
        self._scheduler = Scheduler(options.max_running, options.prefill_chunk, options.slice_steps)

    @property
    def vocabulary_size(self) -> int:
        """How many token ids it has."""
        return VOCABULARY_SIZE

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def admit(self, generate: Generate, state: bytes | None = None) -> int:
        """Take a request, and return how long its prompt is in tokens; a ValueError says what is wrong with it."""
        if generate.request_key in self._scheduler:
            raise refused("request_key", "one that is not in use", generate.request_key)
        check_role(self._options.role, state)
        request = request_of(generate, self._options)
        if state is not None:
            self._states.unpack(state, request)
        self._scheduler.add(request)
        return len(request.prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        self._scheduler.abort(key)

    def step(self) -> Sequence[StepArrays]:
        """Compute a step: chunks of prompts, and at once the verification of every other row's drafts.

        An EngineStepError leaves the requests as they were; it names those that failed alone.
        """
        plan = self._scheduler.plan()
        before = [(request, request.progress()) for request in plan.computed]
        try:
            emitted = self._emitted(plan)
            states = self._handed_off(emitted) if self._options.role == "prefill" else {}
            # Rows are sorted by what was computed for them; their places in the batch come beside them.
            outcomes = [
                *emitted,
                *(_without(chunk.request, RowStatus.PREFILLING) for chunk in plan.chunks if not chunk.gives_token),
                *(_without(request, RowStatus.PREEMPTED) for request in plan.preempted),
                *(_without(request, RowStatus.ABORTED) for request in plan.aborted),
            ]
            phase = phase_of(len(plan.decoding), len(plan.chunks))
            method = SpeculativeMethod.MTP if self._options.speculate else SpeculativeMethod.NONE
            made = step_arrays(outcomes, phase, method, states) if outcomes else []
        except Exception as error:
            for request, progress in before:
                request.undo(progress)
            self._scheduler.undo(plan)
            if isinstance(error, EngineStepError):
                raise
            raise EngineStepError(f"{type(error).__name__}: {error}") from error
        for outcome in emitted:
            if outcome.status is not RowStatus.ACTIVE:
                self._let_go(outcome)
        return made

    def close(self) -> None:
        """Let go of the network and its cache."""
        del self._decoder, self._runner

    def _emitted(self, plan: Plan) -> list[Outcome]:
        failed: dict[int, Exception] = {}
        for request in plan.decoding:
            if request.handed is not None and request.slot is not None:
                try:
                    self._runner.cache.write(request.slot, *request.handed)
                    request.handed = None
                except Exception as error:  # noqa: BLE001 - it ends this request, and no other
                    failed[request.key] = error
        raise_failed(failed)
        return self._decoder.emit(plan)

    def _handed_off(self, emitted: Sequence[Outcome]) -> dict[int, bytes]:
        """Hand off the requests that have not ended, and return their states by key."""
        states: dict[int, bytes] = {}
        failed: dict[int, Exception] = {}
        for outcome in emitted:
            request = outcome.request
            if outcome.status is RowStatus.ACTIVE and request.slot is not None:
                outcome.status = RowStatus.HANDED_OFF
                try:
                    states[request.key] = self._states.packed(
                        request, *self._runner.cache.read(request.slot, request.computed)
                    )
                except Exception as error:  # noqa: BLE001 - as above
                    failed[request.key] = error
        raise_failed(failed)
        return states

    def _let_go(self, outcome: Outcome) -> None:
        request = outcome.request
        if outcome.status is RowStatus.UNRECOVERABLE and request.slot is not None:
            _log.error("request ended: logits not finite", request_key=f"{request.key:016x}")
            self._runner.cache.clear(request.slot)
        self._scheduler.end(request)


def _without(request: Request, status: RowStatus) -> Outcome:
    return Outcome(request=request, position=request.position, status=status)

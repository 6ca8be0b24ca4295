"""PaddleEngine: speculative decoding with multi-token-prediction heads, step by step for all requests at once."""

from collections.abc import Sequence

from tokenbus_contracts import RowStatus, SpeculativeMethod, StepPhase
from tokenbus_contracts.generated.request_pb2 import Generate
from tokenbus_engines.paddle.decoder import Decoder
from tokenbus_engines.paddle.emission import Outcome, StepInfo, step_arrays
from tokenbus_engines.paddle.handoff import RequestStates
from tokenbus_engines.paddle.options import PaddleOptions
from tokenbus_engines.paddle.requests import Request, refused, request_of
from tokenbus_engines.paddle.runner import Runner
from tokenbus_engines.paddle.scheduler import Plan, Scheduler
from tokenbus_engines.paddle.shape import VOCABULARY_SIZE
from tokenbus_services.logs import logger
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
            raise refused("request_key", "one that is not in use", f"{generate.request_key:016x}")
        if state is None and self._options.role == "decode":
            raise ValueError("state: what a prefill worker handed off, since this worker only decodes, got none")
        if state is not None and self._options.role == "prefill":
            raise ValueError("state: none, since this worker only computes prompts, got one")
        request = request_of(generate, self._options)
        if state is not None:
            self._states.unpack(state, request)
        self._scheduler.add(request)
        return len(request.prompt)

    def abort(self, key: int) -> None:
        """End a request at the next step; one that is not known needs no end."""
        self._scheduler.abort(key)

    def step(self) -> Sequence[StepArrays]:
        """Compute a step: chunks of prompts, and at once the verification of every other row's drafts."""
        plan = self._scheduler.plan()
        for request in plan.decoding:
            self._take_over(request)
        emitted = self._decoder.emit(plan)
        # Rows are sorted by what was computed for them; their places in the batch are told beside them.
        outcomes = [
            *emitted,
            *(_without(chunk.request, RowStatus.PREFILLING) for chunk in plan.chunks if not chunk.gives_token),
            *(_without(request, RowStatus.PREEMPTED) for request in plan.preempted),
            *(_without(request, RowStatus.ABORTED) for request in plan.aborted),
        ]
        if not outcomes:
            return []
        places = self._scheduler.in_batch_order(outcome.request for outcome in outcomes)
        method = SpeculativeMethod.MTP if self._options.speculate else SpeculativeMethod.NONE
        states = {}
        for outcome in emitted:
            request = outcome.request
            if outcome.status is RowStatus.ACTIVE and self._options.role == "prefill":
                outcome.status = RowStatus.HANDED_OFF
                states[request.key] = self._state(request)
            if outcome.status is not RowStatus.ACTIVE:
                self._let_go(outcome)
        return step_arrays(outcomes, StepInfo(places=places, phase=_phase(plan), method=method), states)

    def close(self) -> None:
        """Let go of the network and its cache."""
        del self._decoder, self._runner

    def _take_over(self, request: Request) -> None:
        """Bring what a prefill engine computed into the slot that the request has now."""
        if request.handed is not None and request.slot is not None:
            self._runner.cache.write(request.slot, *request.handed)
            request.handed = None

    def _state(self, request: Request) -> bytes:
        if request.slot is None:
            raise RuntimeError(f"request {request.key:016x} has no slot to hand off")
        return self._states.packed(request, *self._runner.cache.read(request.slot, request.computed))

    def _let_go(self, outcome: Outcome) -> None:
        request = outcome.request
        if outcome.status is RowStatus.UNRECOVERABLE and request.slot is not None:
            _log.error("request ended: its logits are no numbers", request_key=f"{request.key:016x}")
            self._runner.cache.clear(request.slot)
        self._scheduler.end(request)


def _without(request: Request, status: RowStatus) -> Outcome:
    return Outcome(request=request, position=request.position, status=status)


def _phase(plan: Plan) -> StepPhase:
    if plan.chunks and not plan.decoding:
        return StepPhase.PREFILL
    if plan.decoding and not plan.chunks:
        return StepPhase.DECODE
    return StepPhase.MIXED

"""Dispatch: chooses the worker of each new request, or refuses the request."""

from collections import Counter
from math import inf
from operator import attrgetter

from tokenbus.delivery.errors import RETRY_MS, code_name, request_error
from tokenbus.processor.request_registry import RequestRegistry
from tokenbus.processor.requests import NO_STREAM, Request, State, client_payer
from tokenbus.processor.workers import Worker, Workers
from tokenbus.settings import Settings
from tokenbus_contracts.generated.client_pb2 import ModelRoom, Room
from tokenbus_contracts.generated.request_pb2 import ContinuationPolicy, ErrorCode, Generate, RequestError, TokenPrompt
from tokenbus_contracts.generated.stream_pb2 import ProcessorFrame, WorkerRole
from tokenbus_contracts.schema import bounds_in

_MOST_MODELS = bounds_in(Room.DESCRIPTOR.fields_by_name["models"].GetOptions()).max_items
_MOST_TOKENS = bounds_in(TokenPrompt.DESCRIPTOR.fields_by_name["token_ids"].GetOptions()).max_items
_SAME_WEIGHTS = ContinuationPolicy.CONTINUATION_POLICY_SAME_WEIGHTS
_IMBALANCE = 8
"""A client's requests stay at one worker while the worker's load is at most 1/8 above the lowest load of any worker."""


class Dispatch:
    """Sends each request to a suitable worker with a low load, preferably one that serves the same client already."""

    def __init__(self, settings: Settings, registry: RequestRegistry, workers: Workers) -> None:
        self._settings = settings
        self.registry = registry
        self.workers = workers
        self._waiting: list[Request] = []
        self._waits_until = -inf
        self._turns = 0
        self.refused: Counter[str] = Counter()
        """Number of refused requests by error code."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def expect_workers(self, now: float) -> None:
        """Let requests wait for a worker during the next heartbeat timeout.

        After a restart, clients may return before their workers do. A lost worker may also return.
        """
        self._waits_until = now + self._settings.bus.heartbeat_timeout_ms / 1000

    def extend_deadlines(self, seconds: float, now: float) -> None:
        self._waits_until = min(self._waits_until + seconds, now + self._settings.bus.heartbeat_timeout_ms / 1000)

    def submit(self, generate: Generate, route: int, owner: int) -> Request | RequestError:
        """Open a request, and send or queue it; return the error if the request is refused."""
        error = self._refusal(generate, owner)
        worker = None if error is not None else self._choice(generate, route)
        if worker is not None:
            request = self.registry.submit(generate, worker.source.stream, route, owner)
            self._send_to(request, worker)
            return request
        has_room = len(self._waiting) < self._settings.processor.max_requests
        may_wait = has_room and not (_has_weights(generate) or self._goes_on_elsewhere(generate, route))
        if error is None and may_wait and (self._waits_until > -inf or self._has_stalled()):
            request = self.registry.submit(generate, NO_STREAM, route, owner)
            self._waiting.append(request)
            return request
        error = error or self._no_worker(generate)
        self.refused[code_name(error.code)] += 1
        return error

    def _send_to(self, request: Request, worker: Worker) -> None:
        target = self._decoder_for(worker, request.generate)
        self._turns += 1
        worker.last_turn = self._turns
        if target is not None:
            target.last_turn = self._turns
        self.registry.table.reserve(request, NO_STREAM if target is None else target.source.stream)
        # A disconnected worker gets the request from the table after its next hello.
        self.resend(worker, request)

    def decode(self, request: Request, token_ids: list[int]) -> None:
        table, generate = self.registry.table, request.for_decode
        accepted = 0 if generate is None else len(generate.continuation.token_ids) + len(token_ids)
        worker = self._decoder_of(request)
        if generate is None or worker is None or accepted != table.next_position[request.slot]:
            why = "its prefill has ended, and no decode worker here continues it"
            self.registry.fail(request, ErrorCode.ERROR_CODE_WORKER_LOST, why)
            return
        generate.ClearField("prompt_scoring")
        generate.continuation.token_ids.extend(token_ids)
        generate.continuation.transfer_state = request.transfer_state
        generate.continuation.weight_version = request.weight_version
        table.decode(request, worker.source.stream, generate)
        self.resend(worker, request)
        if request.aborted_at is not None:
            self.workers.abort(worker.source.stream, request.id)

    def _decoder_of(self, request: Request) -> Worker | None:
        """Return the decode worker that has reserved capacity, or another worker if that worker drains or is lost."""
        table, by_stream = self.registry.table, self.workers.by_stream
        reserved, prefill = (by_stream.get(int(each[request.slot])) for each in (table.decoder, table.stream))
        if prefill is not None and (reserved is None or reserved.is_draining):
            return self._decoder_for(prefill, request.for_decode)
        return reserved

    def dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        full: set[tuple[str | int | None, ...]] = set()
        offered = self._offered() if waiting else set()
        for request in waiting:
            if not self._is_waiting(request) or request.generate is None:
                continue
            kind = _kind(request.generate, offered)
            route = int(self.registry.table.route[request.slot])
            worker = None if kind in full else self._choice(request.generate, route)
            if worker is None:
                full.add(kind)
                self._waiting.append(request)
                continue
            self.registry.table.dispatch(request, worker.source.stream)
            self._send_to(request, worker)

    def requeue(self, request: Request) -> None:
        """Send a refused request to another worker; if no worker accepts it, the next tick fails it."""
        if request.generate is not None and request.generate.HasField("continuation"):
            request.generate.continuation.ClearField("transfer_state")  # the next worker may be unable to use the state
        self.registry.table.requeue(request)
        self._waiting.append(request)
        self.dispatch_waiting()

    def tick(self, now: float) -> None:
        self.dispatch_waiting()
        if self._has_stalled():
            self.expect_workers(now)
        if now < self._waits_until:
            return
        self._waits_until = -inf
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if self._is_waiting(request) and request.generate is not None:
                error = self._no_worker(request.generate)
                self.registry.fail(request, error.code, error.message)

    def relieve_draining(self) -> None:
        """At draining workers, end requests that clients can continue at a similar worker with free capacity."""
        load_of = self.registry.table.load_of
        for leaving in [each for each in self.workers.by_id.values() if each.is_draining and not _is_prefill(each)]:
            able = [each for each in self.workers.by_id.values() if self._takes_more(each) and _is_like(each, leaving)]
            room = sum(each.stream.hello.max_requests - load_of(each.source.stream) for each in able)
            self.registry.end_continuable_of(leaving.source.stream, room, f"worker {leaving.stream.worker_id} stops")

    def without_decoder(self, now: float) -> list[Worker]:
        """Return the prefill workers that have had no decode worker at this processor for a heartbeat timeout."""
        patience = self._settings.bus.heartbeat_timeout_ms / 1000
        alone = []
        for worker in filter(_is_prefill, self.workers.by_id.values()):
            if self._decoders(worker.stream.hello.model):
                worker.no_decode_since = None
            elif worker.no_decode_since is None:
                worker.no_decode_since = now
            elif now - worker.no_decode_since >= patience:
                alone.append(worker)
        return alone

    def _is_waiting(self, request: Request) -> bool:
        table = self.registry.table
        return table.get(request.id) is request and table.state_of(request) is State.QUEUED

    def resend(self, worker: Worker, request: Request) -> None:
        """Send a request to its worker, for the first time or again after a reconnect."""
        if request.generate is not None:
            request.sent_after = worker.hellos
            self.workers.send(worker, ProcessorFrame(generate=request.generate))

    def _goes_on_elsewhere(self, generate: Generate, route: int) -> bool:
        """Return whether the client of a continued request can ask other processors after a refusal."""
        consumer = self.registry.consumers.get(route)
        return generate.continuation.turn > 0 and consumer is not None and consumer.knows_others

    def _refusal(self, generate: Generate, owner: int) -> RequestError | None:
        request_id, table, settings = generate.request_id, self.registry.table, self._settings
        if table.get(request_id) is not None:
            code, message = ErrorCode.ERROR_CODE_DUPLICATE_REQUEST, "the key belongs to an open request"
            return request_error(request_id, code, message)
        if table.is_full:
            self.registry.make_room()
        if full := table.limit_for(client_payer(owner)):
            return request_error(request_id, ErrorCode.ERROR_CODE_OVERLOADED, full, retry_after_ms=RETRY_MS)
        wrong = _sampling_fault(generate) or _continuation_fault(generate)
        if not wrong and generate.top_logprobs > settings.limits.max_top_k:
            wrong = f"top_logprobs: at most {settings.limits.max_top_k}, got {generate.top_logprobs}"
        return request_error(request_id, ErrorCode.ERROR_CODE_INVALID_REQUEST, wrong) if wrong else None

    def _choice(self, generate: Generate, route: int) -> Worker | None:
        """Return one of the least loaded workers for a request, preferably one that serves the same client already."""
        able = [each for each in self._candidates(generate) if not _obstacle(each, generate)]
        loads = [(load, each) for each in able if (load := self._load(each, generate)) is not None]
        least = min((load for load, _ in loads), default=0)
        near = [(load, each) for load, each in loads if load <= least + least // _IMBALANCE]
        requests_of = self.registry.table.requests_of

        def order(it: tuple[int, Worker]) -> tuple[int, int, bool, int]:
            load, worker = it
            is_prefill = _is_prefill(worker)
            # All prefill workers have the load of their common decode worker.
            # If the client's prefill worker were preferred, it would therefore get all requests of this client.
            read = 0 if is_prefill else requests_of(route, worker.source.stream)
            return -read, load, is_prefill, worker.last_turn

        return min(near, key=order, default=(0, None))[1]

    def _load(self, worker: Worker, generate: Generate) -> int | None:
        """Return the load of a worker or of its decode worker, whichever is higher, or None if either is full."""
        target = self._decoder_for(worker, generate)
        if not self._takes_more(worker) or (target is None and _is_prefill(worker)):
            return None
        load_of = self.registry.table.load_of
        return max(load_of(worker.source.stream), load_of(target.source.stream) if target is not None else 0)

    def _decoder_for(self, worker: Worker, generate: Generate | None) -> Worker | None:
        """Return the least loaded decode worker that accepts a request; equally loaded workers take turns."""
        decoders = self._decoders(worker.stream.hello.model) if _is_prefill(worker) else []
        if generate is not None and generate.continuation_policy == _SAME_WEIGHTS:
            version = worker.stream.hello.weight_version
            decoders = [each for each in decoders if each.stream.hello.weight_version == version]
        able = [each for each in decoders if generate is None or not _obstacle(each, generate)]
        load_of, free = self.registry.table.load_of, filter(self._takes_more, able)
        return min(free, key=lambda each: (load_of(each.source.stream), each.last_turn), default=None)

    def _takes_more(self, worker: Worker) -> bool:
        load = self.registry.table.load_of(worker.source.stream)
        return load < worker.stream.hello.max_requests and not (worker.is_draining or worker.is_stalled)

    def _has_stalled(self) -> bool:
        """Return whether any worker is stalled, and so may accept requests again soon."""
        return any(worker.is_stalled for worker in self.workers.by_id.values())

    def _decoders(self, model: str) -> list[Worker]:
        return [
            worker
            for worker in self.workers.by_id.values()
            if worker.stream.hello.role == WorkerRole.WORKER_ROLE_DECODE
            and not worker.stream.hello.tp_rank
            and worker.stream.hello.model == model
        ]

    def _candidates(self, generate: Generate) -> list[Worker]:
        """Return the workers that serve the model and the adapter of a request, regardless of their load."""
        adapter = generate.sampling.lora_adapter
        serving = self._serving(generate.model)
        return [each for each in serving if adapter in each.stream.hello.lora_adapters] if adapter else serving

    def _serving(self, model: str) -> list[Worker]:
        return [
            worker
            for worker in self.workers.by_id.values()
            if worker.stream.hello.role != WorkerRole.WORKER_ROLE_DECODE
            and worker.stream.hello.max_requests
            and not worker.stream.hello.tp_rank  # only rank 0 gets requests, and the other ranks follow rank 0
            and model in ("", worker.stream.hello.model)
            and (not _is_prefill(worker) or self._decoders(worker.stream.hello.model))
        ]

    def _offered(self) -> set[str | int]:
        """Return the models, adapters, tokenizers and weight versions of workers, and 0 and "", which name none."""
        offered: set[str | int] = {"", 0}
        for worker in self.workers.by_id.values():
            hello = worker.stream.hello
            offered.update((hello.model, hello.tokenizer_digest, hello.weight_version), hello.lora_adapters)
        return offered

    def room(self) -> Room:
        rooms: dict[str, ModelRoom] = {}
        for worker in self._serving(""):
            hello = worker.stream.hello
            room = rooms.setdefault(hello.model, ModelRoom(model=hello.model))
            if worker.peer is not None and not (worker.is_draining or worker.is_stalled):
                room.workers += 1
                room.free_requests += max(0, hello.max_requests - self.registry.table.load_of(worker.source.stream))
        return Room(models=list(rooms.values())[:_MOST_MODELS])

    def _no_worker(self, generate: Generate) -> RequestError:
        candidates = self._candidates(generate)
        obstacles = [_obstacle(worker, generate) for worker in candidates]
        if obstacles and all(obstacles):
            return request_error(generate.request_id, ErrorCode.ERROR_CODE_NO_WORKER, obstacles[0])
        if candidates:
            code, message = ErrorCode.ERROR_CODE_OVERLOADED, "every worker already has as many requests as it takes"
        else:
            code, message = ErrorCode.ERROR_CODE_NO_WORKER, self._not_served(generate)
        return request_error(generate.request_id, code, message, retry_after_ms=RETRY_MS)

    def _not_served(self, generate: Generate) -> str:
        adapter = generate.sampling.lora_adapter
        known = sorted({name for worker in self._serving(generate.model) for name in worker.stream.hello.lora_adapters})
        if adapter and known:
            return f"sampling.lora_adapter: one of {', '.join(known)}, got {adapter!r}"
        what = f"model {generate.model!r}" if generate.model else "requests"
        return f"no worker serves {what}" + (f" with a LoRA adapter, got {adapter!r}" if adapter else "")


def _is_prefill(worker: Worker) -> bool:
    return worker.stream.hello.role == WorkerRole.WORKER_ROLE_PREFILL


def _is_like(worker: Worker, other: Worker) -> bool:
    ours, theirs = worker.stream.hello, other.stream.hello
    fields = attrgetter("role", "model", "weight_version", "tokenizer_digest")
    return fields(ours) == fields(theirs) and set(ours.lora_adapters) >= set(theirs.lora_adapters)


def _sampling_fault(generate: Generate) -> str:
    sampling = generate.sampling
    if sampling.HasField("top_p") and not sampling.top_p > 0:
        return f"sampling.top_p: above 0, got {sampling.top_p}"
    if sampling.HasField("repetition_penalty") and not sampling.repetition_penalty > 0:
        return f"sampling.repetition_penalty: above 0, got {sampling.repetition_penalty}"
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        return f"sampling.min_tokens: at most {sampling.max_tokens}, max_tokens, got {sampling.min_tokens}"
    return ""


def _continuation_fault(generate: Generate) -> str:
    sampling, accepted = generate.sampling, len(generate.continuation.token_ids)
    if sampling.HasField("max_tokens") and accepted >= sampling.max_tokens:
        return f"continuation.token_ids: fewer than the {sampling.max_tokens} of max_tokens, got {accepted}"
    if (size := len(generate.tokens.token_ids) + accepted) > _MOST_TOKENS:
        return f"continuation.token_ids: at most {_MOST_TOKENS} with the prompt, got {size}"
    if state := generate.continuation.transfer_state:
        return f"continuation.transfer_state: none from a client, got {len(state)} bytes"
    return ""


def _obstacle(worker: Worker, generate: Generate) -> str:
    """Return the reason why a worker of the right model cannot serve a request, or an empty string if it can."""
    digest, version = worker.stream.hello.tokenizer_digest, worker.stream.hello.weight_version
    if _has_weights(generate) and generate.continuation.weight_version != version:
        found = f"the version of a worker's weights ({worker.stream.worker_id} has {version})"
        return f"continuation.weight_version: {found}, got {generate.continuation.weight_version}"
    if not digest or generate.tokenizer_digest in (0, digest):
        return ""
    found = f"the digest of a worker's tokenizer ({worker.stream.worker_id} has {digest:016x})"
    return f"tokenizer_digest: {found}, got {generate.tokenizer_digest:016x}"


def _has_weights(generate: Generate) -> bool:
    """Return whether only workers with certain weights can continue a request."""
    return generate.continuation_policy == _SAME_WEIGHTS and bool(generate.continuation.token_ids)


def _kind(generate: Generate, offered: set[str | int]) -> tuple[str | int | None, ...]:
    """Return the fields of a request that decide which workers can serve it.

    Requests with equal fields are of one kind: if all workers are full for one of them, they are full for all of them.
    A value that no worker offers counts as None, so that clients cannot add kinds by inventing names.
    """
    weights = generate.continuation.weight_version if _has_weights(generate) else 0
    asked = generate.model, generate.sampling.lora_adapter, generate.tokenizer_digest, weights
    return tuple(each if each in offered else None for each in asked)

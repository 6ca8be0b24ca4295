"""Client: sends requests to processors and receives their tokens, despite broken connections and restarts."""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

from tokenbus.bus import Transport, clock_for, transport_for
from tokenbus.bus.link import PROOF_BYTES, Link, SessionState
from tokenbus.client.ids import random_id
from tokenbus.client.parameters import Prompt, RequestParameters, named_as_given, request_of
from tokenbus.client.requests import OpenRequests
from tokenbus.client.session import ClientSession
from tokenbus.client.steps import RequestEnd, StepRows, Stream, StreamQueue
from tokenbus.client.tokens import Generation, RequestTokens
from tokenbus.clock import Clock
from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.errors import request_error
from tokenbus.logs import logger
from tokenbus.recordings.items import SequenceTracker, StreamItem
from tokenbus.settings import Settings, listed_addresses
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientHello, ProcessorStatus, WatchedStream
from tokenbus_contracts.generated.control_pb2 import Control, ControlAnswer
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_contracts.generated.stream_pb2 import Item
from tokenbus_contracts.schema import MAJOR, MINOR

_log = logger("client")
_SHOWN_ADDRESSES = 200
_LOOKS = 2
"""Number of checks of the open requests per heartbeat interval."""
_SUMS = {field.name for field in ProcessorStatus.DESCRIPTOR.fields} - {"connected_clients", "workers"}


def connect(
    address: str | None = None,
    *,
    name: str | None = None,
    key_file: str | None = None,
    server_key: str | None = None,
    settings: Settings | None = None,
) -> "Client":
    """Return a client of one or several processors, which connects when entered with `async with`.

    Args:
        address: the processor's address for clients, such as `tcp://127.0.0.1:5571`, or several addresses separated by
            commas; default: `bus.clients_address`.
        name: the client's name in the processor's logs; default: `client.name`.
        key_file: the file with the client's CURVE key from `tokenbus keys make`; default: `bus.key_file`.
        server_key: the processor's public key, or the path of its certificate; default: `bus.server_key`.
        settings: all settings; default: from the environment and the settings file.

    Raises:
        SettingsError: an argument is invalid for its setting. A processor that is not running yet is no error.

    Example:
        async with tokenbus.connect(address, name="evaluation") as client:
            tokens = [token.id async for token in client.generate([1, 2, 3], max_tokens=8, seed=1)]
        assert len(tokens) <= 8
    """
    chosen = settings or Settings.load()
    bus = chosen.bus
    bus = replace(
        bus,
        clients_address=bus.clients_address if address is None else address,
        key_file=bus.key_file if key_file is None else key_file,
        server_key=bus.server_key if server_key is None else server_key,
    )
    client = chosen.client if name is None else replace(chosen.client, name=name)
    return Client(replace(chosen, bus=bus, client=client))


class Client:
    """A connection to one or several processors while `async with` lasts; `tokenbus.connect` creates it.

    The client reconnects automatically. A request survives a restart of its processor, and continues elsewhere if its
    worker or processor is lost. Each request goes to the processor with the most free capacity for its model. Call all
    methods on the event loop that entered the client. Leaving `async with` waits up to 5 s for open requests whose
    iterators are still in use.

    Example:
        async with tokenbus.connect(address) as client:
            async for token in client.generate([1, 2, 3], max_tokens=8, top_logprobs=2, seed=1):
                print(token.position, token.id, token.logprob, token.alternatives)
    """

    def __init__(
        self, settings: Settings | None = None, *, transport: Transport | None = None, clock: Clock | None = None
    ) -> None:
        self.settings = settings or Settings.load()
        client, bus = self.settings.client, self.settings.bus
        addresses = listed_addresses(bus.clients_address)
        has_several = len(addresses) > 1
        hello = ClientHello(
            schema_major=MAJOR,
            schema_minor=MINOR,
            name=client.name,
            window_frames=client.window_frames,
            window_bytes=client.window_bytes,
            session=random_id(),
            proof=secrets.token_bytes(PROOF_BYTES),
            wants_room=has_several,
        )
        self.requests = OpenRequests(
            client.request_buffer_rows,
            client.resume_timeout_ms / 1000,
            continue_after=client.continue_after_ms / 1000,
            has_several=has_several,
            where=f" at bus.clients_address, {bus.clients_address[:_SHOWN_ADDRESSES]}",
        )
        """The client's open requests."""
        self.sessions = self.requests.sessions
        """State of the connection to each processor, in the order of the addresses."""
        self._clock = clock or clock_for(addresses[0])
        self._transport = transport
        self._links: dict[str, tuple[ClientSession, Link]] = {}
        self._carrying: list[asyncio.Task[None]] = []
        """Tasks that run the connections, one per processor."""
        self._watching_over: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._closing = asyncio.Event()
        interval, timeout = bus.heartbeat_interval_ms / 1000, bus.heartbeat_timeout_ms / 1000
        for address in addresses:
            session = ClientSession(hello, self.requests, self.settings.limits, interval=interval, timeout=timeout)
            link = Link(session, contextlib.nullcontext(), self._clock, "client")
            # All connections share one event, because draining ends when no connection has an open request.
            link.progress, session.on_news = self._progress, link.wake
            self._links[address] = session, link
        self._steps: StreamQueue[StepRows | RequestEnd] | None = None
        self._watched: StreamQueue[StreamItem] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the client is connected to at least one processor."""
        return any(session.state is SessionState.OPEN for session in self.sessions)

    @property
    def owner(self) -> int:
        """Owner id of the client's sessions in recordings and logs, or 0 before the first connection."""
        return max(each.owner for each in self.sessions)

    @property
    def refusal(self) -> str:
        """Reason of the refusal if every processor refuses this client, otherwise empty."""
        refusals = [each.refusal.message for each in self.sessions if each.refusal is not None]
        return refusals[0] if len(refusals) == len(self.sessions) else ""

    @property
    def is_running(self) -> bool:
        """Whether the tasks of all connections run."""
        tasks = [*self._carrying, self._watching_over]
        return all(task is not None and not task.done() for task in tasks)

    async def __aenter__(self) -> Self:
        """Connect, even to processors that do not run yet; raises AddressError for an unusable address."""
        transport = self._transport or transport_for(self.settings.bus, self.settings.bus.clients_address)
        try:
            for address, (session, link) in self._links.items():
                carrying = await link.start(transport, [address])
                carrying.add_done_callback(partial(self._ended, session))
                self._carrying.append(carrying)
        except BaseException:
            await self._close(0)
            raise
        self._watching_over = asyncio.create_task(self._watch_over())
        return self

    async def __aexit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        try:
            await self._close(0 if error else self.settings.client.drain_timeout_ms / 1000)
        finally:
            self._closing.set()
            if self._watching_over is not None:
                await self._watching_over

    def _ended(self, session: ClientSession, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("connection failed", processor=session.processor_id, exc_info=error)
            session.state = SessionState.LEFT
            self.requests.end_all(ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, "the connection failed", session)
        # Once all connections have ended, no more rows can arrive, so every request must end.
        if all(task.done() for task in self._carrying):
            self.requests.give_up("the client was closed")

    async def _close(self, drain_seconds: float) -> None:
        """Wait at most `drain_seconds` for open requests, and say goodbye; raises the error of a failed connection."""
        for _, link in self._links.values():
            link.stop(drain_seconds)
        try:
            outcomes = await asyncio.gather(*self._carrying, return_exceptions=True)
        finally:
            self.requests.give_up("the client was closed")
            for task in self._carrying:
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # CancelledError is a BaseException, but not an Exception
                raise outcome

    async def _watch_over(self) -> None:
        while not await self._clock.wait(self._closing, self.settings.bus.heartbeat_interval_ms / 1000 / _LOOKS):
            self.requests.end_overdue(self._clock.unix_ms())
            self.requests.look(self._clock.now())
            self._progress.set()  # the two calls above may have ended requests

    def generate(self, prompt: Prompt | Generate, **parameters: Unpack[RequestParameters]) -> Generation:
        """Send a request, and return an async iterator over its tokens.

        Args:
            prompt: a text, a sequence of token ids, or a whole `Generate` message, which is copied.
            parameters: the fields of `RequestParameters`. If an engine does not support a parameter, its worker refuses
                the request and names the parameter. `deadline_ms` counts from this call, even if connections break.

        Raises:
            ContractError: an argument is unknown or out of bounds; the error names argument, limit and value.
            RequestFailedError: a request with this id is open, or 65536 requests are open. The iterator raises all
                later errors.

        Example:
            async with tokenbus.connect(address) as client:
                generation = client.generate([1, 2, 3], max_tokens=4, top_logprobs=1)
                async for token in generation:
                    print(generation.request_id, token.id, token.logprob)
        """
        return Generation(self._open(prompt, parameters), self.requests.discard)

    def submit(self, prompt: Prompt | Generate, **parameters: Unpack[RequestParameters]) -> int:
        """Send a request whose rows and end are delivered only by `steps`, and return its request id.

        Arguments and errors are those of `generate`. Raises RuntimeError if no `steps` iterator is open. Closing that
        iterator or calling `abort` ends the request.

        Example:
            async with tokenbus.connect(address) as client, client.steps() as steps:
                request_id = client.submit([1, 2, 3], max_tokens=4)
                async for item in steps:
                    if isinstance(item, tokenbus.RequestEnd) and item.request_id == request_id:
                        break
        """
        return self._open(prompt, parameters, is_submitted=True).request_id

    def resume(
        self, request_id: int, position: int, *, include_drafts: bool = False, deadline_unix_ms: int = 0
    ) -> Generation:
        """Resume a request that another client, or an earlier incarnation of this client, began.

        Args:
            request_id: the id of the request's last turn, `Generation.turns[-1].request_id`.
            position: the position of the first token to receive. Tokens that a client has acknowledged cannot be sent
                again.
            include_drafts: whether `steps` includes the proposals of the draft model.
            deadline_unix_ms: the deadline of the request, in milliseconds since 1970-01-01 UTC; if 0, the processor
                sets the deadline.

        Raises:
            ContractError: an argument is out of bounds.
            RequestFailedError: for the same reasons as in `generate`. The iterator raises RequestFailedError if the
                request is unknown or has another owner.

        Example:
            async with tokenbus.connect(address) as client:
                generation = client.generate([1, 2, 3], max_tokens=100_000)
                first = await anext(generation)
                async with tokenbus.connect(address) as other:
                    taken_up = other.resume(generation.turns[-1].request_id, first.position + 1)
                    try:
                        token = await anext(taken_up)
                    except tokenbus.RequestFailedError as error:
                        print(error.reason)  # for example, the first client has acked tokens after that position
                    await taken_up.aclose()
                await generation.aclose()
        """
        self._check_room(request_id)
        tokens = self.requests.resume(
            request_id, position, include_drafts=include_drafts, deadline_unix_ms=deadline_unix_ms
        )
        return Generation(tokens, self.requests.discard)

    def abort(self, request_id: int) -> None:
        """Abort a request at its worker.

        Tokens in flight still arrive, followed by the request's end with status ABORTED.

        The request may belong to another client with the same key or, without keys, with the same name. Aborting an
        unknown or ended request is no error.

        Example:
            async with tokenbus.connect(address) as client:
                generation = client.generate([1, 2, 3], max_tokens=100_000)
                first = await anext(generation)
                client.abort(generation.request_id)
                rest = [token async for token in generation]
            assert generation.status is tokenbus.RowStatus.ABORTED
        """
        self.requests.abort(request_id)

    def steps(self, *, most: int = 64) -> Stream[StepRows | RequestEnd]:
        """Return an async iterator over the rows and ends of all requests of this client.

        A `StepRows` has the client's rows of one step as columns. A `RequestEnd` follows the last rows of its request,
        whether the request finished, failed, reached its deadline, or was closed. While this iterator is open, it alone
        yields rows, and a `Generation` yields only the end of its request.

        Args:
            most: the number of unread items above which the client stops acknowledging, so that the processor stops
                sending.

        Raises:
            RuntimeError: another `steps` iterator is open.

        Example:
            async with tokenbus.connect(address) as client, client.steps() as steps:
                open_ids = {client.submit([1, 2, 3], max_tokens=4, top_logprobs=0) for _ in range(3)}
                while open_ids:
                    match await anext(steps):
                        case tokenbus.StepRows(target, draft):
                            print(target.request_ids, target.token_ids, target.logprobs, draft)
                        case tokenbus.RequestEnd(request_id, status, error):
                            open_ids.remove(request_id)
        """

        def _bound(length: int) -> None:
            if length > most:
                self.requests.is_paused = True
            elif self.requests.is_paused:
                self._go_on()

        if self._steps is not None:
            self._steps.close_if_dropped()
        queue: StreamQueue[StepRows | RequestEnd] = StreamQueue(self._close_steps, _bound)
        self.requests.open_stream(queue.put)
        self._steps = queue
        return Stream(queue)

    def watch(self, worker_id: str = "", *, most: int = 1024) -> Stream[StreamItem]:
        """Return an async iterator over the items of a worker's stream, as the worker publishes them.

        Args:
            worker_id: the worker, or empty for all workers.
            most: the number of unread items above which further items are dropped; `missing_items` of the next item
                counts them.

        Raises:
            RuntimeError: another `watch` iterator is open.

        Example:
            async with tokenbus.connect(address) as client, client.watch() as watched:
                tokens = [token async for token in client.generate([1, 2, 3], max_tokens=4)]
                item = await anext(watched)
            print(tokens, item.worker_id, item.sequence)
        """
        tracker = SequenceTracker()

        def _receive(stream: WatchedStream, item: Item, payload: bytes) -> None:
            if len(queue) < most:
                received = StreamItem(stream.hello, stream.epoch, item.sequence, item.payload_kind, payload)
                tracker.count(received)
                queue.put(received)

        if self._watched is not None:
            self._watched.close_if_dropped()
        if self.sessions[0].watched is not None:
            raise RuntimeError("watch() is already being iterated over: close that iterator first")
        self._watched = queue = StreamQueue[StreamItem](self._end_watch)
        for session in self.sessions:
            session.watch(worker_id, _receive)
        return Stream(queue)

    def _end_watch(self) -> None:
        for session in self.sessions:
            session.watched = None

    def _open(
        self, prompt: Prompt | Generate, parameters: RequestParameters, *, is_submitted: bool = False
    ) -> RequestTokens:
        if isinstance(prompt, Generate):
            if parameters:
                raise ContractError("parameters", "none with a Generate message", ", ".join(parameters))
            generate = deepcopy(prompt)
        else:
            generate = request_of(prompt, parameters)
        # The client draws an id only if the caller gave none, because an explicit id of zero must be refused.
        if not generate.request_id and parameters.get("request_id") is None:
            generate.request_id = random_id()
        if not generate.sampling.HasField("seed"):
            generate.drawn_seed = random_id()
        self._check_room(generate.request_id)
        if generate.deadline_ms:
            moment = self._clock.unix_ms() + generate.deadline_ms
            generate.deadline_unix_ms = min(generate.deadline_unix_ms or moment, moment)
        try:
            return self.requests.open(generate, is_submitted=is_submitted)
        except ContractError as error:
            raise error if isinstance(prompt, Generate) else named_as_given(error) from None

    async def status(self, *, timeout_seconds: float = 1.0) -> ProcessorStatus:
        """Return the status of the processor and its workers, at most a tenth of a second old.

        With several processors, the numbers are sums, and each worker names its processor. Processors that do not
        answer in time are left out. Raises TimeoutError if no processor answers.
        """
        asked: list[asyncio.Future[ProcessorStatus]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                connected = [each for each in self.sessions if each.state is SessionState.OPEN]
                asked = [session.ask_status() for session in connected or self.sessions]
                await asyncio.wait(asked)
        if not (answers := [status.result() for status in asked if status.done()]):
            raise TimeoutError
        return _merged(answers)

    async def control(
        self, control: Control, processor_id: str = "", *, timeout_seconds: float = 600.0
    ) -> ControlAnswer:
        """Send a command to one worker's engine, and return its answer; `Operator` commands all workers.

        `processor_id` names the worker's processor as in `WorkerStatus`; with one processor, it may be empty. A command
        runs once, even if the client resends it after a broken connection. Raises ContractError if the command is out
        of bounds, and TimeoutError if no answer arrives in time; the worker may then still execute the command.
        """
        sessions = [each for each in self.sessions if processor_id in ("", each.processor_id)]
        if not sessions:
            raise TimeoutError(f"processor {processor_id} is not connected")
        answer = sessions[0].control(control)
        async with asyncio.timeout(timeout_seconds):
            return await answer

    def _close_steps(self) -> None:
        self.requests.close_stream()
        self._go_on()

    def _go_on(self) -> None:
        self.requests.is_paused = False
        for _, link in self._links.values():
            link.wake()

    def _check_room(self, request_id: int) -> None:
        most = self.settings.client.max_requests
        if self.requests.is_open(request_id):
            code, message = ErrorCode.ERROR_CODE_DUPLICATE_REQUEST, "this client has an open request with that id"
        elif self.requests.open_count >= most:
            code, message = ErrorCode.ERROR_CODE_OVERLOADED, f"open requests: at most {most}, got {most + 1}"
        else:
            return
        raise RequestFailedError(request_error(request_id, code, message))


def _merged(statuses: Sequence[ProcessorStatus]) -> ProcessorStatus:
    """Return one status with the sums and the workers of all processors.

    A worker that has moved is listed only at the processor to which it is connected.
    """
    if len(statuses) == 1:
        return statuses[0]
    found = sorted((worker for each in statuses for worker in each.workers), key=lambda worker: worker.is_connected)
    workers = {worker.worker_id: worker for worker in found}  # a worker's connected entry replaces other entries
    return ProcessorStatus(
        **{name: sum(getattr(status, name) for status in statuses) for name in _SUMS},
        connected_clients=max(status.connected_clients for status in statuses),
        workers=workers.values(),
    )

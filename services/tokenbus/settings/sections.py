"""The sections of the settings: each value with its default, its range, its unit and its meaning.

A field without a meaning is a constant, which nothing but code sets; the comment beside it says why its value holds.
"""

import re
from dataclasses import dataclass
from typing import Literal

from tokenbus.settings.errors import SettingsError, Shown
from tokenbus.settings.kinds import (
    HOUR_MS,
    Entry,
    Section,
    choice,
    count,
    endpoints,
    host_and_port,
    milliseconds,
    path,
    size,
    text,
    whole,
)
from tokenbus_contracts import Limits

MOST_REQUESTS_PER_MINUTE = 10_000_000
LEAST_REPLICAS = 3
"""Of which two acknowledge an item, so that one server may be lost."""
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HOST = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")
ORIGIN_FORM = "the origin of a web page, as https://app.example or http://localhost:3000"


def is_origin(text: str) -> bool:
    """Return whether a text is a web page's origin: a scheme, a host and perhaps a port, and nothing else."""
    return _ORIGIN.fullmatch(text) is not None


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas between, in lower case."""
    return tuple(filter(None, (part.strip().lower() for part in text.split(","))))


@dataclass(frozen=True, slots=True)
class BusSettings(Section):
    """The addresses of the processor, and the times and keys of every connection to it."""

    section = "bus"

    workers_address: str = endpoints(
        "tcp://127.0.0.1:5570", "where a processor listens for workers; a worker goes to one of several"
    )
    clients_address: str = endpoints(
        "tcp://127.0.0.1:5571", "where a processor listens for clients; a client goes to each of several"
    )
    heartbeat_timeout_ms: int = milliseconds(
        3000,
        "after how long a silent peer is lost; each is heard every second, and three times in this time",
        low=500,
        high=HOUR_MS,
    )
    key_file: str = path("the file of this process's own key for tcp, as `tokenbus keys make` writes it; empty: none")
    server_key: str = path("for workers and clients with a key: the processor's public key, or its certificate's path")
    allowed_keys: str = path(
        "for processors with a key: the file of the keys that may connect, as `tokenbus keys` "
        "writes it; read again when it changes"
    )
    insecure: bool = choice(
        "whether tcp beyond loopback may be used without keys, and a durable log there without TLS and credentials",
        default=False,
    )

    heartbeat_ms: int = 1000  # from one heartbeat to the next, or a third of heartbeat_timeout_ms: two may be lost
    max_part_bytes: int = 8_388_608  # of a message: the schema's largest batch; a peer that sends more is cut off
    max_pending_bytes: int = 100_663_296  # unread, of one peer: a worker's whole credit, and half as much
    max_unadmitted_bytes: int = 33_554_432  # unread, of all peers without a hello, which has some hundred bytes
    max_total_pending_bytes: int = 134_217_728  # unread, of all peers; the one with most is cut off
    max_connections: int = 4096  # silent ones make room; `Settings.most_connections` raises it
    introduction_timeout_ms: int = 5000  # a handshake takes milliseconds
    reconnect_ms: int = 100  # the first wait between two tries
    reconnect_max_ms: int = 500  # the longest: a crowd spreads over it, and no peer is lost before it comes back
    linger_ms: int = 1000  # for a closing socket's last frames; longer keeps a stopping process from its end
    stall_timeout_ms: int = 5000  # of an event loop, whose process is unhealthy then; no healthy one pauses so long
    high_water_mark: int = 4096  # messages of one socket for one peer; credit and windows end first

    @property
    def heartbeat_interval_ms(self) -> int:
        """How often each side must be heard."""
        return min(self.heartbeat_ms, self.heartbeat_timeout_ms // 3)


@dataclass(frozen=True, slots=True)
class WorkerSettings(Section):
    """A worker: its name, its role and its retention."""

    section = "worker"

    id: str = text("worker-0", 1, 64, "the worker's name; no two live workers have the same")
    role: Literal["mixed", "prefill", "decode"] = choice(
        "its share of a request: all, the prompt and the first token, or the tokens after that", default="mixed"
    )
    model: str = text("", 0, 256, "the model's name, as clients ask for it; empty: the only one")
    retention_bytes: int = size(268_435_456, "the most of unacknowledged items that it keeps; at least one message's")
    policy: Literal["block", "shed", "fail"] = choice(
        "when retention is full: the engine waits 60 s, alternatives are dropped, or requests end", default="block"
    )
    max_requests: int = count(1024, "requests", "the most at once; 0: it takes none from the processor", low=0)
    top_logprobs: int = count(
        0,
        "alternatives",
        "how many the scheduler of a vLLM that is deployed already publishes of a token; else each request says it",
        low=0,
        high=Limits.schema().max_top_k,
    )
    metrics_address: str = host_and_port("", "where it serves its metrics; port 0: any; empty: nowhere")
    abandon_after_ms: int = milliseconds(
        2000, "how long its processor may be away before it gives up its requests and goes to another one of several"
    )
    drain_timeout_ms: int = milliseconds(
        10_000, "how long it waits at its end for requests and acknowledgements; 0: not at all", low=0
    )
    longest_step_ms: int = milliseconds(
        30_000,
        "how long its engine may compute a step: it is lost after the heartbeat's timeout and this without progress",
        low=0,
        high=3_600_000,
    )

    tp_rank: int = 0  # of an engine whose tensor-parallel ranks publish each
    dp_rank: int = 0  # the engine says its own
    retention_items: int = 0  # 0: one for each 16 KiB of retention_bytes, as much as a step without alternatives
    block_timeout_ms: int = 60_000  # that block and shed wait for room, twice as long as clients for a processor
    publisher: Literal["auto", "thread", "process"] = "auto"  # a process on Linux, for an engine that it suits
    shed_at: float = 0.75  # how full retention is when alternatives are dropped: the last quarter is for tokens
    checksum: bool = True  # a CRC-32 with each payload; only an engine in the processor's own process goes without
    handover_items: int = 1024  # steps and events that an engine's process handed to its publisher's
    handover_bytes: int = (
        16_777_216  # of these, and of the requests that wait for the engine: one step has at most as much
    )
    outbox: int = 8  # batches that the engine's thread handed over and that are not published; then it waits
    failed_steps: int = 3  # in a row, until the engine counts as broken: one bad request fails one

    @property
    def most_items(self) -> int:
        """The most unacknowledged items that it keeps."""
        return self.retention_items or self.retention_bytes // 16_384


@dataclass(frozen=True, slots=True)
class ProcessorSettings(Section):
    """The processor, and the bounds of its workers and requests."""

    section = "processor"

    id: str = text("processor", 1, 48, "the processor's name; each start adds a random suffix")
    max_workers: int = count(64, "workers", "the most at once; others are refused", high=65536)
    metrics_address: str = host_and_port("127.0.0.1:9470", "where it serves its metrics; port 0: any; empty: nowhere")
    request_timeout_ms: int = milliseconds(600_000, "how long a request may take, unless it asks for less")

    drain_timeout_ms: int = 10_000  # for requests, at its end; they go on at another processor, or at its next start
    max_requests: int = 65_536  # open; gateways and workers have smaller bounds of their own
    requests_per_peer: int = 8192  # open, of one client or of all of one key; unasked, of one worker
    credit_items: int = 256  # that a worker sends ahead of their acceptance: some seconds of steps
    credit_bytes: int = 67_108_864  # the same: eight of the largest messages
    pending_items: int = 2048  # of a stream, that wait for consumers; then the slowest one is evicted
    pending_bytes: int = 134_217_728  # the same
    step_timeout_ms: int = 2000  # for a step's other parts, which ranks of one engine send within milliseconds
    unclaimed_timeout_ms: int = 10_000  # for an unknown request's client, which resumes as soon as it is back
    max_open_steps: int = 16  # of a stream, without all parts; ranks of one engine are a step or two apart
    draft_lag_steps: int = 1  # later steps that begin before an announced draft is given up: both come together
    replay_attempts: int = 3  # to have missing items; a worker that has them answers the first
    replay_timeout_ms: int = 1000  # of each; retention is memory, so only the network takes time
    ended_requests: int = 65_536  # that are remembered, so that a late row is known; 16 bytes each
    longest_step_ms: int = 3_600_000  # that a worker may announce: its requests wait for that long
    abort_timeout_ms: int = 5000  # until a worker ends an aborted request: some steps, even of a large prefill
    step_queue: int = 64  # steps that wait for the iterator over steps; then their workers wait


@dataclass(frozen=True, slots=True)
class ClientsSettings(Section):
    """The bounds of a processor's clients."""

    section = "clients"

    max_clients: int = count(256, "clients", "the most at once; others are refused", high=65536)
    buffer_bytes: int = size(268_435_456, "the most that waits for all; then the one with most loses its requests")
    detached_timeout_ms: int = milliseconds(30_000, "how long the requests of a client that went away wait for it")

    send_queue_bytes: int = 67_108_864  # for one client: a quarter of buffer_bytes
    send_queue_frames: int = 16_384  # for one client


@dataclass(frozen=True, slots=True)
class ClientSettings(Section):
    """A client of the processor, as the gateway is one."""

    section = "client"

    name: str = text("client", 1, 64, "the client's name in logs; several clients may have the same")
    resume_timeout_ms: int = milliseconds(30_000, "how long open requests wait for a processor that went away")

    continue_after_ms: int = 2000  # of a processor's silence, that a request goes on at another: two heartbeats
    drain_timeout_ms: int = 5000  # for requests that still have iterators, at its end
    window_frames: int = 64  # not acknowledged; more would hide for longer that a client is slow
    window_bytes: int = 16_777_216  # the same; one frame may be of any size
    request_buffer_rows: int = 4096  # that wait for the iterator over one request
    max_requests: int = 65_536  # open, as many as a processor has


@dataclass(frozen=True, slots=True)
class GatewaySettings(Section):
    """The gateway: its address, its access rules and the bounds of its HTTP clients."""

    section = "gateway"

    address: str = host_and_port("127.0.0.1:8000", "where it serves HTTP; port 0: any free one; it cannot be empty")
    reuse_port: bool = choice(
        "whether other gateways that set it too may serve the same address, each a process of its own; the kernel "
        "spreads the connections",
        default=False,
    )
    metrics_address: str = host_and_port("", "where it serves its metrics too; port 0: any; empty: nowhere")
    insecure: bool = choice("whether it serves more than loopback addresses without gateway.keys_file", default=False)
    keys_file: str = path(
        "the file of the API keys, as `tokenbus api-keys` writes it, read again when it changes; empty: no keys are "
        "asked for"
    )
    control: bool = choice(
        "whether clients without an API key may pause engines and change their weights, by vLLM's routes, and at a "
        "processor those without a key of the bus; an API key may if it was made with --operator",
        default=False,
    )
    key_requests_per_minute: int = count(
        0,
        "requests",
        "the most of one API key, unless it has its own limit, or of all clients without a key; 0: any number",
        low=0,
        high=MOST_REQUESTS_PER_MINUTE,
    )
    tls_certificate: str = path("the file of the certificate's chain in PEM, read again when it changes; empty: no TLS")
    tls_key: str = path("the file of the certificate's private key, in PEM, without a password")
    hosts: str = path(
        "names by which clients may call it, with commas between, beside localhost, the host of gateway.address and "
        "its IP addresses, or `*` for any; others get status 421 where it has no keys_file"
    )
    origins: str = path(
        "the origins of web pages that may use it beside its own page, as https://app.example, with commas between; "
        "others get status 403"
    )
    models: str = path(
        "the models and LoRA adapters that may be asked for, with commas between; empty: those of the workers, and "
        "`tokenbus` for any of them"
    )
    tokenizer: str = text(
        "ngram",
        1,
        4096,
        "that of the workers' engine: `ngram`, `bytes` (paddle's), another installed one's name, the path of a model's "
        "folder (with a slash), or `numbers`: each token's text is its id",
    )
    chat_template: Literal["auto", "text", "roles"] = choice(
        "how messages become a prompt: by the model's template, or their texts alone without a model; always their "
        "texts alone; or each with its role's name before it",
        default="auto",
    )
    tool_call_parser: Literal["", "hermes", "llama3_json", "pythonic"] = choice(
        "the form in which the model writes calls of functions that it may call, by vLLM's name; empty: none is looked "
        "for in its texts",
        default="",
    )
    max_requests: int = count(1024, "requests", "the most open, each choice of an answer one; others get status 429")
    max_prompt_tokens: int = count(131_072, "tokens", "the most of a prompt; more gets status 400", high=2**20)
    buffer_bytes: int = size(268_435_456, "the most that waits for all clients; then the largest answer ends first")
    compression: Literal["off", "gzip"] = choice(
        "whether answers to clients that accept gzip are compressed: less to send for more processor time",
        default="off",
    )
    drain_timeout_ms: int = milliseconds(10_000, "how long it waits at its end for requests; 0: not at all", low=0)

    key_share: float = 0.5  # of max_requests, that one API key has open, unless it has its own limit
    max_connections: int = 0  # 0: four for each of max_requests, as idle ones count; others get status 503
    request_timeout_ms: int = 10_000  # in which headers and body arrive, each; then status 408
    idle_timeout_ms: int = 60_000  # of a connection without a request
    max_tokens: int = 1_048_576  # that a request may ask for: more than any model's context
    max_body_bytes: int = 4_194_304  # then status 413; the ids and the text of the longest prompt fit
    encoding_time_ms: int = 2000  # of a processor, for one body: ten times the longest prompt's; then status 400
    encoding_memory_bytes: int = 134_217_728  # the same, where the kernel bounds it, as Linux does
    stream_buffer_bytes: int = 1_048_576  # for a client that reads too slowly: some thousand events
    answer_bytes: int = 67_108_864  # of an answer that is not streamed: a quarter of buffer_bytes
    write_timeout_ms: int = 10_000  # in which a client reads nothing of its answer; then it is cut off
    max_text_bytes: int = 1_048_576  # of a prompt, after its template; the longest one has some 4 bytes a token
    max_choices: int = 128  # of one answer, its prompts times n, of which OpenAI's API allows as many
    max_header_bytes: int = 16_384  # then status 431; other servers allow 8 to 64 KiB
    retry_after_ms: int = 1000  # of status 429 and 503: a request ends within some seconds, and makes room
    bus_timeout_ms: int = 1000  # for the processor's status, which /bus and /readyz ask for; probes wait as long

    @property
    def most_connections(self) -> int:
        """The most connections at once."""
        return self.max_connections or 4 * self.max_requests

    def _check_rules(self) -> None:
        if not self.address:
            raise SettingsError("gateway.address", "HOST:PORT", self.address)
        for name in listed(self.hosts):
            if name != "*" and not _HOST.fullmatch(name):
                raise SettingsError("gateway.hosts", "names of hosts, or addresses, without ports, or *", name)
        for origin in listed(self.origins):
            if not is_origin(origin):
                raise SettingsError("gateway.origins", ORIGIN_FORM, origin)
        if bool(self.tls_certificate) != bool(self.tls_key):
            lacking = "gateway.tls_key" if self.tls_certificate else "gateway.tls_certificate"
            raise SettingsError(lacking, "a file: gateway.tls_certificate and gateway.tls_key go together", Shown(""))


@dataclass(frozen=True, slots=True)
class DurableLogSettings(Section):
    """The log of all workers' streams in a JetStream stream. One that exists keeps what it was made with."""

    section = "durable_log"

    address: str = text(
        "", 0, 1024, "its servers, and its name (else `log`), as nats://HOST:PORT/NAME; empty: a processor keeps none"
    )
    durable: bool = choice(
        "whether an item is acknowledged to its worker only once the log has it; else the log leaves out, and names, "
        "what does not fit into 64 MiB",
        default=False,
    )
    credentials: str = path(
        "the file of this process's credentials: a .creds file, or a line with USER:PASSWORD, a token or an NKEY's "
        "seed; empty: none; read again when it changes"
    )
    ca_file: str = path("the certificates by which tls:// servers are trusted; empty: the system's")
    certificate: str = path("the file of this process's own certificate and its key, for tls:// servers; empty: none")
    replicas: int = count(1, "servers", "how many servers keep each item; at least 3 with durable", high=5)
    monitors: str = text(
        "",
        0,
        1024,
        "the servers' monitoring, as HOST:PORT, with commas between: how full they are is a metric, and with durable "
        "each must say that it syncs always; empty: they are not asked",
    )
    max_bytes: int = size(1_073_741_824, "the most that it keeps; the oldest items make room")
    max_age_hours: int = count(168, "h", "for how long it keeps an item", high=24 * 3650)

    buffer_bytes: int = 67_108_864  # that a writer holds unacknowledged, and that a reader fetches ahead
    message_bytes: int = 524_288  # of a worker's items in one message: half of what NATS takes by default

    def _check_rules(self) -> None:
        if self.durable and not self.address:
            raise SettingsError("durable_log.address", "needed with durable_log.durable", self.address)
        if self.durable and self.replicas < LEAST_REPLICAS:
            limit = f"at least {LEAST_REPLICAS} with durable_log.durable"
            raise SettingsError("durable_log.replicas", limit, self.replicas)


@dataclass(frozen=True, slots=True)
class LogSettings(Section):
    """How and what is logged."""

    section = "log"

    format: Literal["auto", "json", "console"] = choice(
        "JSON, lines for people, or auto: lines for people on a terminal and JSON elsewhere", default="auto"
    )
    level: Literal["debug", "info", "warning", "error"] = choice("the least that is logged", default="info")


_LIMITS = {
    "max_rows": ("rows", "the most of a batch"),
    "max_tokens_per_row": ("tokens", "the most of a row, and the most draft tokens that it verifies or proposes"),
    "max_top_k": ("alternatives", "the most of a token"),
}
LIMITS = tuple(
    Entry("limits", name, int, whole(unit, meaning, low=0, high=most), getattr(Limits.default(), name))
    for name, (unit, meaning) in _LIMITS.items()
    for most in [getattr(Limits.schema(), name)]
)
"""The settings of the contract's limits: a deployment may tighten the schema's, never widen them."""

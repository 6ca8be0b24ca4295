"""The sections of the settings: each value with its default, its range, its unit and its meaning."""

import re
from dataclasses import dataclass
from typing import Literal

from tokenbus_contracts import Limits
from tokenbus_services.settings.errors import SettingsError, Shown
from tokenbus_services.settings.kinds import (
    HOUR_MS,
    Entry,
    Section,
    choice,
    count,
    endpoints,
    host_and_port,
    milliseconds,
    path,
    share,
    size,
    text,
    whole,
)

MOST_REQUESTS_PER_MINUTE = 10_000_000
LEAST_REPLICAS = 3
"""Of which two acknowledge an item, so that one server may be lost."""
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HOST = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")
_NATS_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)?")
_NATS_ROLES = re.compile(r"((worker|client|observer|handoff)(\+(?!$)|$))*")
ORIGIN_FORM = "the origin of a web page, as https://app.example or http://localhost:3000"


def is_origin(text: str) -> bool:
    """Return whether a text is a web page's origin: a scheme, a host and perhaps a port, and nothing else."""
    return _ORIGIN.fullmatch(text) is not None


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas between, in lower case."""
    return tuple(filter(None, (part.strip().lower() for part in text.split(","))))


def _wildcard(address: str) -> bool:
    return address.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"))


@dataclass(frozen=True, slots=True)
class BusSettings(Section):
    """The addresses of the processor, and the bounds, times and keys of every connection to it."""

    section = "bus"

    workers_address: str = endpoints(
        "tcp://127.0.0.1:5570",
        "where a processor listens for workers; for workers: the processors that they may connect to, one at a time",
    )
    clients_address: str = endpoints(
        "tcp://127.0.0.1:5571",
        "where a processor listens for clients; for clients: all processors, each of which they connect to",
    )
    heartbeat_interval_ms: int = milliseconds(1000, "how often each side must be heard", high=HOUR_MS)
    heartbeat_timeout_ms: int = milliseconds(
        3000,
        "after how long a silent peer is lost; at least 500, and twice heartbeat_interval_ms",
        high=HOUR_MS,
    )
    key_file: str = path("the file of this process's own key, as `tokenbus keygen` writes it, for tcp; empty: none")
    server_key: str = path(
        "the processor's public key, or the path of its certificate: what workers and clients with a key need"
    )
    allowed_keys: str = path(
        "the file of the keys that may connect, as `tokenbus keys` writes it: what the processor needs that has a "
        "key, and decode workers, for hand-offs; it is read again when it changes",
    )
    nats_credentials: str = path(
        "the file with this process's credentials for NATS: a .creds file, or one line with USER:PASSWORD, a token "
        "or an NKEY's seed; empty: none; it is read again when it changes",
    )
    nats_name: str = text("", 0, 64, "this process's user name in NATS; empty: the user of USER:PASSWORD, or none")
    nats_roles: str = text(
        "", 0, 64, "the roles that the NATS server permits this process, as client+observer; empty: all"
    )
    nats_ca_file: str = path("the certificates by which tls:// servers are trusted; empty: the system's")
    nats_certificate: str = path(
        "the file of this process's own certificate, for tls:// servers that verify their clients; empty: none"
    )
    nats_certificate_key: str = path("the file of that certificate's key; empty: it is in the same file")
    insecure: bool = choice(
        "whether tcp addresses beyond loopback may be used without keys, and those of NATS without TLS and credentials",
        default=False,
    )

    # Constants: nothing but code sets them.
    max_part_bytes: int = 8_388_608
    """The largest part of a message: the schema's largest batch. A peer that sends a larger one is cut off."""
    max_pending_bytes: int = 100_663_296
    """The most unread bytes of one peer, which is cut off above that: a worker's whole credit, and half as much."""
    max_unadmitted_bytes: int = 33_554_432
    """The most unread bytes of all peers together that have not introduced themselves; a hello has some hundred."""
    max_total_pending_bytes: int = 134_217_728
    """The most unread bytes of all peers together; the one with most is cut off above that."""
    max_connections: int = 4096
    """The most connections at once; those that have sent nothing make room. `Settings.most_connections` raises it."""
    introduction_timeout_ms: int = 5000
    """How long a connection may take to introduce itself: a handshake takes milliseconds."""
    reconnect_ms: int = 100
    """How long a broken connection waits for its first new try."""
    reconnect_max_ms: int = 500
    """The longest wait between tries: a crowd that comes back spreads over it. Below the least heartbeat timeout."""
    linger_ms: int = 1000
    """How long a closing socket tries to send its last frames. Longer keeps a stopping process from its end."""
    high_water_mark: int = 4096
    """The most messages that a socket holds in each direction for one peer. Credit and windows end first."""

    def _check_rules(self) -> None:
        # Else a peer that comes back as slowly as it may is lost before it has said a word.
        for name, least in {
            "twice bus.heartbeat_interval_ms": 2 * self.heartbeat_interval_ms,
            "the longest wait before a reconnect": self.reconnect_max_ms,
        }.items():
            if self.heartbeat_timeout_ms < least:
                raise SettingsError("bus.heartbeat_timeout_ms", f"at least {name}, {least}", self.heartbeat_timeout_ms)
        if not _NATS_NAME.fullmatch(self.nats_name):
            raise SettingsError("bus.nats_name", "letters, digits, _ and -", self.nats_name)
        if self.nats_certificate_key and not self.nats_certificate:
            limit = "only beside bus.nats_certificate"
            raise SettingsError("bus.nats_certificate_key", limit, self.nats_certificate_key)
        if not _NATS_ROLES.fullmatch(self.nats_roles):
            limit = "of worker, client, observer and handoff, with + between"
            raise SettingsError("bus.nats_roles", limit, self.nats_roles)


@dataclass(frozen=True, slots=True)
class WorkerSettings(Section):
    """A worker: its name and role, its retention and its hand-offs."""

    section = "worker"

    id: str = text("worker-0", 1, 64, "the worker's name; no two live workers have the same")
    role: Literal["mixed", "prefill", "decode"] = choice(
        "its share of a request: all of it, the prompt and the first token, or the tokens after the first",
        default="mixed",
    )
    model: str = text("", 0, 256, "the model's name, as clients ask for it; empty: the only one")
    tp_rank: int = count(0, "", "its tensor-parallel rank", low=0, high=65535)
    dp_rank: int = count(0, "", "its data-parallel rank", low=0, high=65535)
    retention_items: int = count(4096, "items", "the most unacknowledged items that it keeps", low=2)
    retention_bytes: int = size(
        268_435_456, "the most bytes of unacknowledged items that it keeps; at least limits.max_message_bytes"
    )
    policy: Literal["block", "shed", "fail"] = choice(
        "what happens when retention fills: the engine waits, alternatives are dropped, or requests end",
        default="block",
    )
    block_timeout_ms: int = milliseconds(
        60_000, "how long the engine waits for room under the policies block and shed; then requests end"
    )
    max_requests: int = count(
        1024, "requests", "the most that it works on at once; 0: it takes none from the processor", low=0
    )
    handoff_address: str = endpoints(
        "tcp://127.0.0.1:0",
        "where a decode worker takes requests from prefill workers, which must reach it; port 0: any",
        most=1,
    )
    top_logprobs: int = count(
        0,
        "alternatives",
        "how many of a token are published by the scheduler of a vLLM that is deployed already; elsewhere each request "
        "says how many",
        low=0,
        high=Limits.schema().max_top_k,
    )
    metrics_address: str = host_and_port(
        "", "where it serves its metrics, an address of its own on its host; port 0: any; empty: nowhere"
    )
    drain_timeout_ms: int = milliseconds(
        10_000, "how long a stopping worker waits for its requests and acknowledgements; 0: not at all", low=0
    )

    # Constants: nothing but code sets them.
    handoff_timeout_ms: int = 5000
    """How long a prefill worker waits for a decode worker to take a request: it answers between two steps."""
    handoff_bytes: int = 268_435_456
    """The most bytes of states that wait for a decode worker's engine; one alone may be of any size."""
    shed_at: float = 0.75
    """How full retention is when the policy shed begins to drop alternatives: the last quarter is for tokens."""
    checksum: bool = True
    """Whether each payload carries its CRC-32. Only an engine and a processor in one process go without."""
    handoff_connections: int = 64
    """To how many decode workers a prefill worker stays connected: as many as a processor takes by default."""
    outbox: int = 8
    """How many batches the engine's thread may have handed over that are not published yet; then it waits."""
    failed_steps: int = 3
    """How many steps may fail one after the other until the engine is taken for broken: one bad request fails one."""

    def _check_rules(self) -> None:
        if _wildcard(self.handoff_address):
            limit = "an address that prefill workers can reach: no address of every interface"
            raise SettingsError("worker.handoff_address", limit, self.handoff_address)


@dataclass(frozen=True, slots=True)
class ProcessorSettings(Section):
    """The processor, and the bounds of its workers and requests."""

    section = "processor"

    id: str = text("processor", 1, 48, "the processor's name; each start adds a random suffix")
    max_workers: int = count(64, "workers", "the most at once; others are refused", high=65536)
    request_timeout_ms: int = milliseconds(600_000, "how long a request may take, unless it asks for less")
    drain_timeout_ms: int = milliseconds(
        10_000, "how long a stopping processor waits for its requests; 0: not at all", low=0
    )

    # Constants: nothing but code sets them.
    max_requests: int = 65_536
    """The most open requests; others are refused. Gateways and workers have smaller bounds of their own."""
    requests_per_peer: int = 8192
    """The most open requests of one client, or of all of one key; and the most that one worker brings unasked."""
    credit_items: int = 256
    """How many items a worker may send ahead of their acceptance: some seconds of steps."""
    credit_bytes: int = 67_108_864
    """The same in bytes: eight of the largest messages."""
    pending_items: int = 2048
    """The most items of a stream that wait for consumers; then the slowest consumer is evicted."""
    pending_bytes: int = 134_217_728
    """The same in bytes."""
    request_buffer_rows: int = 1024
    """The most rows that wait for the iterator over one request in the processor's own process."""
    slow_consumer: Literal["end", "wait"] = "wait"
    """At the end of that buffer: end the request, or let its worker wait. Clients of the bus lose theirs either way."""
    step_timeout_ms: int = 2000
    """How long a step waits for its other parts, which ranks of one engine send within milliseconds."""
    unclaimed_timeout_ms: int = 10_000
    """How long rows of an unknown request are kept: a client that comes back resumes its requests at once."""
    handoff_timeout_ms: int = 10_000
    """How long a request that was handed off waits for its decode worker's first row."""
    max_open_steps: int = 16
    """The most steps of a stream that wait for their other parts. Ranks of one engine are a step or two apart."""
    draft_lag_steps: int = 1
    """How many later steps may begin before an announced draft is given up: an engine publishes both together."""
    replay_attempts: int = 3
    """How often missing items are asked for again; a worker that has them answers the first time."""
    replay_timeout_ms: int = 1000
    """How long each such attempt waits for the items: retention is memory, so only the network takes time."""
    ended_requests: int = 65_536
    """The most requests that are remembered after their end, so that a late row is known; 16 bytes each."""
    abort_timeout_ms: int = 5000
    """How long a worker may take to end an aborted request: some steps, even of a large prefill."""
    step_queue: int = 64
    """The most steps that wait for the iterator over steps; then their workers wait."""


@dataclass(frozen=True, slots=True)
class ClientsSettings(Section):
    """The bounds of a processor's clients."""

    section = "clients"

    max_clients: int = count(256, "clients", "the most at once; others are refused", high=65536)
    buffer_bytes: int = size(
        268_435_456, "the most that waits for all clients together; then the one with most loses its requests"
    )
    detached_timeout_ms: int = milliseconds(
        30_000, "how long the requests of a client that went away wait for it to come back"
    )

    # Constants: nothing but code sets them.
    send_queue_bytes: int = 67_108_864
    """The most bytes that wait for one client, a quarter of buffer_bytes: eight of the largest messages."""
    send_queue_frames: int = 16_384
    """The most frames that wait for one client."""


@dataclass(frozen=True, slots=True)
class ClientSettings(Section):
    """A client of the processor, as the gateway is one."""

    section = "client"

    name: str = text("client", 1, 64, "the client's name in logs; several clients may have the same")
    resume_timeout_ms: int = milliseconds(
        30_000, "how long open requests wait for a processor that went away to come back"
    )
    drain_timeout_ms: int = milliseconds(5000, "how long a closing client waits for its requests; 0: not at all", low=0)

    # Constants: nothing but code sets them.
    window_frames: int = 64
    """The most frames on their way and not acknowledged: more would hide for longer that a client is slow."""
    window_bytes: int = 16_777_216
    """The same in bytes; one frame may be of any size."""
    request_buffer_rows: int = 4096
    """The most rows that wait for the iterator over one request."""
    max_requests: int = 65_536
    """The most open requests, as many as a processor has by default; others are refused."""


@dataclass(frozen=True, slots=True)
class GatewaySettings(Section):
    """The gateway: its address, its access rules and the bounds of its HTTP clients."""

    section = "gateway"

    address: str = host_and_port("127.0.0.1:8000", "where it serves HTTP; port 0: any free one; it cannot be empty")
    processes: int = count(
        1,
        "processes",
        "how many serve that address together, each a client of the bus on a core of its own; more than 1 wants a "
        "system that passes sockets between processes, as Linux and macOS do",
        high=64,
    )
    metrics_address: str = host_and_port(
        "", "where it serves its metrics too, on a thread of their own; port 0: any; empty: nowhere"
    )
    insecure: bool = choice("whether it serves more than loopback addresses without gateway.keys_file", default=False)
    keys_file: str = path(
        "the file of the API keys that `tokenbus api-keys` writes, read again when it changes; while it is not "
        "there no key is known; empty: no keys are asked for",
    )
    key_share: float = share(
        0.5, "the most of max_requests that one API key has open, unless the key has a limit of its own"
    )
    key_requests_per_minute: int = count(
        0,
        "requests",
        "the most that one API key, or all clients without a key, may ask for, unless the key has a limit of its "
        "own; 0: as many as they like",
        low=0,
        high=MOST_REQUESTS_PER_MINUTE,
    )
    tls_certificate: str = path(
        "the file of the certificate and its chain, in PEM, read again when it changes; empty: no TLS"
    )
    tls_key: str = path("the file of the certificate's private key, in PEM, without a password")
    hosts: str = path(
        "the names by which clients may call it, without ports and with commas between, beside localhost, the host "
        "of gateway.address and the IP address that they connected to; others get status 421",
    )
    origins: str = path(
        "the origins of web pages that may use it, as https://app.example, with commas between; its own page "
        "always may; others get status 403",
    )
    models: str = path(
        "the models that may be asked for, as workers name them, with commas between, and their LoRA adapters; empty: "
        "those of the workers, and `tokenbus` for any of them",
    )
    tokenizer: str = text(
        "ngram",
        1,
        4096,
        "the tokenizer of the workers' engine: `ngram`, `bytes` (paddle's), that of another installed package, the "
        "path of a model's folder (one with a slash), or `numbers`: each token's text is its id",
    )
    chat_template: Literal["auto", "text", "roles"] = choice(
        "how a chat's messages become a prompt: by the model's own template, or, for a tokenizer that is no "
        "model's, their texts alone; always their texts alone; or each with its role's name before it",
        default="auto",
    )
    max_requests: int = count(
        1024, "requests", "the most that are open at once, each choice of an answer one; others get status 429"
    )
    max_connections: int = count(
        4096, "connections", "the most at once; others get status 503, and of TLS handshakes the oldest make room"
    )
    request_timeout_ms: int = milliseconds(
        10_000, "how long a request's headers and body may take to arrive, each; then status 408"
    )
    idle_timeout_ms: int = milliseconds(60_000, "how long a connection may stay open without a request")
    max_prompt_tokens: int = count(131_072, "tokens", "the most of a prompt; more gets status 400", high=2**20)
    max_tokens: int = count(1_048_576, "tokens", "the most that a request may ask for")
    buffer_bytes: int = size(
        268_435_456, "the most that waits for all clients together, and before them; then the largest answer ends first"
    )
    compression: Literal["off", "gzip"] = choice(
        "whether answers to clients that accept gzip are compressed, an event at a time: less to send for more "
        "processor time (docs/gateway.md says how much)",
        default="off",
    )
    drain_timeout_ms: int = milliseconds(
        10_000, "how long a stopping gateway waits for its open requests; 0: not at all", low=0
    )

    # Constants: nothing but code sets them.
    max_body_bytes: int = 4_194_304
    """The largest body of a request; a larger one gets status 413. The longest prompt's ids and text fit."""
    encoding_time_ms: int = 2000
    """The most processor time to read a body and encode its text, ten times the longest prompt's; then status 400."""
    encoding_memory_bytes: int = 134_217_728
    """The most memory for that, where the kernel bounds it, as Linux does; more gets status 400."""
    stream_buffer_bytes: int = 1_048_576
    """The most that waits for a client that reads too slowly, some thousand events; then its request ends."""
    answer_bytes: int = 67_108_864
    """The most that is collected for an answer that is not streamed, a quarter of buffer_bytes."""
    write_timeout_ms: int = 10_000
    """How long a client may read nothing of its answer; then it is cut off."""
    max_text_bytes: int = 1_048_576
    """The most of a prompt's text, after its chat template: the longest prompt has some 4 bytes a token and fits."""
    max_choices: int = 128
    """The most choices of one answer, its prompts times n. OpenAI's API allows as many for n."""
    max_header_bytes: int = 16_384
    """The most of a request's line and headers; more gets status 431. Other servers allow 8 to 64 KiB."""
    retry_after_ms: int = 1000
    """The Retry-After of status 429 and 503: a request ends within some seconds, and makes room."""
    bus_timeout_ms: int = 1000
    """How long the processor may take to send its status, which /bus and /readyz ask for; probes wait as long."""

    def _check_rules(self) -> None:
        if not self.address:
            raise SettingsError("gateway.address", "HOST:PORT", self.address)
        for name in listed(self.hosts):
            if not _HOST.fullmatch(name):
                raise SettingsError("gateway.hosts", "names of hosts, or addresses, without ports", name)
        for origin in listed(self.origins):
            if not is_origin(origin):
                raise SettingsError("gateway.origins", ORIGIN_FORM, origin)
        if bool(self.tls_certificate) != bool(self.tls_key):
            lacking = "gateway.tls_key" if self.tls_certificate else "gateway.tls_certificate"
            raise SettingsError(lacking, "a file: gateway.tls_certificate and gateway.tls_key go together", Shown(""))


@dataclass(frozen=True, slots=True)
class DeadLetterSettings(Section):
    """The folder of refused messages, for people to look at."""

    section = "dead_letters"

    directory: str = text("dead-letters", 1, 4096, "the folder they are kept in")
    max_bytes: int = size(268_435_456, "the most of all files together, notes too; the oldest go first")

    # Constants: nothing but code sets them.
    max_files: int = 1000
    """The most messages, each with a note beside it; the oldest go first. A person reads no more of them."""
    per_second: int = 50
    """The most messages that are written in a second: enough to see a fault. Others are counted."""


@dataclass(frozen=True, slots=True)
class MetricsSettings(Section):
    """The processor's metrics."""

    section = "metrics"

    address: str = host_and_port(
        "127.0.0.1:9470", "where the processor serves its metrics; port 0: any free one; empty: nowhere"
    )

    # Constants: nothing but code sets them.
    stall_timeout_ms: int = 5000
    """After how long an event loop that does not answer makes its process unhealthy; no healthy one pauses so long."""


@dataclass(frozen=True, slots=True)
class DurableLogSettings(Section):
    """The log of all workers' streams in a JetStream stream. One that exists keeps what it was made with."""

    section = "durable_log"

    address: str = text(
        "",
        0,
        1024,
        "the servers of the log, and its name, as nats://HOST:PORT/NAME; without one it is `log`; empty: a processor "
        "keeps none",
    )
    durable: bool = choice(
        "whether a processor acknowledges an item to its worker only once the log has it; otherwise the log leaves out "
        "items that do not fit into buffer_bytes, and names them",
        default=False,
    )
    replicas: int = count(
        1, "servers", "how many of a cluster's servers keep each item; at least 3 with durable", high=5
    )
    monitors: str = text(
        "",
        0,
        1024,
        "where the log's servers serve their monitoring, as HOST:PORT, with commas between: how full they are is a "
        "metric, and with durable each must say that it syncs always; empty: they are not asked",
    )
    max_bytes: int = size(1_073_741_824, "the most that it keeps; the oldest items make room")
    max_age_hours: int = count(168, "h", "for how long it keeps an item", high=24 * 3650)
    buffer_bytes: int = size(
        67_108_864, "the most bytes that a writer holds unacknowledged, and that a reader fetches ahead"
    )

    # Constants: nothing but code sets them.
    message_bytes: int = 524_288
    """The most of a worker's items in one message of the log: half of what NATS takes by default."""

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
        "JSON lines, lines for people, or auto: lines for people on a terminal and JSON elsewhere", default="auto"
    )
    level: Literal["debug", "info", "warning", "error"] = choice("the least that is logged", default="info")


_LIMITS = {
    "max_message_bytes": ("bytes", "the largest encoded batch"),
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

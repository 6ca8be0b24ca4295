"""The sections of the settings. A plain field is a constant that users cannot set; its comment explains its value."""

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
"""Two of three replicas acknowledge an item, so one server may be lost."""
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HOST = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")
ORIGIN_FORM = "the origin of a web page, such as https://app.example or http://localhost:3000"


def is_origin(text: str) -> bool:
    """Return whether a text is a web origin: a scheme, a host and optionally a port."""
    return _ORIGIN.fullmatch(text) is not None


def listed(text: str) -> tuple[str, ...]:
    """Split a comma-separated list, in lower case."""
    return tuple(filter(None, (part.strip().lower() for part in text.split(","))))


@dataclass(frozen=True, slots=True)
class BusSettings(Section):
    """The addresses, timeouts and keys of connections to a processor."""

    workers_address: str = endpoints(
        "tcp://127.0.0.1:5570", "address for workers; given a list, each worker connects to one of its processors"
    )
    clients_address: str = endpoints(
        "tcp://127.0.0.1:5571", "address for clients; given a list, a client connects to all of its processors"
    )
    heartbeat_timeout_ms: int = milliseconds(
        3000,
        "silence after which a peer is lost; a heartbeat is sent every second, or three times in this "
        "time if it is shorter",
        low=500,
        high=HOUR_MS,
    )
    key_file: str = path("file of this process's secret key for TCP, made by `tokenbus keys make`; empty: no key")
    server_key: str = path("for workers and clients with a key: the processor's public key, or the path of its file")
    allowed_keys: str = path(
        "for processors with a key: the allow-list, a file made by `tokenbus keys`; read again when it changes"
    )
    insecure: bool = choice(
        "allow TCP beyond loopback without keys, and a durable log there without TLS or credentials", default=False
    )

    heartbeat_ms: int = 1000  # lowered to a third of heartbeat_timeout_ms, so that two heartbeats may be lost
    max_part_bytes: int = 8_388_608  # size limit of a message part: the schema's largest batch
    max_pending_bytes: int = 100_663_296  # unread bytes of one peer: 1.5 times a worker's credit
    max_unadmitted_bytes: int = 33_554_432  # unread bytes of all peers before their hello, which is small
    max_total_pending_bytes: int = 134_217_728  # unread bytes of all peers; the largest one is disconnected
    max_connections: int = 4096  # silent connections are closed first; `Settings.most_connections` may be higher
    introduction_timeout_ms: int = 5000  # a handshake takes milliseconds
    reconnect_ms: int = 100  # the first pause between two attempts
    reconnect_max_ms: int = 500  # the longest pause: it spreads many peers, and is far below heartbeat_timeout_ms
    linger_ms: int = 1000  # for the last frames of a closing socket; longer would delay the end of the process
    stall_timeout_ms: int = 5000  # an event loop that is blocked for longer makes its process unhealthy
    high_water_mark: int = 4096  # messages of one socket for one peer; credit and windows run out earlier

    @property
    def heartbeat_interval_ms(self) -> int:
        return min(self.heartbeat_ms, self.heartbeat_timeout_ms // 3)


@dataclass(frozen=True, slots=True)
class WorkerSettings(Section):
    """A worker: its name, role and retention."""

    id: str = text("worker-0", 1, 64, "name of the worker, unique among live workers")
    role: Literal["mixed", "prefill", "decode"] = choice(
        "the part of a request that it computes: all, prompt and first token, or the following tokens", default="mixed"
    )
    model: str = text("", 0, 256, "name of the model in requests; empty: the only model")
    retention_bytes: int = size(268_435_456, "limit of retained unacknowledged items; at least one message")
    policy: Literal["block", "shed", "fail"] = choice(
        "when retention is full: block the engine for up to 60 s, drop alternatives, or fail requests", default="block"
    )
    max_requests: int = count(1024, "requests", "limit of open requests; 0: take none from the processor", low=0)
    top_logprobs: int = count(
        0,
        "alternatives",
        "alternatives per token that the scheduler of an existing vLLM publishes; otherwise each request chooses",
        low=0,
        high=Limits.schema().max_top_k,
    )
    metrics_address: str = host_and_port("", "address of the metrics; port 0: any free port; empty: no metrics")
    abandon_after_ms: int = milliseconds(
        2000,
        "how long its processor may be away before the worker gives up its requests and tries another one of the list",
    )
    drain_timeout_ms: int = milliseconds(
        10_000, "time limit at shutdown for requests and for acknowledgements; 0: do not wait", low=0
    )
    longest_step_ms: int = milliseconds(
        30_000,
        "longest step of the engine: the worker is lost after this and bus.heartbeat_timeout_ms without progress",
        low=0,
        high=3_600_000,
    )

    tp_rank: int = 0  # for an engine of which all tensor-parallel ranks publish
    dp_rank: int = 0  # set by the engine
    retention_items: int = 0  # 0: one per 16 KiB of retention_bytes, about the size of a step without alternatives
    block_timeout_ms: int = 60_000  # for the policies block and shed: twice as long as clients wait for a processor
    publisher: Literal["auto", "thread", "process"] = "auto"  # auto: a process on Linux if the engine supports it
    shed_at: float = 0.75  # fill level of retention at which alternatives are dropped; the rest is for tokens
    checksum: bool = True  # a CRC-32 of each payload; off only for an engine in the processor's own process
    handover_items: int = 1024  # steps and events in flight from the engine's process to the publisher's process
    handover_bytes: int = 16_777_216  # the same in bytes, also for requests in flight; a step is never larger
    outbox: int = 8  # unpublished batches of the engine's thread, which then waits
    failed_steps: int = 3  # consecutive failures after which the engine counts as broken; a bad request fails one step

    @property
    def most_items(self) -> int:
        return self.retention_items or self.retention_bytes // 16_384


@dataclass(frozen=True, slots=True)
class ProcessorSettings(Section):
    """The processor, and the limits of its workers and requests."""

    id: str = text("processor", 1, 48, "name of the processor; each start adds a random suffix")
    max_workers: int = count(64, "workers", "limit of connected workers; further ones are refused", high=65536)
    metrics_address: str = host_and_port(
        "127.0.0.1:9470", "address of the metrics; port 0: any free port; empty: no metrics"
    )
    request_timeout_ms: int = milliseconds(600_000, "longest duration of a request; the request may ask for less")

    drain_timeout_ms: int = 10_000  # at shutdown; open requests continue at another processor or after the restart
    max_requests: int = 65_536  # open requests; gateways and workers have smaller limits
    requests_per_peer: int = 8192  # open requests of one client or key, and unclaimed requests of one worker
    credit_items: int = 256  # unaccepted items that a worker may send: some seconds of steps
    credit_bytes: int = 67_108_864  # the same in bytes: eight of the largest messages
    pending_items: int = 2048  # items of a stream that wait for consumers; beyond this the slowest consumer is evicted
    pending_bytes: int = 134_217_728  # the same in bytes
    step_timeout_ms: int = 2000  # wait for missing parts of a step; ranks of one engine are milliseconds apart
    unclaimed_timeout_ms: int = 10_000  # wait for the client of an unknown request, which resumes when it reconnects
    max_open_steps: int = 16  # incomplete steps of a stream; ranks of one engine are a step or two apart
    draft_lag_steps: int = 1  # later steps after which a missing draft batch is given up
    replay_attempts: int = 3  # requests for missing items; a worker that has them answers the first one
    replay_timeout_ms: int = 1000  # for each attempt; retention is in memory, so only the network takes time
    ended_requests: int = 65_536  # remembered requests, to recognize late rows; 16 bytes each
    longest_step_ms: int = 3_600_000  # limit of the value that a worker announces
    abort_timeout_ms: int = 5000  # until a worker confirms an abort: the time of some steps, even with a large prefill
    step_queue: int = 64  # steps that wait for the iterator over steps; beyond this the workers wait


@dataclass(frozen=True, slots=True)
class ClientsSettings(Section):
    """The limits of a processor's clients."""

    max_clients: int = count(256, "clients", "limit of connected clients; further ones are refused", high=65536)
    buffer_bytes: int = size(
        268_435_456,
        "limit of data buffered for all clients; above it, the client with the most data loses its requests",
    )
    detached_timeout_ms: int = milliseconds(30_000, "how long the requests of a disconnected client wait for it")

    send_queue_bytes: int = 67_108_864  # buffered for one client: a quarter of buffer_bytes
    send_queue_frames: int = 16_384  # buffered for one client


@dataclass(frozen=True, slots=True)
class ClientSettings(Section):
    """A client of the processor, such as the gateway."""

    name: str = text("client", 1, 64, "name of the client in logs; need not be unique")
    resume_timeout_ms: int = milliseconds(30_000, "how long open requests wait for a processor that is away")

    continue_after_ms: int = 2000  # silence of a processor after which requests continue at another one: two heartbeats
    drain_timeout_ms: int = 5000  # at shutdown, for requests that are being iterated
    window_frames: int = 64  # unacknowledged frames; a larger window would hide a slow client for longer
    window_bytes: int = 16_777_216  # the same in bytes; a single frame may be larger
    request_buffer_rows: int = 4096  # rows that wait for the iterator of a request
    max_requests: int = 65_536  # open requests, as many as a processor allows


@dataclass(frozen=True, slots=True)
class GatewaySettings(Section):
    """The gateway: its addresses, access rules, and the limits of its HTTP clients."""

    address: str = host_and_port("127.0.0.1:8000", "HTTP address; port 0: any free port", may_be_empty=False)
    reuse_port: bool = choice(
        "let several gateway processes listen on the same address; all must set it, and the kernel balances the "
        "connections",
        default=False,
    )
    metrics_address: str = host_and_port("", "another address for metrics; port 0: any free port; empty: none")
    insecure: bool = choice("allow addresses beyond loopback without gateway.keys_file", default=False)
    keys_file: str = path(
        "file of the API keys, made by `tokenbus api-keys`; read again when it changes; empty: no key is required"
    )
    control: bool = choice(
        "allow clients without an API key to pause engines and change their weights through vLLM's routes "
        "(API keys need --operator instead); for a processor: allow it to clients without a key of the bus",
        default=False,
    )
    key_requests_per_minute: int = count(
        0,
        "requests",
        "default limit of an API key, and limit of all clients without a key together; 0: no limit",
        low=0,
        high=MOST_REQUESTS_PER_MINUTE,
    )
    tls_certificate: str = path("PEM file of the certificate chain; read again when it changes; empty: no TLS")
    tls_key: str = path("PEM file of the certificate's private key, without a password")
    hosts: str = path(
        "comma-separated host names of the gateway, in addition to localhost, the host of gateway.address and its IP "
        "addresses, or `*` for any; without keys_file, requests for other names get status 421"
    )
    origins: str = path(
        "comma-separated origins of other web pages that may use the gateway, such as "
        "https://app.example; pages of other "
        "origins get status 403"
    )
    models: str = path(
        "comma-separated names of the allowed models and LoRA adapters; empty: those of the workers, and `tokenbus` "
        "for any of them"
    )
    tokenizer: str = text(
        "ngram",
        1,
        4096,
        "tokenizer of the workers' engine: `ngram`, `bytes` (for paddle), the name of another installed one, the path "
        "of a model's folder (with a slash), or `numbers`: the text of a token is its id",
    )
    chat_template: Literal["auto", "text", "roles"] = choice(
        "how messages become a prompt. auto: the model's template, or without a model the texts; text: the texts; "
        "roles: each text after the name of its role",
        default="auto",
    )
    tool_call_parser: Literal["", "hermes", "llama3_json", "pythonic"] = choice(
        "vLLM's name of the format of the model's tool calls; empty: tool calls are not parsed", default=""
    )
    bridge_turns: str = text(
        "",
        0,
        64,
        "model family in the package `renderers`, such as `qwen3`: the prompt of a session's next turn begins with the "
        "ids of its last turn; empty: each prompt is encoded from its messages",
    )
    return_tokens_as_token_ids: bool = choice(
        "in logprobs, name tokens by their ids, such as `token_id:5`, unless a request says otherwise", default=False
    )
    request_id_headers: bool = choice(
        "send `x-request-id` with every response: for an answer its id on the bus, otherwise the "
        "request's own or a new id",
        default=False,
    )
    force_include_usage: bool = choice("send the current usage with every chunk of every stream", default=False)
    max_requests: int = count(
        1024,
        "requests",
        "limit of open requests, where each choice of an answer counts as one; further ones get status 429",
    )
    max_prompt_tokens: int = count(131_072, "tokens", "limit of a prompt; a longer one gets status 400", high=2**20)
    buffer_bytes: int = size(268_435_456, "limit of data buffered for all clients; above it, the largest answer fails")
    compression: Literal["off", "gzip"] = choice(
        "compress answers to clients that accept gzip: less network traffic, more CPU time", default="off"
    )
    drain_timeout_ms: int = milliseconds(10_000, "time limit at shutdown for open requests; 0: do not wait", low=0)

    key_share: float = 0.5  # the share of max_requests for one API key without its own limit
    max_connections: int = 0  # 0: four times max_requests, since idle connections count; further ones get status 503
    request_timeout_ms: int = 10_000  # for the headers, and again for the body; then status 408
    idle_timeout_ms: int = 60_000  # of a connection without a request
    max_tokens: int = 1_048_576  # that a request may ask for; more than the context of any model
    max_body_bytes: int = 4_194_304  # then status 413; enough for the longest prompt as ids or text
    encoding_time_ms: int = 2000  # CPU time for one body: ten times the longest prompt; then status 400
    encoding_memory_bytes: int = 134_217_728  # memory for one body, if the kernel can limit it (Linux)
    stream_buffer_bytes: int = 1_048_576  # for a slow client: some thousand events
    answer_bytes: int = 67_108_864  # size of an answer that is not streamed: a quarter of buffer_bytes
    bridge_bytes: int = 67_108_864  # of the ids of sessions' last turns: some 500 of 32,000 tokens
    write_timeout_ms: int = 10_000  # a client that reads nothing for this long is disconnected
    max_text_bytes: int = 1_048_576  # of a prompt after its template; a token has about 4 bytes
    max_choices: int = 128  # of one answer: the number of prompts times n; the limit of OpenAI's API
    max_header_bytes: int = 16_384  # then status 431; other servers allow 8 to 64 KiB
    retry_after_ms: int = 1000  # sent with status 429 and 503; requests end within seconds
    bus_timeout_ms: int = 1000  # for the processor's status in /bus and /readyz; probes wait about this long

    @property
    def most_connections(self) -> int:
        return self.max_connections or 4 * self.max_requests

    def _check_rules(self) -> None:
        for name in listed(self.hosts):
            if name != "*" and not _HOST.fullmatch(name):
                raise SettingsError("gateway.hosts", "host names or addresses without ports, or *", name)
        for origin in listed(self.origins):
            if not is_origin(origin):
                raise SettingsError("gateway.origins", ORIGIN_FORM, origin)
        if bool(self.tls_certificate) != bool(self.tls_key):
            lacking = "gateway.tls_key" if self.tls_certificate else "gateway.tls_certificate"
            raise SettingsError(
                lacking, "a file: TLS needs both gateway.tls_certificate and gateway.tls_key", Shown("")
            )


@dataclass(frozen=True, slots=True)
class DurableLogSettings(Section):
    """The log of all workers' streams in a JetStream stream. An existing stream keeps its configuration."""

    address: str = text(
        "",
        0,
        1024,
        "servers and name of the log: nats://HOST:PORT/NAME (default name: log); empty: the processor keeps no log",
    )
    durable: bool = choice(
        "acknowledge an item to its worker only when it is in the log; if false, items beyond a buffer of "
        "64 MiB are dropped, and the log records the gap",
        default=False,
    )
    credentials: str = path(
        "file of this process's credentials: a .creds file, or a line with USER:PASSWORD, a token or an NKEY seed; "
        "read again when it changes; empty: none"
    )
    ca_file: str = path("CA certificates for tls:// servers; empty: those of the system")
    certificate: str = path("file of this process's certificate and key for tls:// servers; empty: none")
    replicas: int = count(1, "servers", "number of servers that store each item; at least 3 with durable", high=5)
    monitors: str = text(
        "",
        0,
        1024,
        "comma-separated HOST:PORT of the servers' monitoring, for the metric of their fill level; with durable each "
        "server must report `sync_interval: always`; empty: none",
    )
    max_bytes: int = size(1_073_741_824, "size limit of the log; the oldest items are removed")
    max_age_hours: int = count(168, "h", "age limit of an item", high=24 * 3650)

    buffer_bytes: int = 67_108_864  # unacknowledged items of a writer, and items that a reader prefetches
    message_bytes: int = 524_288  # items of a worker in one message: half of NATS's default limit

    def _check_rules(self) -> None:
        if self.durable and not self.address:
            raise SettingsError("durable_log.address", "needed with durable_log.durable", self.address)
        if self.durable and self.replicas < LEAST_REPLICAS:
            limit = f"at least {LEAST_REPLICAS} with durable_log.durable"
            raise SettingsError("durable_log.replicas", limit, self.replicas)


@dataclass(frozen=True, slots=True)
class LogSettings(Section):
    """The format and level of the logs."""

    format: Literal["auto", "json", "console"] = choice(
        "auto: readable lines on a terminal and JSON elsewhere", default="auto"
    )
    level: Literal["debug", "info", "warning", "error"] = choice("lowest level that is logged", default="info")


def _limit(name: str, unit: str, meaning: str) -> Entry:
    kind = whole(unit, meaning, low=0, high=getattr(Limits.schema(), name))
    return Entry("limits", name, int, kind, getattr(Limits.default(), name))


LIMITS = (
    _limit("max_rows", "rows", "limit of a batch"),
    _limit("max_tokens_per_row", "tokens", "limit of a row, and of the draft tokens that it verifies or proposes"),
    _limit("max_top_k", "alternatives", "limit for each token"),
)
"""The settings of the contract's limits: a deployment can only tighten the schema's limits."""

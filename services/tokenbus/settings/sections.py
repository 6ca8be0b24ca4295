"""The sections of the settings. A field without a `Meta` is a constant, whose comment explains the value."""

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
"""Minimum of durable_log.replicas if durable_log.durable is set. With three servers, one server may fail."""
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HOST = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")
ORIGIN_FORM = "the origin of a web page, such as https://app.example or http://localhost:3000"


def is_origin(text: str) -> bool:
    """Return whether a text is a web origin: a scheme, a host and optionally a port."""
    return _ORIGIN.fullmatch(text) is not None


def listed(text: str) -> tuple[str, ...]:
    """Split a comma-separated list, and convert the entries to lower case."""
    return tuple(filter(None, (part.strip().lower() for part in text.split(","))))


@dataclass(frozen=True, slots=True)
class BusSettings(Section):
    """The addresses, timeouts and keys of connections to a processor."""

    workers_address: str = endpoints(
        "tcp://127.0.0.1:5570", "address for workers; of several addresses, each worker uses one"
    )
    clients_address: str = endpoints(
        "tcp://127.0.0.1:5571", "address for clients; of several addresses, each client uses all"
    )
    heartbeat_timeout_ms: int = milliseconds(
        3000,
        "silence after which a peer is lost; the heartbeat interval is 1 s or, if shorter, a third of this time",
        low=500,
        high=HOUR_MS,
    )
    key_file: str = path("file of this process's secret key for TCP, made by `tokenbus keys make`; empty for no key")
    server_key: str = path("the processor's public key or its file, for workers and clients with a key")
    allowed_keys: str = path("file of a processor's allow-list, made by `tokenbus keys` and read again after changes")
    insecure: bool = choice(
        "allow TCP without keys beyond loopback, and a durable log without TLS or credentials beyond loopback",
        default=False,
    )

    heartbeat_ms: int = 1000  # at most a third of heartbeat_timeout_ms, so that two heartbeats may be lost
    max_part_bytes: int = 8_388_608  # size limit of a message part: the schema's largest batch
    max_pending_bytes: int = 100_663_296  # limit of unread bytes of one peer: 1.5 times a worker's credit
    max_unadmitted_bytes: int = 33_554_432  # limit of unread bytes of all peers before their hello
    max_total_pending_bytes: int = 134_217_728  # limit of all peers' unread bytes; beyond it, one peer is disconnected
    max_connections: int = 4096  # limit of connections, unless `Settings.most_connections` is higher
    introduction_timeout_ms: int = 5000  # time limit of a handshake, which takes milliseconds
    reconnect_ms: int = 100  # first pause between attempts to connect
    reconnect_max_ms: int = 500  # longest pause between attempts to connect, far below heartbeat_timeout_ms
    linger_ms: int = 1000  # time limit for sending the last frames of a closing socket
    stall_timeout_ms: int = 5000  # an event loop that is blocked for longer makes its process unhealthy
    high_water_mark: int = 4096  # limit of queued messages per peer; credit and windows are smaller

    @property
    def heartbeat_interval_ms(self) -> int:
        return min(self.heartbeat_ms, self.heartbeat_timeout_ms // 3)


@dataclass(frozen=True, slots=True)
class WorkerSettings(Section):
    """A worker: its name, role and retention."""

    id: str = text("worker-0", 1, 64, "name of the worker, unique among live workers")
    role: Literal["mixed", "prefill", "decode"] = choice(
        "part of a request that the worker computes: all, the prompt and first token, or the following tokens",
        default="mixed",
    )
    model: str = text("", 0, 256, "name of the model in requests; empty for the only model")
    retention_bytes: int = size(268_435_456, "limit of retained unacknowledged items, at least one message")
    policy: Literal["block", "shed", "fail"] = choice(
        "action when retention is full: block the engine for up to 60 s, drop alternatives, or fail requests",
        default="block",
    )
    max_requests: int = count(1024, "requests", "limit of open requests; with 0, the processor sends none", low=0)
    top_logprobs: int = count(
        0,
        "alternatives",
        "alternatives per token that vLLM's scheduler publishes; with other engines, each request chooses",
        low=0,
        high=Limits.schema().max_top_k,
    )
    routed_experts_folder: str = path("folder for the routed experts of sessions in vLLM, or empty for none")
    routed_experts_bytes: int = size(10_737_418_240, "limit of the files in routed_experts_folder")
    metrics_address: str = host_and_port("", "address of the metrics, or empty for none")
    abandon_after_ms: int = milliseconds(
        2000,
        "how long a processor may be absent before the worker gives up its requests and tries another processor",
    )
    drain_timeout_ms: int = milliseconds(
        10_000, "time limit at shutdown for requests and for acknowledgements; 0 for no wait", low=0
    )
    longest_step_ms: int = milliseconds(
        30_000,
        "longest step of the engine; a worker without progress for this plus bus.heartbeat_timeout_ms is lost",
        low=0,
        high=3_600_000,
    )

    tp_rank: int = 0  # tensor-parallel rank; set only by engines that publish from all ranks
    dp_rank: int = 0  # data-parallel rank, set by the engine
    retention_items: int = 0  # 0 means one item per 16 KiB of retention_bytes, about the size of a step
    block_timeout_ms: int = 60_000  # longest wait while retention is full: twice client.resume_timeout_ms
    publisher: Literal["auto", "thread", "process"] = "auto"  # auto means a process on Linux if the engine supports one
    shed_at: float = 0.75  # fill level of retention above which alternatives are dropped
    checksum: bool = True  # whether payloads have a CRC-32, unnecessary only within one process
    handover_items: int = 1024  # limit of steps and events in flight between the engine's and the publisher's process
    handover_bytes: int = 16_777_216  # byte limit of messages between the engine's and the publisher's process
    outbox: int = 8  # limit of unpublished batches, above which the engine's thread waits
    failed_steps: int = 3  # consecutive failed steps after which the engine counts as broken

    @property
    def most_items(self) -> int:
        return self.retention_items or self.retention_bytes // 16_384


@dataclass(frozen=True, slots=True)
class ProcessorSettings(Section):
    """The processor, and the limits of its workers and requests."""

    id: str = text("processor", 1, 48, "name of the processor; each start adds a random suffix")
    max_workers: int = count(64, "workers", "limit of connected workers", high=65536)
    metrics_address: str = host_and_port("127.0.0.1:9470", "address of the metrics, or empty for none")
    request_timeout_ms: int = milliseconds(600_000, "maximum duration of a request; a request may set less")

    drain_timeout_ms: int = 10_000  # time limit at shutdown for open requests
    max_requests: int = 65_536  # limit of open requests; gateways and workers have smaller limits
    requests_per_peer: int = 8192  # limit of open requests per client or key, and of unclaimed requests per worker
    credit_items: int = 256  # items that a worker may send ahead of the processor: some seconds of steps
    credit_bytes: int = (
        67_108_864  # bytes that a worker may send ahead of the processor: eight messages of maximum size
    )
    pending_items: int = 2048  # waiting items of a stream above which the slowest consumer is evicted
    pending_bytes: int = 134_217_728  # waiting bytes of a stream above which the slowest consumer is evicted
    step_timeout_ms: int = 2000  # time limit for missing parts of a step; ranks are milliseconds apart
    unclaimed_timeout_ms: int = 10_000  # time limit for a client to claim an unknown request by resuming
    max_open_steps: int = 16  # limit of incomplete steps of a stream; ranks are one or two steps apart
    draft_lag_steps: int = 1  # number of later steps after which a missing draft batch is given up
    replay_attempts: int = 3  # number of requests for missing items before a gap is declared
    replay_timeout_ms: int = 1000  # time limit of each request for missing items
    ended_requests: int = 65_536  # number of remembered requests, 16 bytes each, for recognizing late rows
    longest_step_ms: int = 3_600_000  # limit of the longest_step_ms that a worker may announce
    abort_timeout_ms: int = 5000  # time limit for a worker to confirm an abort: some steps
    step_queue: int = 64  # limit of delivered steps that no iterator has read; a full queue stops workers


@dataclass(frozen=True, slots=True)
class ClientsSettings(Section):
    """The limits of a processor's clients."""

    max_clients: int = count(256, "clients", "limit of connected clients", high=65536)
    buffer_bytes: int = size(
        268_435_456,
        "limit of data buffered for all clients; above it, the client with the most data loses its requests",
    )
    detached_timeout_ms: int = milliseconds(
        30_000, "how long the requests of a disconnected client wait for its return"
    )

    send_queue_bytes: int = 67_108_864  # limit of bytes buffered for one client: a quarter of buffer_bytes
    send_queue_frames: int = 16_384  # limit of frames buffered for one client


@dataclass(frozen=True, slots=True)
class ClientSettings(Section):
    """A client of the processor, such as the gateway."""

    name: str = text("client", 1, 64, "name of the client in logs, not necessarily unique")
    resume_timeout_ms: int = milliseconds(30_000, "how long open requests wait for an absent processor")

    continue_after_ms: int = 2000  # silence after which requests continue at another processor: two heartbeats
    drain_timeout_ms: int = 5000  # time limit at shutdown for requests that are being iterated
    window_frames: int = 64  # limit of unacknowledged frames
    window_bytes: int = 16_777_216  # limit of unacknowledged bytes, except for a single larger frame
    request_buffer_rows: int = 4096  # limit of rows that wait for the iterator of a request
    max_requests: int = 65_536  # limit of open requests, the same as a processor's


@dataclass(frozen=True, slots=True)
class GatewaySettings(Section):
    """The gateway: its addresses, access rules, and the limits of its HTTP clients."""

    address: str = host_and_port("127.0.0.1:8000", "HTTP address", may_be_empty=False)
    reuse_port: bool = choice(
        "let several gateways with this setting listen on the same address; the kernel balances the connections",
        default=False,
    )
    metrics_address: str = host_and_port("", "another address for metrics, or empty for none")
    insecure: bool = choice("allow addresses beyond loopback without gateway.keys_file", default=False)
    keys_file: str = path(
        "file of the API keys, made by `tokenbus api-keys` and read again after changes; empty if no key is required"
    )
    control: bool = choice(
        "allow clients without an API key to pause engines and change their weights through vLLM's routes (API keys "
        "need --operator instead); in a processor, allow clients without a bus key to do so",
        default=False,
    )
    key_requests_per_minute: int = count(
        0,
        "requests",
        "default limit of an API key, and limit of all clients without a key; 0 for no limit",
        low=0,
        high=MOST_REQUESTS_PER_MINUTE,
    )
    tls_certificate: str = path("PEM file of the certificate chain, read again after changes; empty for no TLS")
    tls_key: str = path("PEM file of the certificate's private key, without a password")
    hosts: str = path(
        "comma-separated host names of the gateway, in addition to localhost, the host of gateway.address and its IP "
        "addresses, or `*` for any; without keys_file, requests for other names get status 421"
    )
    origins: str = path(
        "comma-separated origins of other web pages that may use the gateway, such as https://app.example; pages of "
        "other origins get status 403"
    )
    models: str = path(
        "comma-separated names of the allowed models and LoRA adapters; if empty, the workers' models, with "
        "`tokenbus` for any model"
    )
    tokenizer: str = text(
        "ngram",
        1,
        4096,
        "tokenizer of the workers' engine: `ngram`, `bytes` (for paddle), the name of another installed tokenizer, the "
        "path of a model's folder (with a slash), or `numbers`, which shows ids",
    )
    chat_template: Literal["auto", "text", "roles"] = choice(
        "how messages become a prompt: `auto` uses the model's template or else `text`, `text` joins the plain "
        "texts, `roles` puts roles before texts",
        default="auto",
    )
    tool_call_parser: Literal["", "hermes", "llama3_json", "pythonic"] = choice(
        "format of the model's tool calls, by vLLM's name; empty to parse none", default=""
    )
    bridge_turns: str = text(
        "",
        0,
        64,
        "model family of the package `renderers`, such as `qwen3`; a session's prompts then begin with the last turn's "
        "ids; if empty, prompts are encoded from messages",
    )
    return_tokens_as_token_ids: bool = choice(
        "in logprobs, name tokens by their ids, such as `token_id:5`, unless a request says otherwise", default=False
    )
    request_id_headers: bool = choice(
        "send `x-request-id` with every response: an answer's id on the bus, or else the id of the request or a new id",
        default=False,
    )
    force_include_usage: bool = choice("send the current usage with every chunk of every stream", default=False)
    max_requests: int = count(
        1024,
        "requests",
        "limit of open requests, with each choice as one; further requests get status 429",
    )
    max_prompt_tokens: int = count(131_072, "tokens", "limit of a prompt; longer prompts get status 400", high=2**20)
    buffer_bytes: int = size(268_435_456, "limit of data buffered for all clients; above it, the largest answer fails")
    compression: Literal["off", "gzip"] = choice(
        "compress answers to clients that accept gzip: less network traffic, more CPU time", default="off"
    )
    drain_timeout_ms: int = milliseconds(10_000, "time limit at shutdown for open requests; 0 for no wait", low=0)

    key_share: float = 0.5  # part of max_requests that an API key without its own limit may use
    max_connections: int = 0  # 0 means four times max_requests, which allows for idle connections
    request_timeout_ms: int = 10_000  # time limit for receiving the headers, and again for receiving the body
    idle_timeout_ms: int = 60_000  # time limit of a connection without a request
    max_tokens: int = 1_048_576  # limit of max_tokens in a request; no model has such a long context
    max_body_bytes: int = 4_194_304  # limit of a body, enough for the longest prompt as ids or text
    encoding_time_ms: int = 2000  # CPU time limit for one body: ten times the time for the longest prompt
    encoding_memory_bytes: int = 134_217_728  # memory limit for one body, enforced only on Linux
    stream_buffer_bytes: int = 1_048_576  # limit of bytes buffered for a slow client: some thousand events
    answer_bytes: int = 67_108_864  # limit of an answer that is not streamed: a quarter of buffer_bytes
    bridge_bytes: int = 67_108_864  # byte limit of stored turns of sessions: about 500 turns of 32,000 tokens
    write_timeout_ms: int = 10_000  # a client that reads nothing for this long is disconnected
    max_text_bytes: int = 1_048_576  # limit of a prompt's text as rendered by a template; a token has about 4 bytes
    max_choices: int = 128  # limit of prompts times n per answer, as in OpenAI's API
    max_header_bytes: int = 16_384  # limit of the headers; other servers allow 8 to 64 KiB
    retry_after_ms: int = 1000  # time before a retry, sent to clients with status 429 and 503
    bus_timeout_ms: int = 1000  # time limit for the processor's status in /bus and /readyz

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
    """The durable log, a JetStream stream with the items of all workers. An existing stream keeps its configuration."""

    address: str = text(
        "",
        0,
        1024,
        "servers and name of the log as nats://HOST:PORT/NAME (default name: log); empty for no log",
    )
    durable: bool = choice(
        "acknowledge items to workers only when they are in the log; if false, items beyond a buffer of 64 MiB are "
        "dropped, and the log records the gap",
        default=False,
    )
    credentials: str = path(
        "file of this process's credentials, read again after changes: a .creds file, or a line with USER:PASSWORD, a "
        "token or an NKEY seed; empty for none"
    )
    ca_file: str = path("CA certificates for tls:// servers; empty for the system's")
    certificate: str = path("file of this process's certificate and key for tls:// servers; empty for none")
    replicas: int = count(1, "servers", "number of servers that store each item; at least 3 with durable", high=5)
    monitors: str = text(
        "",
        0,
        1024,
        "comma-separated HOST:PORT of the servers' monitoring, for the metric of their fill level; with `durable`, "
        "each server must report `sync_interval: always`; empty for none",
    )
    max_bytes: int = size(1_073_741_824, "size limit of the log; the oldest items are removed")
    max_age_hours: int = count(168, "h", "age limit of an item", high=24 * 3650)

    buffer_bytes: int = 67_108_864  # limit of a writer's unacknowledged items, and of a reader's prefetched items
    message_bytes: int = 524_288  # size limit of a message with a worker's items: half of NATS's default limit

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
        "`auto` means readable lines on a terminal and JSON elsewhere", default="auto"
    )
    level: Literal["debug", "info", "warning", "error"] = choice("lowest level that is logged", default="info")


def _limit(name: str, unit: str, meaning: str) -> Entry:
    kind = whole(unit, meaning, low=0, high=getattr(Limits.schema(), name))
    return Entry("limits", name, int, kind, getattr(Limits.default(), name))


LIMITS = (
    _limit("max_rows", "rows", "limit of a batch"),
    _limit("max_tokens_per_row", "tokens", "limit of a row's tokens, and of its verified and proposed draft tokens"),
    _limit("max_top_k", "alternatives", "limit of alternatives per token"),
)
"""The settings of the contract's limits, which can only be lower than the schema's limits."""

"""The settings of the gateway: what it serves, to whom, and what it holds for them."""

import re
from dataclasses import dataclass
from typing import Literal

from tokenbus_services.settings.errors import SettingsError, Shown
from tokenbus_services.settings.kinds import (
    Section,
    choice,
    count,
    flag,
    host_and_port,
    milliseconds,
    path,
    share,
    size,
    text,
)

MOST_REQUESTS_PER_MINUTE = 10_000_000
_ORIGIN = re.compile(r"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HOST = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")


@dataclass(frozen=True, slots=True)
class GatewaySettings(Section):
    """The gateway, and what it holds for its HTTP clients."""

    section = "gateway"

    address: str = host_and_port("127.0.0.1:8000", "where it serves HTTP; port 0: any free one; it cannot be empty")
    metrics_address: str = host_and_port(
        "", "where it serves its metrics too, on a thread of their own; port 0: any; empty: nowhere"
    )
    insecure: bool = flag("whether it serves more than loopback addresses without gateway.keys_file", default=False)
    keys_file: str = path(
        "",
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
        "", "the file of the certificate and its chain, in PEM, read again when it changes; empty: no TLS"
    )
    tls_key: str = path("", "the file of the certificate's private key, in PEM, without a password")
    hosts: str = path(
        "",
        "the names by which clients may call it, without ports and with commas between, beside localhost, the host "
        "of gateway.address and the IP address that they connected to; others get status 421",
    )
    origins: str = path(
        "",
        "the origins of web pages that may use it, as https://app.example, with commas between; its own page "
        "always may; others get status 403",
    )
    models: str = path(
        "",
        "the models that may be asked for, as workers name them, with commas between; empty: whatever workers "
        "there are, as the one model `tokenbus`",
    )
    tokenizer: str = text(
        "ngram",
        1,
        64,
        "the tokenizer of the workers' engine: `ngram`, `bytes` (paddle's), that of another installed package, or "
        "`numbers`: each token's text is its id",
    )
    chat_template: Literal["text", "roles"] = choice(
        "text",
        ("text", "roles"),
        "what becomes of a chat's messages: their texts alone, or each with its role's name before it",
    )
    max_requests: int = count(
        1024, "requests", "the most that are open at once, each choice of an answer one; others get status 429"
    )
    max_choices: int = count(128, "choices", "the most of one answer: its prompts times n", high=1024)
    max_connections: int = count(4096, "connections", "the most at once; others get status 503")
    max_body_bytes: int = size(4_194_304, "the largest body of a request; a larger one gets status 413")
    max_header_bytes: int = count(
        16_384, "bytes", "the most of a request's line and headers; more gets status 431", low=256, high=2**20
    )
    request_timeout_ms: int = milliseconds(
        10_000, "how long a request's headers and body may take to arrive, each; then status 408"
    )
    idle_timeout_ms: int = milliseconds(60_000, "how long a connection may stay open without a request")
    max_prompt_tokens: int = count(131_072, "tokens", "the most of a prompt; more gets status 400", high=2**20)
    max_tokens: int = count(1_048_576, "tokens", "the most that a request may ask for")
    stream_buffer_bytes: int = size(
        1_048_576, "the most that waits for a client that reads too slowly; then its request ends"
    )
    buffer_bytes: int = size(
        268_435_456, "the most that waits for all clients together, and before them; then the largest answer ends first"
    )
    answer_bytes: int = size(
        67_108_864, "the most that is collected for an answer that is not streamed; then its request ends"
    )
    write_timeout_ms: int = milliseconds(
        10_000, "how long a client may take nothing of what waits for it; then it is cut off"
    )
    retry_after_ms: int = milliseconds(1000, "the Retry-After of status 429 and 503")
    bus_timeout_ms: int = milliseconds(
        1000, "how long the processor may take to tell its status, which /bus and /readyz ask for"
    )
    drain_timeout_ms: int = milliseconds(
        10_000, "how long a stopping gateway waits for its open requests; 0: not at all", low=0
    )

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


ORIGIN_FORM = "the origin of a web page, as https://app.example or http://localhost:3000"


def is_origin(text: str) -> bool:
    """Return whether a text is a web page's origin: a scheme, a host and perhaps a port, and nothing else."""
    return _ORIGIN.fullmatch(text) is not None


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas between, in lower case."""
    return tuple(filter(None, (part.strip().lower() for part in text.split(","))))

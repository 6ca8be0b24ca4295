"""tokenbus gateway: OpenAI's API and Anthropic's over HTTP, and the inspector, until a signal."""

import argparse
from contextlib import AbstractAsyncContextManager

from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.errors import CommandError
from tokenbus.cli.serving import serve
from tokenbus.settings import Settings

_DESCRIPTION = """\
Serve OpenAI's API (/v1/completions, /v1/chat/completions, /v1/responses, /v1/models), Anthropic's (/v1/messages), and
for token ids vLLM's (/inference/v1/generate) in front of a processor, and at / a page with tokens coloured by
probability. The processor need not be there yet; /readyz tells when requests find a worker. Once it listens it logs
"listening". After SIGTERM or SIGINT it takes no new request, lets the open ones end for gateway.drain_timeout_ms, and
leaves with status 0; a second signal ends it at once.

examples:
  tokenbus gateway                                                       at http://127.0.0.1:8000
  tokenbus gateway --address 127.0.0.1:8080 --clients-address ipc:///run/tokenbus/clients.sock
  tokenbus gateway --set gateway.reuse_port=true --metrics-address 127.0.0.1:9101      one of several at one port

settings that matter: gateway.*, bus.clients_address (of several processors, with commas between: docs/scaling.md),
bus.key_file and bus.server_key (docs/security.md), limits.max_top_k. It needs the extra gateway.
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    declare_settings(
        parser,
        {
            "--address": "gateway.address",
            "--models": "gateway.models",
            "--tokenizer": "gateway.tokenizer",
            "--clients-address": "bus.clients_address",
            "--metrics-address": "gateway.metrics_address",
        },
    )


def run(options: argparse.Namespace) -> int:
    """Run a gateway until a signal."""
    return serve(options, _gateway)


def _gateway(settings: Settings) -> AbstractAsyncContextManager[object]:
    try:
        from tokenbus.gateway.server import serve_gateway  # noqa: PLC0415 - its libraries are an extra
    except ModuleNotFoundError as error:
        raise CommandError(f"the gateway needs {error.name}: install the extra, tokenbus[gateway]") from None
    return serve_gateway(settings)

"""tokenbus gateway."""

import argparse
from contextlib import AbstractAsyncContextManager

from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.errors import CommandError
from tokenbus.cli.serving import serve
from tokenbus.settings import Settings

_DESCRIPTION = """\
Serve HTTP in front of a processor: OpenAI's API (/v1/completions, /v1/chat/completions, /v1/responses, /v1/models),
Anthropic's (/v1/messages), vLLM's API for token ids (/inference/v1/generate), and at / a page that colours tokens by
probability. The gateway can start before the processor; /readyz succeeds once a worker can take requests. It logs
"listening" when it is ready. On SIGTERM or SIGINT it refuses new requests, waits up to gateway.drain_timeout_ms for the
open ones, and exits with status 0; a second signal ends it at once.

examples:
  tokenbus gateway                                               at http://127.0.0.1:8000
  tokenbus gateway --address 127.0.0.1:8080 --clients-address ipc:///run/tokenbus/clients.sock
  tokenbus gateway --set gateway.reuse_port=true --metrics-address 127.0.0.1:9101     one of several on one port

main settings: gateway.*, bus.clients_address (a comma-separated list for several processors), bus.key_file,
bus.server_key, limits.max_top_k. It needs the extra `gateway`: pip install 'tokenbus[gateway]'.
"""


def declare(parser: argparse.ArgumentParser) -> None:
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
    return serve(options, _gateway)


def _gateway(settings: Settings) -> AbstractAsyncContextManager[object]:
    try:
        from tokenbus.gateway.server import serve_gateway  # noqa: PLC0415 - its libraries are an extra
    except ModuleNotFoundError as error:
        extra = "pip install 'tokenbus[gateway]', or in a clone '.[gateway]'"
        raise CommandError(f"the gateway needs {error.name}: {extra}") from None
    return serve_gateway(settings)

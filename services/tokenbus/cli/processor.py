"""tokenbus processor."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.serving import serve
from tokenbus.metrics.processor import serve_processor
from tokenbus.processor import Processor
from tokenbus.settings import Settings

_DESCRIPTION = """\
Receive tokens from workers at one address and requests from clients at another. Each request gets its tokens once and
in order, or an error that says what was lost. The processor logs "listening" when it is ready. On SIGTERM or SIGINT it
waits up to 10 s for open requests and exits with status 0; a second signal ends it at once. After a crash and a restart
nothing is lost: workers resend everything that was not acknowledged.

examples:
  tokenbus processor                                     on this machine, at the default ports
  tokenbus processor --workers-address ipc:///run/tokenbus/workers.sock --clients-address tcp://127.0.0.1:5571
  tokenbus processor --workers-address 'tcp://*:5570' --set bus.key_file=keys/processor.key_secret \\
    --set bus.allowed_keys=keys/allowed.toml             for other machines; `tokenbus keys` makes the keys

main settings: bus.* (addresses, keys), limits.* (size of a batch), processor.*, clients.* (slow clients).
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    declare_settings(
        parser,
        {
            "--id": "processor.id",
            "--workers-address": "bus.workers_address",
            "--clients-address": "bus.clients_address",
            "--metrics-address": "processor.metrics_address",
        },
    )


def run(options: argparse.Namespace) -> int:
    return serve(options, _processor)


@asynccontextmanager
async def _processor(settings: Settings) -> AsyncIterator[None]:
    processor = Processor(settings)
    # Begin serving metrics before the processor starts, and stop after the processor has drained.
    async with serve_processor(processor), processor:
        yield

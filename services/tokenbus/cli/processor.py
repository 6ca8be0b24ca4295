"""tokenbus processor: takes workers and clients until a signal."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.serving import serve
from tokenbus.metrics.processor import serve_processor
from tokenbus.processor import Processor
from tokenbus.settings import Settings

_DESCRIPTION = """\
Take the streams of workers at one address and the requests of clients at another, and deliver each request its tokens
once and in order, or an error that says what was lost. Once it listens it logs "listening". It leaves with status 0
after SIGTERM or SIGINT, when the open requests have ended or 10 s are over; a second signal ends it at once. Killed
and started again, it loses nothing: workers send again what it had not acknowledged. Workers that know several
processors go to another one when this one ends (docs/scaling.md).

examples:
  tokenbus processor                                                     on this machine, at the default ports
  tokenbus processor --workers-address ipc:///run/tokenbus/workers.sock --clients-address tcp://127.0.0.1:5571
  tokenbus processor --workers-address 'tcp://*:5570' --set bus.key_file=keys/processor.key_secret \\
    --set bus.allowed_keys=keys/allowed.toml                             where other machines reach it: docs/security.md

settings that matter: bus.* (addresses, keys), limits.* (the most of a batch), processor.*, clients.* (slow clients).
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
    """Run a processor until a signal."""
    return serve(options, _processor)


@asynccontextmanager
async def _processor(settings: Settings) -> AsyncIterator[None]:
    processor = Processor(settings)
    # Its metrics are served from before it listens until it has drained, so that both can be watched.
    async with serve_processor(processor), processor:
        yield

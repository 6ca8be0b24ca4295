"""tokenbus worker: an engine in a process of its own, until a signal stops it."""

import argparse
import math
from functools import partial

from tokenbus.cli.arguments import Parser
from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.engines import declare_engine, load_engine_settings, made
from tokenbus.cli.errors import CommandError
from tokenbus.worker import EngineBrokenError, NotRunningError
from tokenbus.worker.run import run_engine

_DESCRIPTION = """\
Run an engine, take requests from the processor and publish every step. The processor need not be there yet: the worker
finds it, and finds it again. It logs "worker started" once the engine is ready, and "connected" when a processor has
accepted it. After SIGTERM or SIGINT it takes no new request, finishes those it has as fast as it can, waits until all
is acknowledged, and exits with status 0; each of the two waits is bounded by worker.drain_timeout_ms. A second signal
ends it at once.

examples:
  tokenbus worker --id worker-2 --workers-address ipc:///run/tokenbus/workers.sock --steps-per-second 200
  tokenbus worker --role prefill --id prefill-0 --speculate 4
  tokenbus worker --engine vllm --model /models/qwen -- --max-num-seqs 64 --enforce-eager
  tokenbus worker --settings tokenbus.toml --set worker.policy=shed

settings that matter: bus.workers_address (of several processors, with commas between: docs/scaling.md), bus.key_file
and bus.server_key (docs/security.md), worker.id (one for each live worker), worker.role,
worker.max_requests, worker.retention_bytes and worker.policy (what happens when retention is full), limits.*.
"""


def declare(parser: Parser) -> None:
    """Declare the options; the chosen engine's are declared once it is known which that is."""
    parser.description = _DESCRIPTION
    declare_engine(parser, has_options=True)
    parser.add_argument(
        "--steps-per-second",
        type=_rate,
        default=0.0,
        metavar="X",
        help="the most steps that begin in a second; 0, the default: as many as the engine can",
    )
    declare_settings(
        parser,
        {
            "--id": "worker.id",
            "--role": "worker.role",
            "--model": "worker.model",
            "--workers-address": "bus.workers_address",
            "--metrics-address": "worker.metrics_address",
        },
    )


def run(options: argparse.Namespace) -> int:
    """Run a worker until a signal."""
    settings = load_engine_settings(options)
    try:
        run_engine(
            partial(made, options, settings), settings, name=options.engine, steps_per_second=options.steps_per_second
        )
    except (EngineBrokenError, NotRunningError) as error:
        raise CommandError(str(error)) from None
    return 0


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise argparse.ArgumentTypeError(f"a number of at least 0, got {text!r}")
    return rate

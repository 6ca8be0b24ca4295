"""tokenbus worker."""

import argparse
from functools import partial

from tokenbus.cli.arguments import Parser, whole
from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.engines import create_engine, declare_engine, load_engine_settings
from tokenbus.cli.errors import CommandError
from tokenbus.worker import EngineBrokenError, NotRunningError
from tokenbus.worker.run import run_engine

_DESCRIPTION = """\
Run an engine, take requests from the processor and publish every step. The worker can start before the processor, and
reconnects when the processor restarts. It logs "worker started" when the engine is ready, and "connected" when a
processor has accepted it. On SIGTERM or SIGINT it refuses new requests, finishes the open ones at full speed, waits for
the acknowledgement of every step, and exits with status 0. Each of the two waits takes at most worker.drain_timeout_ms.
A second signal ends it at once.

examples:
  tokenbus worker --id worker-2 --workers-address ipc:///run/tokenbus/workers.sock --steps-per-second 200
  tokenbus worker --role prefill --id prefill-0 --speculate 4
  tokenbus worker --engine vllm --model /models/qwen -- --max-num-seqs 64 --enforce-eager
  tokenbus worker --settings tokenbus.toml --set worker.policy=shed

main settings: worker.id (unique among live workers), worker.role, worker.max_requests, worker.retention_bytes and
worker.policy (for the moment when retention is full), bus.workers_address (a comma-separated list for several
processors), bus.key_file, bus.server_key, limits.*.
"""


def declare(parser: Parser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--steps-per-second",
        type=whole(0),
        default=0,
        metavar="N",
        help="limit the steps per second (default: 0, no limit)",
    )
    declare_settings(
        parser,
        {
            "--id": "worker.id",
            "--role": "worker.role",
            "--workers-address": "bus.workers_address",
            "--metrics-address": "worker.metrics_address",
        },
    )
    declare_engine(parser, has_options=True)


def run(options: argparse.Namespace) -> int:
    settings = load_engine_settings(options)
    try:
        run_engine(
            partial(create_engine, options, settings),
            settings,
            name=options.engine,
            steps_per_second=options.steps_per_second,
        )
    except (EngineBrokenError, NotRunningError) as error:
        raise CommandError(str(error)) from None
    return 0

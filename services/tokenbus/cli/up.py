"""tokenbus up."""

import argparse
import asyncio
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from tokenbus.cli.arguments import Parser, whole
from tokenbus.cli.configuration import declare_settings
from tokenbus.cli.engines import declare_engine, load_engine_settings
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.supervisor import START_SECONDS, Child, ServiceEvent, Supervisor
from tokenbus.cli.system import Plan, plan_for, runtime_folder
from tokenbus.cli.terminal import Progress, styled
from tokenbus.printable import printable
from tokenbus.worker import engine_kind

_DESCRIPTION = """\
Start a processor, workers and gateways on this machine, each in its own process, and print how to use them. A service
that dies is reported and not restarted; the others continue as long as requests can be answered. Ctrl-C (or SIGTERM)
stops everything in order and leaves nothing behind; a second Ctrl-C kills the remaining services. Closing the terminal
also stops everything. The status is 1 if a service died or did not start.

A mixed worker computes whole requests. A prefill worker computes the prompt and the first token, then a decode worker
takes over, so there must be both or neither.

examples:
  tokenbus up                                       one worker of each role, with the engine ngram
  tokenbus up --engine paddle --workers 2 --prefill 0 --decode 0
  tokenbus up --engine vllm --model models/qwen -- --max-model-len 4096       with vLLM's own options
  tokenbus up --decode 3 --port 9000                the gateway on this port; an error if it is taken
  tokenbus up --gateways 4                          four gateway processes on one port
  tokenbus up --json | jq .event      started, ready, waiting, up, log, output, ended, useless, stopping, down

Every service gets all settings. Main settings: worker.drain_timeout_ms and gateway.drain_timeout_ms (time limits for
stopping), bus.workers_address and bus.clients_address (set them to let other machines in), limits.*.
"""
_MOST_WORKERS = 1_000_000
_MOST_GATEWAYS = 64
_MOST_PORT = 65_535
_MOST_START_SECONDS = 86_400
_READY_SECONDS, _SOON = 0.25, 8
"""Number of seconds between readiness checks, and number of failed checks before the reason is shown."""


def declare(parser: Parser) -> None:
    find_spec("tokenbus.processor")  # raises PythonVersionError on Python 3.10
    parser.description = _DESCRIPTION
    declare_engine(parser, has_options=False)
    parser.add_argument("--workers", type=whole(0, _MOST_WORKERS), default=1, metavar="N", help="mixed workers (1)")
    for role in ("prefill", "decode"):
        meaning = f"{role} workers (1; 0 with an engine that reads a model's folder)"
        parser.add_argument(f"--{role}", type=whole(0, _MOST_WORKERS), metavar="N", help=meaning)
    parser.add_argument(
        "--gateways", type=whole(0, _MOST_GATEWAYS), default=1, metavar="N", help="gateways on one port (1)"
    )
    parser.add_argument(
        "--port",
        type=whole(1, _MOST_PORT),
        metavar="N",
        help="the gateways' port (default: that of gateway.address, or any free port if it is taken)",
    )
    parser.add_argument(
        "--start-seconds",
        type=whole(1, _MOST_START_SECONDS),
        default=START_SECONDS,
        metavar="N",
        help=f"how long a starting service may be silent before it counts as failed ({START_SECONDS})",
    )
    parser.add_argument("--json", action="store_true", help="print each event as a JSON object")
    declare_settings(parser, {"--metrics-address": "processor.metrics_address"})


def run(options: argparse.Namespace) -> int:
    settings = load_engine_settings(options)
    kind, model = engine_kind(options.engine), options.model
    if kind.reads_model and not (model and model.is_dir()):
        raise CommandError(f"--model: the folder of the model, got {model or 'none'}", WRONG_USE)
    ranks = kind.ranks(getattr(options, "rest", ()))
    if options.port is not None and not options.gateways:
        raise CommandError("--port: only with a gateway, got --gateways 0", WRONG_USE)
    default = 0 if kind.reads_model else 1
    decode, prefill = (default if given is None else given for given in (options.decode, options.prefill))
    roles = {"mixed": options.workers * len(ranks), "decode": decode, "prefill": prefill}
    _check_counts(roles, settings.processor.max_workers)
    with runtime_folder() as folder:
        plan = plan_for(
            settings,
            folder,
            engine=options.engine,
            roles=roles,
            gateways=options.gateways,
            port=options.port,
            model=model,
            ranks=ranks,
        )
        return asyncio.run(_run(plan, folder, Screen(as_json=options.json), options.start_seconds))


async def _run(plan: Plan, folder: Path, screen: "Screen", start_seconds: float) -> int:
    screen.system = system = Supervisor(plan.services, folder, screen.service, start_seconds)
    await system.run(partial(_serve, plan, system, screen))
    if screen.failure is not None:
        raise screen.failure
    died = system.died
    screen.tell("down", "everything has stopped" + (f"; failed: {', '.join(died)}" if died else ""), died=died)
    return 1 if died else 0


async def _serve(plan: Plan, system: Supervisor, screen: "Screen") -> None:
    watching = asyncio.create_task(_show(plan, system, screen))
    try:
        while system.runs("processor") and system.runs("mixed", "prefill"):
            await system.next_exit()
        screen.tell("useless", "no request can be answered any more: stopping the remaining services")
    except asyncio.CancelledError:
        screen.tell("stopping", "stopping; a second signal kills the remaining services")
        raise
    finally:
        watching.cancel()


async def _show(plan: Plan, system: Supervisor, screen: "Screen") -> None:
    """Wait until the gateway can answer requests, and print that the system is up."""
    gateway = _gateway(system.children)
    last_shown, checks = "", 0
    while (problem := await asyncio.to_thread(_problem, gateway)) is not None:
        checks += 1
        if problem != last_shown and checks > _SOON:
            last_shown = problem
            screen.tell("waiting", f"waiting: {printable(problem)}")
        await asyncio.sleep(_READY_SECONDS)
    if screen.as_json:
        screen.put(json.dumps(_up_event(plan, system.children, gateway)))
    else:
        screen.put("\n".join(_up_lines(plan, system.children, gateway)))


def _problem(gateway: str) -> str | None:
    """Return why the gateway cannot answer requests yet, or None if it can."""
    if not gateway.startswith("http://"):  # no gateway, or HTTPS with an unknown certificate
        return None
    try:
        urlopen(f"{gateway}/readyz").close()  # noqa: S310 - http only
    except HTTPError as error:
        with error:
            return "; ".join(json.load(error).get("problems", ["no worker takes requests"]))
    except OSError:
        return "the gateway does not answer"
    return None


def _gateway(children: Sequence[Child]) -> str:
    return next((child.address for child in children if child.service.arguments[0] == "gateway"), "")


class Screen:
    """Prints events as text or JSON. If standard output fails, the system stops."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.failure: OSError | None = None
        self.progress = Progress()
        self.system: Supervisor | None = None

    def service(self, event: ServiceEvent) -> None:
        """Print an event of a service. The event `starting` appears only as progress."""
        if event.event == "starting":
            if not self.as_json and self.failure is None:
                self.progress.show(f"{event.service:11} {printable(event.text)}")
            return
        if self.as_json:
            values = {"line": event.values} if event.event == "log" else event.values
            self.put(json.dumps({"event": event.event, "service": event.service, "text": event.text, **values}))
        else:
            text = "\n".join(f"{event.service:11} {printable(line)}" for line in event.text.splitlines())
            self.put(styled(text, "red") if event.is_error else text)

    def tell(self, event: str, text: str, **values: Any) -> None:  # noqa: ANN401 - any JSON value
        """Print an event of the whole system."""
        self.put(json.dumps({"event": event, "text": text, **values}) if self.as_json else text)

    def put(self, text: str) -> None:
        """Print a text. If printing fails, stop the system."""
        if self.failure is not None:
            return
        try:
            self.progress.clear()
            print(text, flush=True)
        except OSError as error:  # the terminal or the reader of the pipe is gone
            self.failure = error
            if self.system is not None:
                self.system.stopping.set()


def _up_event(plan: Plan, children: Sequence[Child], gateway: str) -> dict[str, Any]:
    return {
        "event": "up",
        "pid": os.getpid(),
        "gateway": gateway or None,
        "clients_address": plan.settings.bus.clients_address,
        "workers_address": plan.settings.bus.workers_address,
        "services": [
            {"name": child.name, "pid": child.pid, "state": child.state, "metrics": child.metrics or None}
            for child in children
        ],
    }


def _up_lines(plan: Plan, children: Sequence[Child], gateway: str) -> Iterator[str]:
    bus = plan.settings.bus
    yield f"\n{styled('Tokenbus is up', 'bold')}\n"
    for child in children:
        where = f"{child.metrics}/metrics" if child.metrics else ""
        yield f"  {child.name:11} {child.state:7} process {child.pid:<8} {where}".rstrip()
    yield ""
    if gateway:
        yield f"  look    {gateway}/"
        yield f"  HTTP    curl {gateway}/v1/completions -H 'content-type: application/json' \\"
        asked = {"model": plan.model, "prompt": "The old man", "max_tokens": 16, "logprobs": 3}
        yield f"            -d {shlex.quote(json.dumps(asked))}"
    ask = ["tokenbus", "ask", "--clients-address", bus.clients_address, "--tokenizer", plan.settings.gateway.tokenizer]
    yield f"  ask     {shlex.join([*ask, 'The old man'])}"
    yield f"  watch   tokenbus tap --rows --clients-address {bus.clients_address}"
    command, *options = next(service for service in plan.services if service.arguments[0] == "worker").arguments
    added = [command, "--id", "more-0", "--workers-address", bus.workers_address, *options]
    yield f"  add     tokenbus {shlex.join(added)}"
    yield "  stop    Ctrl-C\n"


def _check_counts(roles: Mapping[str, int], most: int) -> None:
    total = sum(roles.values())
    if bool(roles["prefill"]) != bool(roles["decode"]):
        given = f"--prefill {roles['prefill']} and --decode {roles['decode']}"
        raise CommandError(f"prefill and decode workers: some of both, or neither, got {given}", WRONG_USE)
    if not 1 <= total <= most:
        raise CommandError(f"workers: 1 to {most} in all (processor.max_workers), got {total}", WRONG_USE)

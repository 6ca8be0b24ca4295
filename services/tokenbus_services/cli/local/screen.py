"""Screen: what happens to a system, as lines for people or as JSON for machines."""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenbus_contracts.generated.client_pb2 import ProcessorStatus
from tokenbus_services.cli.local.plan import Plan, gateway_lacks
from tokenbus_services.cli.local.supervisor import Child, News
from tokenbus_services.printable import printable
from tokenbus_services.terminal import Progress, styled


class Screen:
    """Prints what happens, as lines for people or as JSON, until its output can no longer be written."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.failure: OSError | None = None
        self.progress = Progress()
        self.on_failure: Callable[[], object] = lambda: None

    def news(self, news: News) -> None:
        """Print what happened to a service."""
        if self.as_json:
            values = {"line": news.values} if news.event == "log" else news.values
            self.put(json.dumps({"event": news.event, "service": news.service, "text": news.text, **values}))
        else:
            text = f"{news.service:11} {printable(news.text)}"
            self.put(styled(text, "red") if news.is_bad else text)

    def tell(self, event: str, text: str, **values: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """Print what happened to the whole system."""
        self.put(json.dumps({"event": event, "text": text, **values}) if self.as_json else text)

    def put(self, text: str) -> None:
        """Print, unless that has failed before."""
        if self.failure is not None:
            return
        try:
            self.progress.clear()
            print(text, flush=True)
        except OSError as error:  # the terminal or the reader is gone; the services must still be stopped
            self.failure = error
            self.on_failure()


def described(plan: Plan, children: Sequence[Child]) -> dict[str, Any]:
    """Return where everything is, for machines."""
    return {
        "event": "up",
        "pid": os.getpid(),
        "gateway": f"http://{plan.gateway_address}" if plan.gateway_address else None,
        "clients_address": plan.settings.bus.clients_address,
        "workers_address": plan.settings.bus.workers_address,
        "services": [
            {"name": child.name, "pid": child.pid, "state": child.state, "metrics": child.metrics or None}
            for child in children
        ],
    }


def shown(plan: Plan, children: Sequence[Child]) -> Iterator[str]:
    """Yield the lines that say where everything is, and how to use it."""
    bus, gateway = plan.settings.bus, plan.gateway_address
    yield f"\n{styled('Tokenbus is up', 'bold')}\n"
    for child in children:
        where = f"{child.metrics}/metrics" if child.metrics else ""
        yield f"  {child.name:11} {child.state:7} process {child.pid:<8} {where}".rstrip()
    yield ""
    if gateway:
        yield f"  look    http://{gateway}/"
        yield f"  ask     curl http://{gateway}/v1/completions -H 'content-type: application/json' \\"
        asked = {"model": plan.model, "prompt": "The old man", "max_tokens": 16, "logprobs": 3}
        yield f"            -d {shlex.quote(json.dumps(asked))}"
    else:
        yield f"  no gateway: {gateway_lacks()} is not installed"
    yield f"  watch   tokenbus tap --rows --clients-address {bus.clients_address}"
    command, *options = next(service for service in plan.services if service.arguments[0] == "worker").arguments
    added = [command, "--id", "more-0", "--workers-address", bus.workers_address, *options]
    yield f"  add     tokenbus {shlex.join(added)}"
    yield "  stop    Ctrl-C\n"


def status_line(status: ProcessorStatus, tokens_per_second: float) -> str:
    """Return a processor's status as a line."""
    return (
        f"{status.open_requests} open requests, {status.finished_requests:,} finished, {status.failed_requests:,} "
        f"failed, {status.tokens:,} tokens, {tokens_per_second:,.0f} a second, {status.gaps} gaps"
    )

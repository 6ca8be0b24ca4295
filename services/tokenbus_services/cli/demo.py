"""tokenbus demo: a whole system started, sent requests, checked against the truth, measured and stopped."""

import argparse
import asyncio
import io
import json
import time
from dataclasses import replace
from pathlib import Path

from tokenbus_services.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus_services.cli.demo_checks import (
    RATE_REQUESTS,
    ask,
    computed,
    differing,
    http_answer,
    rates,
    requests,
)
from tokenbus_services.cli.demo_report import Outcome, sample
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.local import News, Plan, Supervisor, plan_for
from tokenbus_services.cli.local.plan import gateway_address
from tokenbus_services.cli.local.runtime import runtime_folder
from tokenbus_services.cli.local.signals import until_signal
from tokenbus_services.client import Client
from tokenbus_services.logs import configure
from tokenbus_services.settings import Settings
from tokenbus_services.terminal import Progress, styled

_DESCRIPTION = """\
Start a processor, a mixed, a prefill and a decode worker with the engine ngram, and a gateway, as processes of their
own on this machine; ask 200 requests at once and show how they come; show one answer, each token coloured by its
probability; compare every answer, bit by bit, with what the same request gives in an engine without any bus; measure
tokens a second with and without logprobs; stop everything. It takes less than a minute and leaves nothing behind. The
status is 0 if every token was right, else 1. `tokenbus up` starts the same and leaves it running.

Colours appear on a terminal, unless NO_COLOR is set.

examples:
  tokenbus demo
  tokenbus demo --json | jq .tokens_per_second
"""
_REQUESTS, _TOKENS = 200, 96
_MOST_SECONDS = 120.0
_STATUS_SECONDS = 10.0
_INTERRUPTED = 130
_BAR = 30
_SAMPLE_TOKENS = 60
_AHEAD = 65_536
"""More frames than any round of the demo has tokens."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON document")
    declare_settings(parser, {})


def run(options: argparse.Namespace) -> int:
    """Show it; return 1 if any token was wrong, or anything did not go as it should."""
    settings = load_settings(options)
    logs = io.StringIO()  # of this process, which is a client; shown if it fails
    configure(replace(settings.log, level="warning"), logs)
    with reporting_faults(), runtime_folder() as folder:
        plan = plan_for(
            _of_the_demo(settings, folder),
            folder,
            engine="ngram",
            mixed=1,
            prefill=1,
            decode=1,
            gateway_address=gateway_address(settings, None),
        )
        return asyncio.run(_shown(plan, folder, _Show(logs, is_silent=options.json)))


def _of_the_demo(settings: Settings, folder: Path) -> Settings:
    return replace(
        settings,
        # A refused message would be a failure of the demo; it is not kept in the user's current folder.
        dead_letters=replace(settings.dead_letters, directory=str(folder / "dead-letters")),
        # On a busy machine the engines run far ahead of the client, which must not be evicted for that.
        clients=replace(settings.clients, send_queue_frames=max(_AHEAD, settings.clients.send_queue_frames)),
        processor=replace(settings.processor, pending_items=max(_AHEAD, settings.processor.pending_items)),
    )


class _Show:
    """Prints what people see; for machines it prints one document at the end."""

    def __init__(self, logs: io.StringIO, *, is_silent: bool) -> None:
        self.logs = logs
        self.is_silent = is_silent
        self.progress = Progress()
        self.troubles: list[News] = []

    def line(self, text: str = "") -> None:
        if not self.is_silent:
            self.progress.clear()
            print(text, flush=True)

    def title(self, text: str) -> None:
        self.line(styled(text, "bold"))

    def news(self, news: News) -> None:
        if news.event in ("log", "ended"):
            self.troubles.append(news)

    def bar(self, done: int, of: int, rest: str) -> None:
        self.progress.show(lambda: _bar(done, of, rest))


def _bar(done: int, of: int, rest: str) -> str:
    return f"   [{('#' * (_BAR * done // of)).ljust(_BAR, '.')}] {done}/{of} {rest}"


async def _shown(plan: Plan, folder: Path, show: _Show) -> int:
    system = Supervisor(plan.services, folder, show.news)
    status = await until_signal(system, _bounded(plan, system, show))
    return _INTERRUPTED if status is None else status


async def _bounded(plan: Plan, system: Supervisor, show: _Show) -> int:
    begin = time.monotonic()
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            show.title("1. Start")
            async with system:
                names = [child.name for child in system.children]
                show.line(f"   {len(names)} processes in {time.monotonic() - begin:.1f} s: {', '.join(names)}")
                outcome = await _while_all_live(plan, system, show)
    except TimeoutError:
        (last,) = show.logs.getvalue().splitlines()[-1:] or [""]
        raise CommandError(f"not done after {_MOST_SECONDS:g} s{': ' if last else ''}{last}") from None
    finally:
        show.progress.clear()
    for news in show.troubles:
        show.line(styled(f"   {news.service}: {news.text}", "red" if news.is_bad else "bold"))
    seconds = time.monotonic() - begin
    ok = outcome.is_good and not system.died
    if show.is_silent:
        troubles = [f"{news.service}: {news.text}" for news in show.troubles]
        print(json.dumps(outcome.values | {"ok": ok, "troubles": troubles, "all_seconds": round(seconds, 1)}, indent=2))
    verdict = styled("every token was right", "green") if ok else styled("something was WRONG, see above", "red")
    show.line(f"\nAll stopped after {seconds:.0f} s: {verdict}. `tokenbus up` starts the same and leaves it running.")
    return 0 if ok else 1


async def _while_all_live(plan: Plan, system: Supervisor, show: _Show) -> Outcome:
    """Return what was found, unless a service dies before."""
    showing, ending = asyncio.create_task(_show_all(plan, show)), asyncio.create_task(system.one_ended())
    try:
        await asyncio.wait([showing, ending], return_when=asyncio.FIRST_COMPLETED)
        if showing.done():
            return showing.result()
        dead = ending.result()
        raise CommandError(f"{dead.name} {dead.how_it_ended} in the middle of the demo{dead.last_line}")
    finally:
        ending.cancel()
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show_all(plan: Plan, show: _Show) -> Outcome:
    settings = replace(plan.settings, client=replace(plan.settings.client, drain_timeout_ms=0))
    async with Client(settings) as client:
        show.title(f"2. {_REQUESTS} requests at once, up to {_TOKENS} tokens each, with 5 alternatives a token")
        wanted = requests(_REQUESTS, _TOKENS)
        results = await ask(client, wanted, lambda ended, tokens: show.bar(ended, _REQUESTS, f"{tokens:,} tokens"))
        done = sum(not answer.error for answer in results.answers)
        show.line(_bar(done, _REQUESTS, f"{results.tokens:,} tokens in {results.seconds:.2f} s"))
        status = await client.status(timeout_seconds=_STATUS_SECONDS)

        show.title("3. One of the answers, each token with its probability")
        for line in sample(max(results.answers, key=lambda answer: min(answer.tokens, _SAMPLE_TOKENS))):
            show.line(line)
        front = await http_answer(plan.gateway_address, settings.limits)
        show.line()
        show.line("   no gateway was started: the extra gateway is not installed" if front is None else front.line())

        show.title(
            f"4. Rates, {RATE_REQUESTS} requests at once: medians of rounds in turns, and their lowest and highest"
        )
        found = await rates(client, lambda number, of: show.bar(number, of, "rounds"))
        truth = await asyncio.to_thread(computed, wanted, settings.limits)
        by_worker = {worker.worker_id: worker.tokens for worker in status.workers}
        wrong = differing(results.answers, truth)
        outcome = Outcome(results, wrong, found, by_worker, front)
        for line in outcome.rate_lines():
            show.line(line)
        show.title("5. Summary")
        for line in outcome.summary_lines():
            show.line(line)
    return outcome

"""tokenbus demo: a whole system started, sent requests, checked against the truth, measured and stopped."""

import argparse
import asyncio
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from tokenbus_services.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus_services.cli.demo_checks import (
    AHEAD,
    MODES,
    RATE_REQUESTS,
    Answer,
    Answers,
    ask,
    computed,
    differing,
    http_fault,
    rates,
    requests,
)
from tokenbus_services.cli.errors import CommandError
from tokenbus_services.cli.supervisor import News, Supervisor
from tokenbus_services.cli.system import Plan, plan_for, runtime_folder
from tokenbus_services.client import Client
from tokenbus_services.logs import configure
from tokenbus_services.plugins import load_tokenizer
from tokenbus_services.printable import printable
from tokenbus_services.settings import Settings
from tokenbus_services.terminal import Progress, styled

_DESCRIPTION = """\
Start a processor, a mixed, a prefill and a decode worker with the engine ngram, and a gateway, as processes of their
own on this machine; ask 200 requests at once; show how one answer begins, each token with its probability; compare
every answer, bit by bit, with what the same request gives in an engine without any bus; measure tokens a second with
and without logprobs; stop everything. It takes less than a minute and leaves nothing behind. The status is 0 if every
token was right, else 1. `tokenbus up` starts the same and leaves it running.

examples:
  tokenbus demo
  tokenbus demo --json | jq .tokens_per_second
"""
_REQUESTS, _TOKENS = 200, 96
_MOST_SECONDS = 120.0
_STATUS_SECONDS = 10.0
_INTERRUPTED = 130
_SAMPLE_TOKENS, _ALTERNATIVES, _WIDTH = 6, 3, 14
_END = "(end)"
"""The token that ends a text has no letters."""
_IDS_ONLY = next(iter(MODES))


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
        plan = plan_for(of_the_demo(settings, folder), folder, engine="ngram", mixed=1, prefill=1, decode=1)
        return asyncio.run(_run(plan, folder, logs, as_json=options.json))


def of_the_demo(settings: Settings, folder: Path) -> Settings:
    """Return the settings that the demo's services run with."""
    return replace(
        settings,
        # A refused message would be a failure of the demo; it is not kept in the user's current folder.
        dead_letters=replace(settings.dead_letters, directory=str(folder / "dead-letters")),
        # On a busy machine the engines run far ahead of the client, which must not be evicted for that.
        clients=replace(settings.clients, send_queue_frames=max(AHEAD, settings.clients.send_queue_frames)),
        processor=replace(settings.processor, pending_items=max(AHEAD, settings.processor.pending_items)),
    )


async def _run(plan: Plan, folder: Path, logs: io.StringIO, *, as_json: bool) -> int:
    begin, progress = time.monotonic(), Progress()
    troubles: list[News] = []

    def say(text: str) -> None:
        if not as_json:
            progress.clear()
            print(text, flush=True)

    def news(news: News) -> None:
        if news.event in ("log", "ended"):
            troubles.append(news)

    system = Supervisor(plan.services, folder, news)
    say(styled("1. Start", "bold"))
    try:
        outcome = await system.run(partial(_while_all_live, plan, system, progress, say))
    except TimeoutError:
        (last,) = logs.getvalue().splitlines()[-1:] or [""]
        raise CommandError(f"not done after {_MOST_SECONDS:g} s{': ' if last else ''}{last}") from None
    finally:
        progress.clear()
    if outcome is None:
        return _INTERRUPTED
    for each in troubles:
        say(styled(f"   {each.service}: {each.text}", "red" if each.is_bad else "bold"))
    ok, seconds = outcome.is_good and not system.died, time.monotonic() - begin
    if as_json:
        told = [f"{each.service}: {each.text}" for each in troubles]
        print(json.dumps(outcome.values | {"ok": ok, "troubles": told, "all_seconds": round(seconds, 1)}, indent=2))
    verdict = styled("every token was right", "green") if ok else styled("something was WRONG, see above", "red")
    say(f"\nAll stopped after {seconds:.0f} s: {verdict}. `tokenbus up` starts the same and leaves it running.")
    return 0 if ok else 1


async def _while_all_live(plan: Plan, system: Supervisor, progress: Progress, say: Callable[[str], None]) -> "Outcome":
    """Return what was found, unless a service dies before, or it takes too long."""
    say(f"   {len(system.children)} processes: {', '.join(child.name for child in system.children)}")
    gateway = next((child.address for child in system.children if child.name == "gateway"), "")
    showing = asyncio.ensure_future(_show_all(plan.settings, gateway, progress, say))
    ending = asyncio.ensure_future(system.one_ended())
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            await asyncio.wait([showing, ending], return_when=asyncio.FIRST_COMPLETED)
        if showing.done():
            return showing.result()
        dead = ending.result()
        raise CommandError(f"{dead.name} {dead.how_it_ended} in the middle of the demo{dead.last_line}")
    finally:
        ending.cancel()
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show_all(settings: Settings, gateway: str, progress: Progress, say: Callable[[str], None]) -> "Outcome":
    def title(text: str) -> None:
        say(styled(text, "bold"))

    async with Client(replace(settings, client=replace(settings.client, drain_timeout_ms=0))) as client:
        title(f"2. {_REQUESTS} requests at once, up to {_TOKENS} tokens each, with 5 alternatives a token")
        wanted = requests(_REQUESTS, _TOKENS)
        results = await ask(
            client, wanted, lambda ended, tokens: progress.show(lambda: f"{ended} ended, {tokens:,} tokens")
        )
        done = sum(not answer.error for answer in results.answers)
        say(f"   {done}/{_REQUESTS}, {results.tokens:,} tokens in {results.seconds:.2f} s")
        status = await client.status(timeout_seconds=_STATUS_SECONDS)
        title("3. How one of the answers begins, each token with its probability")
        say("\n".join(sample(max(results.answers, key=lambda answer: answer.tokens))))
        title(f"4. Rates, {RATE_REQUESTS} requests at once: medians of rounds in turns")
        found = await rates(client)
        truth = await asyncio.to_thread(computed, wanted, settings.limits)
        outcome = Outcome(
            results,
            differing(results.answers, truth),
            found,
            {worker.worker_id: worker.tokens for worker in status.workers},
            await http_fault(gateway, settings.limits) if gateway else None,
        )
        say("\n".join(outcome.rate_lines()))
        title("5. Summary")
        say("\n".join(outcome.summary_lines()))
    return outcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was counted, checked and measured."""

    results: Answers
    differing: int
    """How many answers are not what the same request gives without a bus."""
    rates: Mapping[str, Sequence[float]]
    tokens_by_worker: Mapping[str, int]
    http_fault: str | None = None
    """What is wrong with the gateway's answer; empty: nothing; None: no gateway was started."""

    @property
    def lost(self) -> int:
        """Tokens that did not come."""
        return sum(answer.lost for answer in self.results.answers)

    @property
    def repeated(self) -> int:
        """Tokens that came twice."""
        return sum(answer.repeated for answer in self.results.answers)

    @property
    def errors(self) -> list[str]:
        """The errors that requests ended with."""
        return [answer.error for answer in self.results.answers if answer.error]

    @property
    def heads(self) -> list[tuple[int, int]]:
        """How many tokens of each head that drafted were verified, and how many of those accepted."""
        rows = [row for answer in self.results.answers for row in answer.rows if row.token_ids.size]
        most = max((row.draft_token_count for row in rows), default=0)
        return [
            (
                sum(head <= row.draft_token_count for row in rows),
                # The last token of a row is the target's own.
                sum(head <= min(row.token_ids.size - 1, row.draft_token_count) for row in rows),
            )
            for head in range(1, most + 1)
        ]

    @property
    def is_good(self) -> bool:
        """Whether every request had exactly its tokens, the one by HTTP too."""
        return not (self.lost or self.repeated or self.errors or self.differing or self.http_fault)

    @property
    def values(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        verified, accepted = (sum(counts) for counts in zip((0, 0), *self.heads, strict=True))
        return {
            "ok": self.is_good,
            "requests": len(self.results.answers),
            "tokens": self.results.tokens,
            "seconds": round(self.results.seconds, 3),
            "tokens_by_worker": dict(self.tokens_by_worker),
            "acceptance": {
                "verified": verified,
                "accepted": accepted,
                "share": round(accepted / verified, 4) if verified else None,
                "by_head": [round(taken / seen, 4) for seen, taken in self.heads],
            },
            "check": {
                "truth": "the same requests and seeds in an engine without a bus, compared bit by bit",
                "lost": self.lost,
                "repeated": self.repeated,
                "differing_requests": self.differing,
                "errors": self.errors,
                "http": None if self.http_fault is None else not self.http_fault,
            },
            "tokens_per_second": {
                name: {"median": round(median(each)), "lowest": round(min(each)), "highest": round(max(each))}
                for name, each in self.rates.items()
            },
            "share_of_rate_without_logprobs": {name: round(self._share(name), 4) for name in self.rates},
        }

    def _share(self, name: str) -> float:
        return median(self.rates[name]) / median(self.rates[_IDS_ONLY])

    def rate_lines(self) -> Iterator[str]:
        """Yield a line for each way to ask."""
        for name, each in self.rates.items():
            spread = f"({min(each):,.0f} to {max(each):,.0f})"
            yield f"   {name:8} {median(each):>9,.0f} tokens/s  {self._share(name):>5.0%}  {spread}"

    def summary_lines(self) -> Iterator[str]:
        """Yield the summary's lines, without the rates."""
        count, acceptance = len(self.results.answers), self.values["acceptance"]
        by_worker = ", ".join(f"{name} {tokens:,}" for name, tokens in self.tokens_by_worker.items())
        yield f"   tokens      {self.results.tokens:,} for {count} requests; by worker: {by_worker}"
        if acceptance["verified"]:  # no draft, no rate
            by_head = ", ".join(f"{share:.0%}" for share in acceptance["by_head"])
            counts = f"{acceptance['accepted']:,} of {acceptance['verified']:,} draft tokens"
            yield f"   acceptance  {counts}, {acceptance['share']:.0%}; by head: {by_head}"
        else:
            yield "   acceptance  no draft was made"
        if self.lost or self.repeated or self.errors:
            wrong = f"{self.lost} LOST, {self.repeated} REPEATED, {len(self.errors)} requests FAILED"
            yield styled(f"   order       {wrong}", "red")
        else:
            yield styled("   order       no token lost, none repeated, all in order", "green")
        if self.differing:
            wrong = f"{self.differing} of {count} answers DIFFER from those of an engine without a bus"
            yield styled(f"   truth       {wrong}", "red")
        else:
            same = "ids, logprobs, ranks and alternatives are, bit by bit, those of an engine without a bus"
            yield styled(f"   truth       {count} of {count} answers: {same}", "green")
        if self.http_fault is None:
            yield "   http        no gateway was started: the extra gateway is not installed"
        else:
            yield styled(f"   http        {self.http_fault or 'the same text'}", "red" if self.http_fault else "green")
        yield from (styled(f"   error       {error}", "red") for error in self.errors[:3])


def sample(answer: Answer) -> Iterator[str]:
    """Yield a table of an answer's first tokens: probability, rank, and what else was likely."""
    tokenizer = load_tokenizer("ngram")

    def text(token_id: int) -> str:
        return repr(printable(tokenizer.token_bytes(int(token_id)).decode(errors="replace")) or _END)

    yield f"   {answer.generate.text.text}"
    yield f"   {'token':{_WIDTH}} probability  rank  instead"
    places = ((row, place) for row in answer.rows for place in range(row.token_ids.size))
    for row, place in islice(places, _SAMPLE_TOKENS):
        token_id = row.token_ids[place]
        others = zip(row.alternative_token_ids[place], row.alternative_logprobs[place].tolist(), strict=True)
        instead = [f"{text(other)} {math.exp(value):.1%}" for other, value in others if other != token_id]
        probability = f"{math.exp(float(row.logprobs[place])):.1%}"
        likely = ", ".join(instead[:_ALTERNATIVES])
        yield f"   {text(token_id):{_WIDTH}} {probability:>11} {row.ranks[place]:>5}  {likely}"

"""tokenbus demo: a whole system started, sent requests, checked against the truth, measured and stopped."""

import argparse
import asyncio
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from tokenbus.cli.configuration import declare_settings, load_settings, reporting_faults
from tokenbus.cli.demo_checks import (
    MODES,
    RATE_REQUESTS,
    Answer,
    Truth,
    acceptance,
    ask,
    computed,
    differing,
    http_fault,
    rates,
    requests,
)
from tokenbus.cli.errors import CommandError
from tokenbus.cli.supervisor import News, Supervisor
from tokenbus.cli.system import Plan, plan_for, runtime_folder
from tokenbus.cli.terminal import Progress, styled
from tokenbus.client import Client
from tokenbus.logs import configure
from tokenbus.plugins import load_tokenizer
from tokenbus.printable import printable
from tokenbus.settings import Settings

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
Found = dict[str, Any]
"""Everything that was counted, checked and measured, as JSON holds it."""


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
        plan = plan_for(settings, folder, engine="ngram", mixed=1, prefill=1, decode=1)
        return asyncio.run(_run(plan, folder, logs, as_json=options.json))


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
        found = await system.run(partial(_while_all_live, plan, system, progress, say))
    except TimeoutError:
        (last,) = logs.getvalue().splitlines()[-1:] or [""]
        raise CommandError(f"not done after {_MOST_SECONDS:g} s{': ' if last else ''}{last}") from None
    finally:
        progress.clear()
    if found is None:
        return _INTERRUPTED
    for each in troubles:
        say(styled(f"   {each.service}: {each.text}", "red" if each.is_bad else "bold"))
    ok, seconds = found["ok"] and not system.died, time.monotonic() - begin
    if as_json:
        told = [f"{each.service}: {each.text}" for each in troubles]
        print(json.dumps(found | {"ok": ok, "troubles": told, "all_seconds": round(seconds, 1)}, indent=2))
    verdict = styled("every token was right", "green") if ok else styled("something was WRONG, see above", "red")
    say(f"\nAll stopped after {seconds:.0f} s: {verdict}. `tokenbus up` starts the same and leaves it running.")
    return 0 if ok else 1


async def _while_all_live(plan: Plan, system: Supervisor, progress: Progress, say: Callable[[str], None]) -> Found:
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


async def _show_all(settings: Settings, gateway: str, progress: Progress, say: Callable[[str], None]) -> Found:
    async with Client(replace(settings, client=replace(settings.client, drain_timeout_ms=0))) as client:
        say(
            styled(f"2. {_REQUESTS} requests at once, up to {_TOKENS} tokens each, with 5 alternatives a token", "bold")
        )
        wanted = requests(_REQUESTS, _TOKENS)
        answers, seconds = await ask(client, wanted, progress)
        done, tokens = sum(not answer.error for answer in answers), sum(answer.tokens for answer in answers)
        say(f"   {done}/{_REQUESTS}, {tokens:,} tokens in {seconds:.2f} s")
        status = await client.status(timeout_seconds=_STATUS_SECONDS)
        say(styled("3. How one of the answers begins, each token with its probability", "bold"))
        say("\n".join(sample(max(answers, key=lambda answer: answer.tokens))))
        say(styled(f"4. Rates, {RATE_REQUESTS} requests at once: medians of rounds, their lowest and highest", "bold"))
        measured = await rates(client)
        truth = await asyncio.to_thread(computed, wanted, settings.limits)
        found = judged(answers, truth, measured, await http_fault(gateway, settings.limits) if gateway else None)
        found |= {
            "seconds": round(seconds, 3),
            "tokens_by_worker": {worker.worker_id: worker.tokens for worker in status.workers},
        }
        say("\n".join(rate_lines(found)))
        say(styled("5. Summary", "bold"))
        say("\n".join(summary_lines(found)))
    return found


def judged(answers: Sequence[Answer], truth: Truth, rates: Mapping[str, Sequence[float]], http: str | None) -> Found:
    """Return everything as JSON holds it; `http` is the fault of the answer by HTTP, None without a gateway."""
    heads = acceptance(answers)
    verified, accepted = sum(seen for seen, _ in heads), sum(taken for _, taken in heads)
    check = {
        "lost": sum(answer.lost for answer in answers),
        "repeated": sum(answer.repeated for answer in answers),
        "differing_requests": differing(answers, truth),
        "errors": [answer.error for answer in answers if answer.error],
        "http": None if http is None else http or "right",
    }
    base = median(rates[_IDS_ONLY])
    return {
        "ok": not any(value for value in check.values() if value != "right"),
        "requests": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "acceptance": {
            "verified": verified,
            "accepted": accepted,
            "share": round(accepted / verified, 4) if verified else None,
            "by_head": [round(taken / seen, 4) for seen, taken in heads],
        },
        "check": check,
        "tokens_per_second": {
            name: {"median": round(median(each)), "lowest": round(min(each)), "highest": round(max(each))}
            for name, each in rates.items()
        },
        "share_of_rate_without_logprobs": {name: round(median(each) / base, 4) for name, each in rates.items()},
    }


def rate_lines(found: Found) -> Iterator[str]:
    """Yield a line for each way to ask."""
    for name, rate in found["tokens_per_second"].items():
        share, spread = found["share_of_rate_without_logprobs"][name], f"({rate['lowest']:,} to {rate['highest']:,})"
        yield f"   {name:8} {rate['median']:>9,} tokens/s  {share:>5.0%}  {spread}"


def summary_lines(found: Found) -> Iterator[str]:
    """Yield the summary's lines, without the rates."""
    count, check, acceptance = found["requests"], found["check"], found["acceptance"]
    by_worker = ", ".join(f"{name} {tokens:,}" for name, tokens in found.get("tokens_by_worker", {}).items())
    yield f"   tokens      {found['tokens']:,} for {count} requests; by worker: {by_worker}"
    if acceptance["verified"]:  # no draft, no rate
        by_head = ", ".join(f"{share:.0%}" for share in acceptance["by_head"])
        counts = f"{acceptance['accepted']:,} of {acceptance['verified']:,} draft tokens"
        yield f"   acceptance  {counts}, {acceptance['share']:.0%}; by head: {by_head}"
    else:
        yield "   acceptance  no draft was made"
    lost, repeated, errors = check["lost"], check["repeated"], check["errors"]
    is_whole, same = not (lost or repeated or errors), not check["differing_requests"]
    order = f"{lost} LOST, {repeated} REPEATED, {len(errors)} requests FAILED"
    yield _verdict("order", is_whole, "no token lost, none repeated, all in order", order)
    truth = f"{count} of {count} answers: ids, logprobs, ranks and alternatives are, bit by bit, those of an engine"
    differ = f"{check['differing_requests']} of {count} answers DIFFER from those of an engine without a bus"
    yield _verdict("truth", same, f"{truth} without a bus", differ)
    by_http = check["http"] or "no gateway was started: the extra gateway is not installed"
    yield _verdict("http", check["http"] in (None, "right"), by_http, by_http)
    yield from (styled(f"   error       {error}", "red") for error in errors[:3])


def _verdict(name: str, is_right: bool, right: str, wrong: str) -> str:  # noqa: FBT001
    return styled(f"   {name:10}  {right if is_right else wrong}", "green" if is_right else "red")


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

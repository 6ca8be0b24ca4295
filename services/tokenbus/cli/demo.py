"""tokenbus demo: a whole system started, asked, two of its processes killed, every token checked, and stopped."""

import argparse
import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.cli.errors import CommandError
from tokenbus.cli.supervisor import News, Supervisor
from tokenbus.cli.system import Plan, plan_for, runtime_folder
from tokenbus.cli.terminal import Progress, styled
from tokenbus.client import Client
from tokenbus.delivery import RequestFailedError
from tokenbus.logs import configure
from tokenbus.plugins import load_tokenizer
from tokenbus.printable import printable
from tokenbus.settings import Settings
from tokenbus.worker import StepAssembler, engine_kind
from tokenbus_contracts import BatchKind, Limits, Row
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt

_DESCRIPTION = """\
Start a processor, a mixed, a prefill and a decode worker with the engine ngram, and a gateway, as processes of their
own on this machine; ask 200 requests at once; kill a worker in the middle, then the processor, and start each again;
show how one answer begins, each token with its probability; compare every answer, bit by bit, with what the same
request gives in an engine without any bus; stop everything. It takes some seconds and leaves nothing behind. The status
is 0 if every token was right, else 1. `tokenbus up` starts the same and leaves it running.

examples:
  tokenbus demo
  tokenbus demo --json | jq .ok
"""
_PROMPTS = (
    "In the evening the old man said",
    "The harbour was",
    "She opened the door and",
    "It rained all night, so",
    "In the morning the ships",
)
_REQUESTS, _TOKENS, _TOP_LOGPROBS = 200, 96, 5
_KILLS = {"mixed-0": 1000, "processor": 5000}
"""After how many tokens each service is killed: so few that most requests are open."""
_STEPS_PER_SECOND = 60
"""As a large model has. At full speed this one is done before it can be killed."""
_LOOK_SECONDS = 0.01
_MOST_SECONDS = 120.0
_INTERRUPTED = 130
_SAMPLE_TOKENS, _ALTERNATIVES, _WIDTH = 6, 3, 14
_END = "(end)"
"""The token that ends a text has no letters."""
_COLUMNS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
Truth = dict[int, list[Row]]
"""The rows of each request, by its key, from an engine without a bus."""
Found = dict[str, Any]
"""Everything that was counted and checked, as JSON holds it."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON document")
    declare_settings(parser, {})


def run(options: argparse.Namespace) -> int:
    """Show it; return 1 if any token was wrong, or anything did not go as it should."""
    settings = load_settings(options)
    configure(replace(settings.log, level="error"))  # that the processor goes away is no news
    with runtime_folder() as folder:
        pace = _STEPS_PER_SECOND
        plan = plan_for(settings, folder, engine="ngram", mixed=1, prefill=1, decode=1, steps_per_second=pace)
        return asyncio.run(_run(plan, folder, as_json=options.json))


async def _run(plan: Plan, folder: Path, *, as_json: bool) -> int:
    begin, progress = time.monotonic(), Progress()
    troubles: list[str] = []

    def say(text: str) -> None:
        if not as_json:
            progress.clear()
            print(text, flush=True)

    def hear(news: News) -> None:
        if news.is_bad:
            troubles.append(f"{news.service}: {news.text}")

    system = Supervisor(plan.services, folder, hear)
    say(styled("1. Start", "bold"))
    try:
        found = await system.run(partial(_while_all_live, plan, system, progress, say))
    finally:
        progress.clear()
    if found is None:
        return _INTERRUPTED
    for each in troubles:
        say(styled(f"   {each}", "red"))
    ok, seconds = found["ok"] and not system.died, time.monotonic() - begin
    if as_json:
        print(json.dumps(found | {"ok": ok, "troubles": troubles, "all_seconds": round(seconds, 1)}, indent=2))
    verdict = styled("every token was right", "green") if ok else styled("something was WRONG, see above", "red")
    say(f"\nAll stopped after {seconds:.0f} s: {verdict}. `tokenbus up` starts the same and leaves it running.")
    return 0 if ok else 1


async def _while_all_live(plan: Plan, system: Supervisor, progress: Progress, say: Callable[[str], None]) -> Found:
    say(f"   {len(system.children)} processes: {', '.join(child.name for child in system.children)}")
    showing = asyncio.ensure_future(_show_all(plan.settings, system, progress, say))
    ending = asyncio.ensure_future(system.one_ended())
    try:
        await asyncio.wait([showing, ending], timeout=_MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if showing.done():
            return showing.result()
        if not ending.done():
            raise CommandError(f"not done after {_MOST_SECONDS:g} s")
        dead = ending.result()
        raise CommandError(f"{dead.name} {dead.how_it_ended} in the middle of the demo{dead.last_line}")
    finally:
        ending.cancel()
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show_all(settings: Settings, system: Supervisor, progress: Progress, say: Callable[[str], None]) -> Found:
    wanted = requests(_REQUESTS, _TOKENS)
    answers = [Answer(generate) for generate in wanted]
    open_at: dict[str, int] = {}
    say(styled(f"2. {_REQUESTS} requests at once, up to {_TOKENS} tokens each, with 5 alternatives a token", "bold"))
    async with Client(replace(settings, client=replace(settings.client, drain_timeout_ms=0))) as client:
        asking = asyncio.gather(*(_ask(client, answer) for answer in answers))
        try:
            for service, tokens in _KILLS.items():
                await _show_tokens(answers, progress, asking, tokens)
                open_at[service] = sum(not answer.is_done for answer in answers)
                say(f"   {service} is killed (kill -9) with {open_at[service]} requests open, and started again")
                await system.restart(service)
            await _show_tokens(answers, progress, asking)
            await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    truth = await asyncio.to_thread(computed, wanted, settings.limits)
    found = {"open_at_the_kill": open_at, **judged(answers, truth)}
    say(styled("3. How one of the answers begins, each token with its probability", "bold"))
    say("\n".join(sample(max(answers, key=lambda answer: answer.position))))
    say(styled("4. Summary", "bold"))
    say("\n".join(summary_lines(found)))
    return found


async def _show_tokens(
    answers: Sequence["Answer"], progress: Progress, asking: "asyncio.Future[Any]", most: float = math.inf
) -> None:
    """Show how many tokens have come, until there are `most` or all requests have ended."""
    while not asking.done() and sum(answer.position for answer in answers) < most:
        progress.show(lambda: f"{sum(answer.position for answer in answers):,} tokens")
        await asyncio.sleep(_LOOK_SECONDS)


@dataclass(slots=True)
class Answer:
    """One request's rows as they came, and what was wrong with their order."""

    generate: Generate
    rows: list[Row] = field(default_factory=list)
    position: int = 0
    """The next token's, if none is lost and none comes twice."""
    lost: int = 0
    repeated: int = 0
    turns: int = 1
    """How many workers computed it one after the other, as the one before was lost."""
    error: str = ""
    is_done: bool = False

    def take(self, row: Row) -> None:
        """Add the next row."""
        self.lost += max(0, row.position - self.position)
        self.repeated += max(0, self.position - row.position)
        self.position = row.position + row.token_ids.size
        self.rows.append(row)


def requests(count: int, tokens: int) -> list[Generate]:
    """Return so many requests for up to so many tokens, each with a seed of its own: the true answers are known."""
    return [
        Generate(
            request_id=number + 1,
            text=TextPrompt(text=_PROMPTS[number % len(_PROMPTS)]),
            sampling=SamplingParameters(max_tokens=tokens, temperature=0.8, seed=number + 10),
            top_logprobs=_TOP_LOGPROBS,
        )
        for number in range(count)
    ]


async def _ask(client: Client, answer: Answer) -> None:
    try:
        generation = client.generate(answer.generate)
        async for row in generation.rows():
            answer.take(row)
        answer.turns = len(generation.turns)
    except RequestFailedError as error:
        answer.error = str(error)
    answer.is_done = True


def computed(wanted: Sequence[Generate], limits: Limits) -> Truth:
    """Return each request's rows, by its key: with one seed the engine gives the same numbers wherever it runs."""
    kind, parser = engine_kind("ngram"), argparse.ArgumentParser()
    kind.declare(parser)
    engine = kind.make(parser.parse_args([]), Settings(limits=limits))
    assembler = StepAssembler(limits, engine.vocabulary_size)
    for generate in wanted:
        engine.admit(generate)
    rows: Truth = defaultdict(list)
    while engine.has_work:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                if batch.header.kind is BatchKind.TARGET:
                    for row in batch.rows():
                        rows[row.key].append(row)
    return rows


def differing(answers: Sequence[Answer], truth: Truth) -> int:
    """Return how many answers are not, bit by bit, what they must be: ids, logprobs, ranks and alternatives."""
    return sum(not _same(answer.rows, truth.get(answer.generate.request_id, [])) for answer in answers)


def _same(came: Sequence[Row], true: Sequence[Row]) -> bool:
    ends = [rows[-1].status if rows else None for rows in (came, true)]
    return ends[0] == ends[1] and all(_joined(came, name) == _joined(true, name) for name in _COLUMNS)


def _joined(rows: Sequence[Row], column: str) -> bytes:
    parts = [np.asarray(getattr(row, column)).ravel() for row in rows if row.token_ids.size]
    return np.concatenate(parts).tobytes() if parts else b""


def judged(answers: Sequence[Answer], truth: Truth) -> Found:
    """Return what is wrong with the answers, if anything is."""
    wrong = {
        "lost": sum(answer.lost for answer in answers),
        "repeated": sum(answer.repeated for answer in answers),
        "differing_requests": differing(answers, truth),
        "errors": [answer.error for answer in answers if answer.error],
    }
    tokens = sum(row.token_ids.size for answer in answers for row in answer.rows)
    moved = sum(answer.turns > 1 for answer in answers)
    return {"ok": not any(wrong.values()), "requests": len(answers), "tokens": tokens, "continued": moved, **wrong}


def summary_lines(found: Found) -> Iterator[str]:
    """Yield the summary's lines."""
    count, lost, repeated, errors = found["requests"], found["lost"], found["repeated"], found["errors"]
    yield f"   tokens      {found['tokens']:,}, of {count - len(errors)} of {count} requests"
    yield f"   continued   {found['continued']} of these went on at another worker"
    order = f"{lost} LOST, {repeated} REPEATED, {len(errors)} requests FAILED"
    yield _verdict("order", not (lost or repeated or errors), "no token lost, none repeated, all in order", order)
    truth = f"{count} of {count} answers: ids, logprobs, ranks and alternatives are, bit by bit, those of an engine"
    differ = f"{found['differing_requests']} of {count} answers DIFFER from those of an engine without a bus"
    yield _verdict("truth", not found["differing_requests"], f"{truth} without a bus", differ)
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

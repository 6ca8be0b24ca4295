"""tokenbus demo."""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tokenbus.cli.configuration import declare_settings, load_settings
from tokenbus.cli.errors import CommandError
from tokenbus.cli.supervisor import ServiceEvent, Supervisor
from tokenbus.cli.system import Plan, plan_for, runtime_folder
from tokenbus.cli.terminal import Progress, styled
from tokenbus.cli.values import text_of, token_text
from tokenbus.client import Client, Token
from tokenbus.client.tokens import Turn
from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.step import TokenLists
from tokenbus.logs import configure
from tokenbus.plugins import load_tokenizer
from tokenbus.printable import printable
from tokenbus.settings import Settings
from tokenbus.worker import StepAssembler, engine_kind
from tokenbus_contracts import BatchKind, Limits, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt

_DESCRIPTION = """\
Start a processor, and a mixed, a prefill and a decode worker with the engine ngram, each in its own process. Send 200
requests at once. Kill a worker while it answers, then the processor, and restart each. Print the beginning of one
answer, each token with its logprob. Compare every answer, bit by bit, with the output of an engine without a bus. Stop
everything. The demo takes some seconds and leaves nothing behind. The status is 0 if every token was right, else 1.
`tokenbus up` starts such a system, with a gateway, and keeps it running.
"""
_PROMPTS = (
    "In the evening the old man said",
    "The harbour was",
    "She opened the door and",
    "It rained all night, so",
    "In the morning the ships",
)
_REQUESTS, _TOKENS, _TOP_LOGPROBS = 200, 96, 5
_WORKER, _WORKER_TOKENS = "mixed-0", 300
"""The demo kills this worker as soon as the worker's open requests have this number of tokens."""
_ALL_TOKENS = 5000
"""The demo kills the processor after this total number of tokens, when most requests are still open."""
_STEPS_PER_SECOND = 60
"""The workers are as slow as a large model. At full speed, the engine would finish before the kills."""
_LOOK_SECONDS = 0.01
_MOST_SECONDS = 120.0
_INTERRUPTED = 130
_SAMPLE_TOKENS = 12
_COMPARED = Token._fields.index("alternatives") + 1
"""Number of a token's fields that are compared."""
Results = dict[str, Any]
"""The results of the demo by name: the counts, the errors, and whether all answers are right."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    declare_settings(parser, {})


def run(options: argparse.Namespace) -> int:
    settings = load_settings(options)
    configure(replace(settings.log, level="error"))  # hide the warnings about the killed processor
    with runtime_folder() as folder:
        roles = {"mixed": 1, "decode": 1, "prefill": 1}
        pace = _STEPS_PER_SECOND
        plan = plan_for(settings, folder, engine="ngram", roles=roles, gateways=0, steps_per_second=pace)
        return asyncio.run(_run(plan, folder))


async def _run(plan: Plan, folder: Path) -> int:
    begin, progress = time.monotonic(), Progress()

    def show(text: str) -> None:
        progress.clear()
        print(text, flush=True)

    def report(event: ServiceEvent) -> None:
        if event.is_error:
            show(styled(f"   {event.service}: {event.text}", "red"))

    system = Supervisor(plan.services, folder, report)
    show(styled("1. Start", "bold"))
    try:
        results = await system.run(partial(_demo_or_exit, plan, system, progress, show))
    finally:
        progress.clear()
    if results is None:
        return _INTERRUPTED
    ok, seconds = results["ok"] and not system.died, time.monotonic() - begin
    verdict = styled("every token was right", "green") if ok else styled("something was WRONG, see above", "red")
    show(f"\nAll stopped after {seconds:.0f} s: {verdict}. `tokenbus up` starts such a system, and leaves it running.")
    return 0 if ok else 1


async def _demo_or_exit(plan: Plan, system: Supervisor, progress: Progress, show: Callable[[str], None]) -> Results:
    """Run the demo. Raises CommandError if a service ends unexpectedly."""
    show(f"   {len(system.children)} processes: {', '.join(child.name for child in system.children)}")
    demo = asyncio.ensure_future(_demo(plan.settings, system, progress, show))
    exiting = asyncio.ensure_future(system.next_exit())
    try:
        await asyncio.wait([demo, exiting], timeout=_MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if demo.done():
            return demo.result()
        if not exiting.done():
            raise CommandError(f"not done after {_MOST_SECONDS:g} s")
        dead = exiting.result()
        raise CommandError(f"{dead.name} {dead.how_it_ended} in the middle of the demo{dead.last_line}")
    finally:
        exiting.cancel()
        demo.cancel()
        await asyncio.gather(demo, return_exceptions=True)


async def _demo(settings: Settings, system: Supervisor, progress: Progress, show: Callable[[str], None]) -> Results:
    generates = requests(_REQUESTS, _TOKENS)
    answers = [Answer(generate) for generate in generates]
    restarts: list[asyncio.Task[None]] = []

    async def kill(service: str, is_time: Callable[[], bool]) -> None:
        await _show_tokens(answers, progress, answering, is_time)
        count = sum(not answer.is_done for answer in answers)
        show(f"   {service} is killed (kill -9) with {count} requests open, and started again")
        restarts.append(asyncio.create_task(system.restart(service)))  # requests continue during the restart

    show(styled(f"2. {_REQUESTS} requests to an n-gram model, up to {_TOKENS} tokens with 5 alternatives each", "bold"))
    async with Client(replace(settings, client=replace(settings.client, drain_timeout_ms=0))) as client:
        answering = asyncio.gather(*(_receive(client, answer) for answer in answers))
        try:
            await kill(_WORKER, lambda: _token_count(a for a in answers if a.is_at(_WORKER)) >= _WORKER_TOKENS)
            await kill("processor", lambda: _token_count(answers) >= _ALL_TOKENS)
            await _show_tokens(answers, progress, answering, lambda: False)
            await asyncio.gather(answering, *restarts)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
    expected = await asyncio.to_thread(expected_answers, generates, settings.limits)
    results = compared(answers, expected)
    show(styled("3. The beginning of one answer, each token with its logprob", "bold"))
    show(_sample(max(answers, key=lambda answer: len(answer.tokens))))
    show(styled("4. Summary", "bold"))
    show("\n".join(summary_lines(results)))
    return results


async def _show_tokens(
    answers: Sequence["Answer"],
    progress: Progress,
    answering: "asyncio.Future[Any]",
    is_enough: Callable[[], bool],
) -> None:
    """Show the number of received tokens until `is_enough` returns true or all requests have ended."""
    while not (answering.done() or is_enough()):
        progress.show(f"{_token_count(answers):,} tokens")
        await asyncio.sleep(_LOOK_SECONDS)


def _token_count(answers: Iterable["Answer"]) -> int:
    return sum(len(answer.tokens) for answer in answers)


@dataclass(slots=True)
class Answer:
    """The tokens of one request, and the way the request ended."""

    generate: Generate
    tokens: list[Token] = field(default_factory=list)
    status: RowStatus | None = None
    turns: Sequence[Turn] = ()
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.status is not None or bool(self.error)

    def is_at(self, worker_id: str) -> bool:
        """Return whether a worker has computed tokens of this request and is computing further tokens."""
        turn = self.turns[-1] if self.turns else None
        return turn is not None and not self.is_done and turn.worker_id == worker_id and len(self.tokens) > turn.begin

    def is_in_order(self) -> bool:
        return [token.position for token in self.tokens] == list(range(len(self.tokens)))

    def is_like(self, other: "Answer") -> bool:
        """Return whether ids, logprobs, ranks, alternatives and the end of two answers are equal bit by bit."""
        columns = [[token[:_COMPARED] for token in answer.tokens] for answer in (self, other)]
        return self.status == other.status and columns[0] == columns[1]


def requests(count: int, tokens: int) -> list[Generate]:
    """Return `count` requests for up to `tokens` tokens, with different seeds."""
    return [
        Generate(
            request_id=number + 1,
            text=TextPrompt(text=_PROMPTS[number % len(_PROMPTS)]),
            sampling=SamplingParameters(max_tokens=tokens, temperature=0.8, seed=number + 10),
            top_logprobs=_TOP_LOGPROBS,
        )
        for number in range(count)
    ]


async def _receive(client: Client, answer: Answer) -> None:
    try:
        generation = client.generate(answer.generate)
        async for token in generation:
            answer.tokens.append(token)
            answer.turns = generation.turns
        answer.status = generation.status
    except RequestFailedError as error:
        answer.error = str(error)


def expected_answers(generates: Sequence[Generate], limits: Limits) -> list[Answer]:
    """Compute the answers without a bus, because the engine's output depends only on the request and its seed."""
    kind, parser = engine_kind("ngram"), argparse.ArgumentParser()
    kind.declare(parser)
    engine = kind.make(parser.parse_args([]), Settings(limits=limits))
    assembler = StepAssembler(limits, engine.vocabulary_size)
    answers = {generate.request_id: Answer(generate) for generate in generates}
    for generate in generates:
        engine.admit(generate)
    while engine.has_work:
        for batch in chain.from_iterable(map(assembler.assemble, engine.step())):
            if batch.header.kind is BatchKind.TARGET:
                tokens = TokenLists(batch)
                for index, row in enumerate(batch.rows()):
                    answers[row.request_id].tokens += tokens.tokens_of(index)
                    answers[row.request_id].status = row.status
    return list(answers.values())


def compared(answers: Sequence[Answer], expected: Sequence[Answer]) -> Results:
    """Compare the answers with the expected ones."""
    wrong = {
        "disordered_requests": sum(not answer.is_in_order() for answer in answers),
        "differing_requests": sum(not answer.is_like(true) for answer, true in zip(answers, expected, strict=True)),
        "errors": [answer.error for answer in answers if answer.error],
    }
    continued = sum(len(answer.turns) > 1 for answer in answers)
    counts = {"requests": len(answers), "tokens": _token_count(answers), "continued": continued}
    return {"ok": not any(wrong.values()), **counts, **wrong}


def summary_lines(results: Results) -> Iterator[str]:
    count, disordered, errors = results["requests"], results["disordered_requests"], results["errors"]
    yield f"   tokens      {results['tokens']:,}, of {count - len(errors)} of {count} requests"
    yield f"   continued   {results['continued']} of these went on at another worker"
    order = f"{disordered} requests with tokens LOST or REPEATED, {len(errors)} requests FAILED"
    yield _verdict("order", not (disordered or errors), "no token lost, none repeated, all in order", order)
    same = f"{count} of {count} answers: ids, logprobs, ranks and alternatives are, bit by bit, those of an engine"
    differ = f"{results['differing_requests']} of {count} answers DIFFER from those of an engine without a bus"
    yield _verdict("truth", not results["differing_requests"], f"{same} without a bus", differ)
    yield from (styled(f"   error       {error}", "red") for error in errors[:3])


def _verdict(name: str, is_right: bool, right: str, wrong: str) -> str:  # noqa: FBT001
    return styled(f"   {name:10}  {right if is_right else wrong}", "green" if is_right else "red")


def _sample(answer: Answer) -> str:
    text = text_of(load_tokenizer("ngram"))
    shown = [token_text(printable(text(token.id)), token.logprob) for token in answer.tokens[:_SAMPLE_TOKENS]]
    return f"   {answer.generate.text.text} {' '.join(shown)} ..."

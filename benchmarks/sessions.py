"""Measure sessions: `python -m benchmarks.sessions`.

One process assembles the items of a worker, from their bytes to branches, for an agent's sessions that run at once.
Then a worker, a processor and a client do the same requests with a session and without one, in turn.
"""

import asyncio
import resource
import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import numpy as np

from benchmarks.processes import below, deployed, processor_seconds
from benchmarks.report import Report, Row, core_to_keep, on_cores
from tokenbus.client import Client, Generation
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.recordings.items import StreamItem
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import sessions_of
from tokenbus.worker.assembler import StepAssembler
from tokenbus.worker.engine_output import session_events
from tokenbus.worker.step import StepArrays
from tokenbus_contracts import Limits, encode
from tokenbus_contracts.frames import write_frame
from tokenbus_contracts.generated.request_pb2 import (
    Admitted,
    Generate,
    RequestEvent,
    SamplingParameters,
    TokenPrompt,
)
from tokenbus_contracts.generated.stream_pb2 import Hello, PayloadKind

_PROMPT = 64
_EPOCH = 7
_EVENT, _BATCH = PayloadKind.PAYLOAD_KIND_REQUEST_EVENT, PayloadKind.PAYLOAD_KIND_LOGPROB_BATCH


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("sessions", __doc__)
    add = report.parser.add_argument
    add("--sessions", type=int, default=256, metavar="N", help="that run at once (256)")
    add("--turns", type=int, default=8, metavar="N", help="requests of each session (8)")
    add("--tokens", type=int, default=256, metavar="N", help="of each answer (256)")
    add("--rounds", type=int, default=5, metavar="N", help="how often all are assembled (5)")
    add("--pairs", type=int, default=60, metavar="N", help="rounds of requests with a session, and without (60)")
    add("--requests", type=int, default=128, metavar="N", help="of a round, all at once (128)")
    add("--prompt", type=int, default=1024, metavar="N", help="tokens of each prompt of a round (1024)")
    options = report.parse(arguments)
    if options.quick:
        options.sessions, options.turns, options.rounds = 16, 2, 1
        options.pairs, options.requests = 2, 16
    rows = []
    for top_k in (None, 0, 20):
        items = list(_items(options.sessions, options.turns, options.tokens, top_k))
        tokens = options.sessions * options.turns * options.tokens
        with on_cores(core_to_keep()):
            seconds = [_assemble(items, options.sessions) for _ in range(options.rounds)]
        rows.append(
            {
                "logprobs": "none" if top_k is None else f"k = {top_k}",
                "tokens": tokens,
                "tokens/s": tokens / median(seconds),
                "peak memory MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    report.table(rows, "assembling")
    pairs = _paired(options.pairs, options.requests, options.prompt, options.tokens)
    report.table([_ratio(what, pairs) for what in Cost._fields], "a request with a session, beside one without")
    report.write()


class Cost(NamedTuple):
    """The cost of a round."""

    processor_seconds: float
    """Of worker, processor and client together."""
    seconds: float


def _ratio(what: str, pairs: Sequence[tuple[Cost, Cost]]) -> Row:
    costs = [(getattr(with_session, what), getattr(without, what)) for with_session, without in pairs]
    ratios = [with_session / without for with_session, without in costs]
    lower, middle, upper = quantiles(ratios) if len(ratios) > 1 else ratios * 3
    return {
        "": what.replace("_", " "),
        "with": median(with_session for with_session, _ in costs),
        "without": median(without for _, without in costs),
        "ratio": f"{middle:.3f}",
        "quartiles": f"{lower:.3f} to {upper:.3f}",
    }


def _paired(pairs: int, requests: int, prompt: int, tokens: int) -> list[tuple[Cost, Cost]]:
    """Return the costs of each pair of rounds; every other pair begins with the round without a session."""
    asked = Generate(
        tokens=TokenPrompt(token_ids=range(1, prompt + 1)),
        sampling=SamplingParameters(max_tokens=tokens),
        top_logprobs=0,
    )
    with deployed() as deployment:
        processor = deployment.start_processor()
        worker = deployment.start_worker("w0", "--steps-per-second", "0")

        async def measured() -> list[tuple[Cost, Cost]]:
            found = []
            async with Client(deployment.settings()) as client:
                for number in range(pairs + 1):
                    costs: dict[str, Cost] = {}
                    for label in ("run", "") if number % 2 else ("", "run"):
                        asked.session = label
                        costs[label] = await _round(client, asked, requests, (processor.pid, worker.pid))
                    if number:  # the first finds nothing warm
                        found.append((costs["run"], costs[""]))
            return found

        return asyncio.run(measured())


async def _round(client: Client, asked: Generate, requests: int, roots: Sequence[int]) -> Cost:
    pids = [pid for root in roots for pid in below(root)]
    before, begin = time.process_time() + sum(map(processor_seconds, pids)), time.monotonic()
    await asyncio.gather(*(_end(client.generate(asked)) for _ in range(requests)))
    seconds = time.monotonic() - begin
    return Cost(time.process_time() + sum(map(processor_seconds, pids)) - before, seconds)


async def _end(generation: Generation) -> None:
    async for _ in generation.rows():
        pass


def _assemble(items: Sequence[StreamItem], sessions: int) -> float:
    begin = time.process_time()
    with TurnReader() as reader:
        for item in items:
            reader.add(StreamItem(item.hello, item.epoch, item.sequence, item.kind, item.payload))  # nothing is decoded
        found = sum(session.is_complete for session in sessions_of(reader))
    if found != sessions:
        raise RuntimeError(f"{sessions} complete sessions, got {found}")
    return time.process_time() - begin


def _items(sessions: int, turns: int, tokens: int, top_k: int | None) -> Iterator[StreamItem]:
    """Yield the items of a worker; each turn's prompt is the turn before with its answer."""
    hello, sequence = Hello(worker_id="w0", schema_major=1), 0
    engine = SyntheticEngine(tokens_per_step=3)
    assembler = StepAssembler(Limits.schema(), engine.vocabulary_size)
    prompts = {session: list(range(_PROMPT)) for session in range(sessions)}
    for turn in range(turns):
        for session, prompt in prompts.items():
            asked = Generate(request_id=turn * sessions + session + 1, session=f"s{session}", sampling={})
            asked.tokens.token_ids[:], asked.sampling.max_tokens = prompt, tokens
            if top_k is not None:
                asked.top_logprobs = top_k
            engine.admit(asked)
            admitted = Admitted(request_id=asked.request_id, worker_id="w0", epoch=_EPOCH, prompt_tokens=len(prompt))
            for event in (RequestEvent(admitted=admitted), *session_events(asked)):
                sequence += 1
                yield _event(hello, sequence, event)
        while engine.has_work:
            for arrays in engine.step():
                for row, ids in zip(arrays.request_ids.tolist(), _split(arrays), strict=True):
                    prompts[(row - 1) % sessions] += ids
                for made in assembler.assemble(arrays):
                    sequence += 1
                    header = made.header._replace(
                        worker_id="w0", epoch=_EPOCH, sequence=sequence, produced_at_ns=sequence
                    )
                    payload = encode(made.concatenated([made], header), Limits.schema())
                    yield StreamItem(hello, _EPOCH, sequence, _BATCH, payload)


def _split(arrays: StepArrays) -> list[list[int]]:
    ids, ends = arrays.token_ids, np.cumsum(arrays.token_counts)
    return [part.tolist() for part in np.split(ids, ends[:-1])]


def _event(hello: Hello, sequence: int, event: RequestEvent) -> StreamItem:
    event.sequence = sequence
    return StreamItem(hello, _EPOCH, sequence, _EVENT, write_frame(event))


if __name__ == "__main__":
    main()

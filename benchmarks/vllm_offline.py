"""Measure tokenbus.LLM beside vllm.LLM, in batches: `python -m benchmarks.vllm_offline`.

Both run the same model with the same options, each in a process of its own, in turn; every token of one is compared
with the other's. Needs vLLM; without --model a tiny one is made, whose steps cost little: what is around them shows.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.processes import Child, TaskFailedError, below, processor_seconds
from benchmarks.report import Report, Row, progress

VLLM, OURS = SIDES = ("vllm.LLM", "tokenbus.LLM")
_MODES: tuple[int | None, ...] = (None, 0, 20)
_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 16384,
}
_OF_MODEL = b"VLLM::Worker"
"""What the process is called in which vLLM runs the model, where it has one."""
_PROMPT_TOKENS = 16
Generate = Callable[[list[list[int]], int | None, bool], Callable[[], list[Any]]]
"""Generates, and returns a function for the tokens, which is not measured."""


class Round(NamedTuple):
    """What one side took for all prompts."""

    seconds: float
    processor: float
    """Processor seconds outside of the model's process."""
    digest: str
    """Of the outputs' tokens."""


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("vllm_offline", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="how many rounds of each (5)")
    add("--prompts", type=int, default=256, metavar="N", help="how many prompts (256)")
    add("--tokens", type=int, default=64, metavar="N", help="of each output (64)")
    add("--model", metavar="FOLDER", help="a model's folder (a tiny one is made)")
    add("--options", type=json.loads, default=_OPTIONS, metavar="JSON", help="vLLM's own, for both")
    options = report.parse(arguments)
    if options.quick:
        options.rounds, options.prompts, options.tokens = 1, 16, 8
    if importlib.util.find_spec("vllm") is None:
        report.fail(NotRunError("not run: vLLM is not installed"))
    try:
        rows = _measured(options)
    except (NotRunError, WrongDeliveryError, TaskFailedError) as error:
        report.fail(error)
    report.table(
        rows, f"{options.prompts} prompts of 16 tokens, {options.tokens} of output each, {options.rounds} rounds"
    )
    report.write()


def _measured(options: argparse.Namespace) -> list[Row]:
    """Run both sides in turn, and return the medians."""
    cells = list(product((False, True), _MODES))
    found: dict[tuple[str, bool, int | None], list[Round]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="tb") as folder,
        Child(has_children=True) as theirs,
        Child(has_children=True) as ours,
    ):
        if not options.model:
            progress("making a model")
            theirs.begin(make_model, folder)
            theirs.answer()
        running = dict(zip(SIDES, (theirs, ours), strict=True))
        for side, child in running.items():
            progress(f"starting {side}")
            child.begin(serve, side, options.model or folder, options.options, options.prompts, options.tokens)
            child.answer()
            child.ask((None, False))  # what begins is not measured
        for number, (texts, k) in product(range(options.rounds), cells):
            progress(f"round {number + 1}: k = {_name(k)}, texts {texts}")
            rounds = {side: Round(*running[side].ask((k, texts))) for side in (SIDES if number % 2 else SIDES[::-1])}
            if rounds[VLLM].digest != rounds[OURS].digest:
                raise WrongDeliveryError(f"k = {k}: tokens differ from vLLM's")
            for side in SIDES:
                found.setdefault((side, texts, k), []).append(rounds[side])
        for child in running.values():
            child.ask(None)
    tokens = options.prompts * options.tokens
    return [_row(texts, k, found[VLLM, texts, k], found[OURS, texts, k], tokens) for texts, k in cells]


def _row(texts: bool, k: int | None, theirs: list[Round], ours: list[Round], tokens: int) -> Row:  # noqa: FBT001
    rates = [tokens / median(each.seconds for each in of) for of in (theirs, ours)]
    costs = [median(each.processor for each in of) / tokens * 1e6 for of in (theirs, ours)]
    return {
        "texts": "with" if texts else "without",
        "k": _name(k),
        "vllm.LLM, tokens/s": rates[0],
        "tokenbus.LLM": rates[1],
        "times": rates[1] / rates[0],
        "processor, us a token: vllm.LLM": costs[0],
        "tokenbus.LLM ": costs[1],
    }


def _name(k: int | None) -> str:
    return "none" if k is None else str(k)


def make_model(_connection: Connection, folder: str) -> None:
    """Make a tiny model: vLLM and its tokenizers are imported in a process of a side alone."""
    from tests.engines.vllm.tiny_model import make  # noqa: PLC0415 - as the docstring says

    make(Path(folder))


def serve(  # noqa: PLR0913, PLR0917 - what a run has
    connection: Connection, side: str, model: str, options: Mapping[str, Any], count: int, tokens: int
) -> str:
    """Be a side: each message is the k and whether texts are made, and is answered with a round; None ends it."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # else each side wants most of a CPU's memory
    generate = (_ours if side == OURS else _theirs)(model, options, tokens)
    prompts = np.random.default_rng(1).integers(3, 300, (count, _PROMPT_TOKENS)).tolist()
    connection.send("ready")
    while wanted := connection.recv():
        before, begin = _processor_seconds(), perf_counter()
        ids = generate(prompts, *wanted)
        seconds, processor = perf_counter() - begin, _processor_seconds() - before
        digest = blake2b(np.concatenate(ids()).astype("<u4").tobytes()).hexdigest()
        connection.send(tuple(Round(seconds, processor, digest)))
    return "ended"


def _ours(model: str, options: Mapping[str, Any], tokens: int) -> Generate:
    import tokenbus  # noqa: PLC0415 - the other side is another process

    llm = tokenbus.LLM(model, **options)

    def generate(prompts: list[list[int]], k: int | None, texts: bool) -> Callable[[], list[Any]]:  # noqa: FBT001
        outputs = llm.generate(
            prompts, max_tokens=tokens, temperature=0.0, ignore_end_token=True, top_logprobs=k, progress=False
        )
        if texts:
            _ = [output.text for output in outputs]
        return lambda: [outputs.token_ids]

    return generate


def _theirs(model: str, options: Mapping[str, Any], tokens: int) -> Generate:
    import vllm

    llm = vllm.LLM(model, disable_log_stats=True, **options)

    def generate(prompts: list[list[int]], k: int | None, texts: bool) -> Callable[[], list[Any]]:  # noqa: FBT001
        wanted = vllm.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=k, detokenize=texts)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
        return lambda: [np.array(output.outputs[0].token_ids) for output in outputs]

    return generate


def _processor_seconds() -> float:
    """Return the processor time of this process and those below it, but for the one that runs the model."""
    return sum(
        processor_seconds(pid)
        for pid in below(os.getpid())
        if not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_OF_MODEL)
    )


if __name__ == "__main__":
    main()

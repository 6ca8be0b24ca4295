"""Measure tokenbus.LLM beside vllm.LLM, in batches: `python -m benchmarks.vllm_offline`.

Both run the same model with the same options, each in a process of its own, in turn; every token of one is compared
with the other's. Needs vLLM; without --model a tiny one is made, whose steps cost little: what is around them shows.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.machine import Placement, description, in_words
from benchmarks.outputs import Record, declare_outputs, progress, write_outputs

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
_ROOT = Path(__file__).resolve().parents[1]
_ABOUT = """\
# Batches without a server

Written by `python -m benchmarks.vllm_offline --write-docs`. {prompts} prompts of 16 tokens, {tokens} tokens of output
each, greedy, {rounds} rounds in turn, medians. Both give the same tokens. "Processor" is the time of all processes but
the one that runs the model, for each token of output. With texts, vLLM decodes as it goes (its default), and for
Tokenbus each output's `text` is read; without, vLLM is told not to decode.

Machine: {machine}.

"""


class Round(NamedTuple):
    """What one side took for all prompts."""

    seconds: float
    processor: float
    """Processor seconds outside of the model's process."""
    digest: str
    """Of the outputs' tokens."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_offline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many rounds of each (5)")
    parser.add_argument("--prompts", type=int, default=256, metavar="N", help="how many prompts (256)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each output (64)")
    parser.add_argument("--model", metavar="FOLDER", help="a model's folder (a tiny one is made)")
    parser.add_argument("--options", type=json.loads, default=_OPTIONS, metavar="JSON", help="vLLM's own, for both")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    declare_outputs(parser, "vllm_offline", has_plot=False)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.prompts, options.tokens = 1, 16, 8
    if options.side:
        _answer(options)
        return
    if importlib.util.find_spec("vllm") is None:
        parser.exit(2, f"{parser.prog}: not run: vLLM is not installed\n")
    try:
        record = _measured(options)
    except (NotRunError, WrongDeliveryError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    sys.stdout.write(_table(record))
    about = _ABOUT.format(**record["asked"], machine=in_words(record["machine"]))
    write_outputs(options, "vllm_offline", record, lambda: about + _table(record))


def _measured(options: argparse.Namespace) -> Record:
    """Run both sides in turn, and return the medians."""
    cells = list(product((False, True), _MODES))
    found: dict[tuple[str, bool, int | None], list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        if not options.model:
            progress("making a model")
            subprocess.run([sys.executable, "-m", "tests.engines.vllm.tiny_model", folder], cwd=_ROOT, check=True)
        running = {}
        try:
            for side in SIDES:
                progress(f"starting {side}")
                running[side] = _started(side, options.model or folder, options)
            versions = _asked(running[VLLM], {"texts": False, "k": None})["versions"]
            _asked(running[OURS], {"texts": False, "k": None})  # as the one above: what begins is not measured
            for number, (texts, k) in product(range(options.rounds), cells):
                progress(f"round {number + 1}: k = {'none' if k is None else k}, texts {texts}")
                turn = SIDES if number % 2 else SIDES[::-1]
                rounds = {side: Round(**_asked(running[side], {"texts": texts, "k": k})["round"]) for side in turn}
                if rounds[VLLM].digest != rounds[OURS].digest:
                    raise WrongDeliveryError(f"k = {k}: tokens differ from vLLM's")
                for side in SIDES:
                    found.setdefault((side, texts, k), []).append(rounds[side])
        finally:
            for process in running.values():
                process.communicate()  # the end of its input ends it
    tokens = options.prompts * options.tokens
    figures = [
        {
            "side": side,
            "texts": texts,
            "k": k,
            "tokens_per_second": tokens / median(each.seconds for each in rounds),
            "processor_us": median(each.processor for each in rounds) / tokens * 1e6,
        }
        for (side, texts, k), rounds in found.items()
    ]
    machine = {**description(Placement(None, frozenset()), vllm=False), "pinned": "no", **versions}
    asked = {name: getattr(options, name) for name in ("prompts", "tokens", "rounds")}
    return {"machine": machine, "asked": asked, "options": options.options, "figures": figures}


def _table(record: Record) -> str:
    """Return the medians as a table."""
    figures = {(each["side"], each["texts"], each["k"]): each for each in record["figures"]}
    lines = [
        "| texts | k | vllm.LLM tokens/s | tokenbus.LLM | times | vllm.LLM processor, us a token | tokenbus.LLM |",
        "|---|---|---|---|---|---|---|",
    ]
    for texts, k in product((False, True), _MODES):
        theirs, ours = figures[VLLM, texts, k], figures[OURS, texts, k]
        rates = theirs["tokens_per_second"], ours["tokens_per_second"]
        lines.append(
            f"| {'with' if texts else 'without'} | {'none' if k is None else k} | {rates[0]:,.0f} | {rates[1]:,.0f} "
            f"| {rates[1] / rates[0]:.2f} | {theirs['processor_us']:.0f} | {ours['processor_us']:.0f} |"
        )
    return "\n".join([*lines, ""])


# One side, in a process of its own: a line of JSON for each round, on both ways.


def _started(side: str, model: str, options: argparse.Namespace) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.vllm_offline", "--side", side, "--model", model]
    command += ["--prompts", str(options.prompts), "--tokens", str(options.tokens)]
    command += ["--options", json.dumps(options.options)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")}
    process = subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdout is None or not process.stdout.readline():
        raise NotRunError(f"{side} did not start: status {process.wait()}")
    return process


def _asked(process: "subprocess.Popen[str]", wanted: Mapping[str, Any]) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        raise NotRunError("a side without pipes")
    process.stdin.write(json.dumps(wanted) + "\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise NotRunError(f"a side ended with status {process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def _answer(options: argparse.Namespace) -> None:
    """Run rounds as they are asked for, until the end of the input."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what vLLM prints is no answer
        generate = (_ours if options.side == OURS else _theirs)(options)
        prompts = np.random.default_rng(1).integers(3, 300, (options.prompts, _PROMPT_TOKENS)).tolist()
        answers.write("ready\n")
        answers.flush()
        for line in sys.stdin:
            wanted = json.loads(line)
            before, begin = _processor_seconds(), perf_counter()
            ids = generate(prompts, wanted["k"], wanted["texts"])
            seconds, processor = perf_counter() - begin, _processor_seconds() - before
            digest = blake2b(np.concatenate(ids()).astype("<u4").tobytes()).hexdigest()
            answers.write(json.dumps({"round": Round(seconds, processor, digest)._asdict(), "versions": _versions()}))
            answers.write("\n")
            answers.flush()


_Generate = Callable[[list[list[int]], int | None, bool], Callable[[], list[Any]]]
"""Generates, and returns what returns the tokens, which is not measured."""


def _ours(options: argparse.Namespace) -> _Generate:
    import tokenbus  # noqa: PLC0415 - the other side is another process

    llm = tokenbus.LLM(options.model, **options.options)

    def generate(prompts: list[list[int]], k: int | None, texts: bool) -> Callable[[], list[Any]]:  # noqa: FBT001
        outputs = llm.generate(
            prompts,
            max_tokens=options.tokens,
            temperature=0.0,
            ignore_end_token=True,
            top_logprobs=k,
            progress=False,
        )
        if texts:
            _ = [output.text for output in outputs]
        return lambda: [outputs.token_ids]

    return generate


def _theirs(options: argparse.Namespace) -> _Generate:
    import vllm

    llm = vllm.LLM(options.model, disable_log_stats=True, **options.options)

    def generate(prompts: list[list[int]], k: int | None, texts: bool) -> Callable[[], list[Any]]:  # noqa: FBT001
        wanted = vllm.SamplingParams(
            max_tokens=options.tokens, temperature=0.0, ignore_eos=True, logprobs=k, detokenize=texts
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
        return lambda: [np.array(output.outputs[0].token_ids) for output in outputs]

    return generate


def _versions() -> dict[str, str]:
    return {name: str(sys.modules[name].__version__) for name in ("vllm", "torch")}


def _processor_seconds() -> float:
    """Return the processor time of this process and those below it, but for the one that runs the model."""
    ticks = 0
    for pid in _below(os.getpid()):
        folder = Path(f"/proc/{pid}")
        if not (folder / "cmdline").read_bytes().startswith(_OF_MODEL):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _below(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from _below(int(child))


if __name__ == "__main__":
    main()

"""Measure vLLM's own API server and Tokenbus side by side: `python -m benchmarks.vllm`.

Both serve the same model on this machine; one client asks them in turn. What follows -- are vLLM's own options, for
both. Without --model, a tiny one is made, with a tokenizer of its own.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.report import Report, Row, progress
from benchmarks.vllm import model
from benchmarks.vllm.cells import PATHS, Cell, cells
from benchmarks.vllm.measure import Run, made_model, run
from benchmarks.vllm.samples import MODEL, Sample, median, ratio
from benchmarks.vllm.systems import ROOT, TOKENBUS, VLLM, Plan

_TESTED = ROOT / ".venv-vllm" / "bin" / "python"
"""What `make test-vllm` makes."""
_MOST_ROWS = 1024
_TOP_K = 20


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    report = Report("vllm", __doc__)
    add = report.parser.add_argument
    add("--rounds", type=_at_least_one, default=7, metavar="N", help="how many rounds of each (7)")
    add("--streams", type=_counts, default=[1, 64, 256], metavar="N,N", help="at once (1,64,256)")
    add("--k", type=_top_ks, default=[None, 0, 5, 20], metavar="K,K", help="top-k (none,0,5,20)")
    add("--endpoints", type=_endpoints, default=list(PATHS), metavar="NAME,NAME", help="(completions,chat)")
    add("--tokens", type=_at_least_one, default=64, metavar="N", help="of each answer (64)")
    add("--model", type=Path, metavar="FOLDER", help="a model's folder (a tiny one is made)")
    add("--gateways", type=_at_least_one, default=1, metavar="N", help="of Tokenbus (1)")
    add("--api-servers", type=_at_least_one, default=1, metavar="N", help="of vLLM (1)")
    add("--python", metavar="FILE", help="the interpreter that has vLLM (this one, or that of `make test-vllm`)")
    options = report.parse(given[:split])
    try:
        found = _measured(options, given[split + 1 :])
    except (NotRunError, WrongDeliveryError) as error:
        report.fail(error)
    report.say(_about(found))
    for title, rows in (
        ("tokens a second", _rates(found)),
        ("milliseconds, tokens and bytes", _times(found)),
        ("processor time in microseconds a token; outside: of all but the process that runs the model", _costs(found)),
    ):
        report.table(list(rows), title)
    report.write()


def _measured(options: argparse.Namespace, engine_options: list[str]) -> Run:
    if options.quick:
        options.streams, options.k, options.tokens, options.rounds = [1, 16], [None, _TOP_K], 16, 1
    most = max(options.streams)
    python = options.python or _python()
    if not any(each.startswith("--max-num-seqs") for each in engine_options):
        engine_options = ["--max-num-seqs", str(max(256, min(most, _MOST_ROWS))), *engine_options]
    chosen = list(cells(options.endpoints, options.k, options.streams))
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        plan = Plan(python, options.model, engine_options, most, options.gateways, options.api_servers)
        if plan.model is None:
            progress("a model is made")
            made = made_model(python, Path(folder))
            plan = replace(plan, model=made, engine_options=[*model.OPTIONS, *engine_options])
        return run(plan, chosen, options.rounds, options.tokens)


def _about(found: Run) -> str:
    same, plan = found.answers, found.plan
    idle = ", ".join(f"{name} {cores:.2f}" for name, cores in found.idle_cores.items())
    return (
        f"vLLM {found.vllm} on {found.card or 'a CPU'}, its options for both `{' '.join(plan.engine_options)}`; "
        f"{plan.gateways} gateway(s), {plan.api_servers} API server(s). At temperature 0, {same['asked']} answers of "
        f"{same['tokens']} tokens: the same tokens in {same['same_tokens']}, texts in {same['same_texts']}, logprobs "
        f"in {same['same_logprobs']} (apart by at most {same['worst']:.1g}). Cores that are busy while idle: "
        f"{idle}."
    )


def _rates(found: Run) -> Iterator[Row]:
    """Yield the tokens a second of both, beside each other and beside their own without logprobs."""
    for cell, rounds in found.rounds.items():
        none = found.rounds.get(Cell(cell.endpoint, None, cell.streams), rounds)
        yield {
            "": cell.in_words,
            **{name: median(of).tokens_per_second for name, of in rounds.items()},
            "times vLLM": ratio(rounds[TOKENBUS], rounds[VLLM], _rate),
            "vLLM, of none": ratio(rounds[VLLM], none[VLLM], _rate),
            "Tokenbus, of none": ratio(rounds[TOKENBUS], none[TOKENBUS], _rate),
        }


def _times(found: Run) -> Iterator[Row]:
    for cell, rounds in found.rounds.items():
        for name, of in rounds.items():
            each = median(of)
            yield {
                "": cell.in_words,
                "system": name,
                "first token": each.first_ms,
                "its p99": each.first_p99_ms,
                "between tokens": each.between_ms,
                "its p99 ": each.between_p99_ms,
                "tokens an event": each.tokens_per_event,
                "bytes a token": each.bytes_per_token,
            }


def _costs(found: Run) -> Iterator[Row]:
    for cell, rounds in found.rounds.items():
        for name, of in rounds.items():
            each = median(of)
            roles = {role: us for role, us in each.cpu_us.items() if role != MODEL}
            outside = {"outside": each.outside_us, "the client": each.client_us}
            yield {"": cell.in_words, "system": name, **roles, **outside}


def _rate(each: Sample) -> float:
    return each.tokens_per_second


def _python() -> str:
    """Return an interpreter that has vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if _TESTED.exists():
        return str(_TESTED)
    raise NotRunError("not run: vLLM is not installed; --python names an interpreter that has it")


def _counts(text: str) -> list[int]:
    return [_at_least_one(each) for each in text.split(",")]


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"numbers of at least 1, got {text!r}")
    return int(text)


def _top_ks(text: str) -> list[int | None]:
    found: list[int | None] = []
    for each in text.split(","):
        if each != "none" and not (each.isdecimal() and int(each) <= _TOP_K):
            raise argparse.ArgumentTypeError(f"none, or 0 to {_TOP_K}, got {each!r}")
        found.append(None if each == "none" else int(each))
    return found


def _endpoints(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [each for each in found if each not in PATHS]:
        raise argparse.ArgumentTypeError(f"of {', '.join(PATHS)}, got {unknown[0]!r}")
    return found


if __name__ == "__main__":
    main()

"""Measure vLLM's own API server and Tokenbus side by side: `python -m benchmarks.vllm`.

Both serve the same model on this machine; one client asks them in turn. What follows -- are vLLM's own options, for
both. Without --model, a tiny one is made, with a tokenizer of its own.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.processes import Child, TaskFailedError
from benchmarks.report import Report, Row, progress
from benchmarks.vllm.cells import PATHS, Cell, cells
from benchmarks.vllm.measure import MODEL, Run, Sample, median, ratio, run
from benchmarks.vllm.model import OPTIONS, make_model
from benchmarks.vllm.systems import TOKENBUS, VLLM, Plan

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
    options = report.parse(given[:split])
    if options.quick:
        options.streams, options.k, options.tokens, options.rounds = [1, 16], [None, _TOP_K], 16, 1
    if importlib.util.find_spec("vllm") is None:
        report.fail(NotRunError("not run: vLLM is not installed beside Tokenbus"))
    try:
        plan, found = _measured(options, given[split + 1 :])
    except (NotRunError, WrongDeliveryError, TaskFailedError) as error:
        report.fail(error)
    report.say(_about(plan, found))
    report.table(list(_rates(found)), "tokens a second")
    report.table(
        list(_figures(found)),
        "milliseconds, tokens and bytes; processor time in microseconds a token, outside: all but the model's process",
    )
    report.write()


def _measured(options: argparse.Namespace, engine_options: list[str]) -> tuple[Plan, Run]:
    most = max(options.streams)
    if not any(each.startswith("--max-num-seqs") for each in engine_options):
        engine_options = ["--max-num-seqs", str(max(256, min(most, _MOST_ROWS))), *engine_options]
    with tempfile.TemporaryDirectory(prefix="tb", dir="/tmp") as folder:
        if options.model is None:
            progress("a model is made")
            options.model = Path(folder) / "tiny"
            engine_options = [*OPTIONS, *engine_options]
            with Child() as maker:
                maker.begin(make_model, options.model)
                maker.answer()
        plan = Plan(options.model, engine_options, most, options.gateways, options.api_servers)
        chosen = list(cells(options.endpoints, options.k, options.streams))
        return plan, run(plan, chosen, options.rounds, options.tokens)


def _about(plan: Plan, found: Run) -> str:
    same, idle = found.answers, ", ".join(f"{name} {cores:.2f}" for name, cores in found.idle_cores.items())
    return (
        f"vLLM {found.vllm} on {found.card or 'a CPU'}, its options for both `{' '.join(plan.engine_options)}`; "
        f"{plan.gateways} gateway(s), {plan.api_servers} API server(s). At temperature 0, {same['asked']} answers of "
        f"{same['tokens']} tokens: the same tokens in {same['same_tokens']}, texts in {same['same_texts']}, logprobs "
        f"in {same['same_logprobs']} (apart by at most {same['worst']:.1g}). Cores that are busy while idle: {idle}."
    )


def _rates(found: Run) -> Iterator[Row]:
    """Yield the tokens a second of both, beside each other and beside their own without logprobs."""
    for cell, rounds in found.rounds.items():
        none = found.rounds.get(Cell(cell.endpoint, None, cell.streams), rounds)
        yield {
            "": cell.in_words,
            **{name: median(of, attrgetter("tokens_per_second")) for name, of in rounds.items()},
            "times vLLM": ratio(rounds[TOKENBUS], rounds[VLLM]),
            **{f"{name}, of none": ratio(of, none[name]) for name, of in rounds.items()},
        }


def _figures(found: Run) -> Iterator[Row]:
    """Yield all other figures of each system: its processor time by role, but for the model's."""
    for cell, rounds in found.rounds.items():
        for name, of in rounds.items():
            figures = {field: median(of, attrgetter(field)) for field in Sample._fields[1:-1]}
            roles = [role for role in dict.fromkeys(role for each in of for role in each.cpu_us) if role != MODEL]
            cpu = {role: median(of, lambda each, role=role: each.cpu_us.get(role, 0.0)) for role in roles}  # type: ignore[misc]
            yield {"": cell.in_words, "system": name, **figures, **cpu}


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

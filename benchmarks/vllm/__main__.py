"""Measure vLLM's servers and Tokenbus side by side: `python -m benchmarks.vllm`.

All serve the same model on this machine; the same clients ask them in turn, in rounds. The systems:

  python    vLLM's API server in Python
  rust      vLLM with its front end in Rust (VLLM_USE_RUST_FRONTEND=1 vllm serve), beside which all others are shown
  tokenbus  a worker with vLLM as its engine, a processor, and gateways
  tap       rust with --scheduler-cls tokenbus.engines.vllm.scheduler, and a reader of its stream

What follows -- are vLLM's own options, for all. With --kv-cache-memory-bytes among them all systems start at once.
Without --model one is made, with random weights and a tokenizer of its own.
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
from benchmarks.vllm.cells import Cell
from benchmarks.vllm.measure import INSIDE, Load, Run, Sample, median, ratio, run
from benchmarks.vllm.model import SHAPES
from benchmarks.vllm.systems import MOST_ROWS, NAMES, NEED_RUST, PYTHON, RUST, Plan, has_rust
from tokenbus.settings import ENTRIES

_TOP_K = 20
_NO_RUST = "the Rust front end is not in this vLLM"


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    report = Report("vllm", __doc__)
    add = report.parser.add_argument
    add("--systems", type=_systems, default=list(NAMES.values()), metavar="NAME,NAME", help="which (all)")
    add("--rounds", type=_at_least_one, default=5, metavar="N", help="the most rounds of each (5)")
    add("--seconds", type=_at_least_one, default=86_400, metavar="N", help="after which no round begins (86400)")
    add("--streams", type=_counts, default=[256, 1024], metavar="N,N", help="at once (256,1024)")
    add("--k", type=_top_ks, default=[None, 0, 20], metavar="K,K", help="top-k (none,0,20)")
    add("--tokens", type=_at_least_one, default=64, metavar="N", help="of each answer (64)")
    add("--model", type=Path, metavar="FOLDER", help="a model's folder (one is made)")
    add("--shape", choices=SHAPES, default="tiny", help="of the model that is made (tiny)")
    add("--clients", type=_at_least_one, default=1, metavar="N", help="processes that ask (1)")
    add("--gateways", type=_at_least_one, default=1, metavar="N", help="of Tokenbus (1)")
    add("--worker-option", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="a worker's setting")
    options = report.parse(given[:split])
    if options.quick:
        options.streams, options.k, options.tokens, options.rounds = [16], [None, _TOP_K], 16, 1
    if importlib.util.find_spec("vllm") is None:
        report.fail(NotRunError("not run: vLLM is not installed beside Tokenbus"))
    if not has_rust():
        options.systems = [each for each in options.systems if each not in NEED_RUST]
        if not options.systems:
            report.fail(NotRunError(f"not run: {_NO_RUST}"))
        report.say(_NO_RUST)
    try:
        plan, found = _measured(options, given[split + 1 :])
    except (NotRunError, WrongDeliveryError, TaskFailedError) as error:
        report.fail(error)
    report.say(_about(plan, found))
    report.table(list(_rates(found)), "tokens a second")
    report.table(
        list(_figures(found)),
        "milliseconds, tokens and bytes; processor time in microseconds a token, the engine's with the model's",
    )
    report.keep("rounds", list(_rounds(found)))
    report.write()


def _measured(options: argparse.Namespace, engine_options: list[str]) -> tuple[Plan, Run]:
    most = max(options.streams)
    if not any(each.startswith("--max-num-seqs") for each in engine_options):
        engine_options = ["--max-num-seqs", str(max(256, min(most, MOST_ROWS))), *engine_options]
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        if options.model is None:
            progress("a model is made")
            make, own_options = SHAPES[options.shape]
            options.model = Path(folder) / "made"
            engine_options = [*own_options, *engine_options]
            with Child() as maker:
                maker.begin(make, options.model)
                maker.answer()
        plan = Plan(
            options.systems,
            options.model,
            engine_options,
            options.gateways,
            dict(options.worker_option),
            options.seconds,
        )
        chosen = [Cell(top_k, count) for count in options.streams for top_k in options.k]
        return plan, run(plan, Load(chosen, options.rounds, options.tokens, options.clients, options.seconds))


def _about(plan: Plan, found: Run) -> str:
    idle = ", ".join(f"{name} {cores:.2f}" for name, cores in found.idle_cores.items())
    return (
        f"vLLM {found.vllm} on {found.card or 'a CPU'}, its options for all `{' '.join(plan.engine_options)}`; "
        f"{plan.gateways} gateway(s). Cores that are busy while idle: {idle}."
    )


def _rates(found: Run) -> Iterator[Row]:
    """Yield the tokens a second of all, beside the first of vLLM's servers."""
    for cell, rounds in found.rounds.items():
        row: dict[str, str | int | float] = {"": cell.in_words, "rounds": max(map(len, rounds.values()))}
        row |= {name: median(of, attrgetter("tokens_per_second")) for name, of in rounds.items()}
        theirs = next((name for name in (RUST, PYTHON) if name in rounds), None)
        if theirs:
            row |= {f"{name} / {theirs}": ratio(of, rounds[theirs]) for name, of in rounds.items() if name != theirs}
        yield row


def _figures(found: Run) -> Iterator[Row]:
    """Yield all other figures of each system: its processor time by role, but for the engine's own."""
    for cell, rounds in found.rounds.items():
        for name, of in rounds.items():
            figures = {field: median(of, attrgetter(field)) for field in Sample._fields[1:-1]}
            roles = [role for role in dict.fromkeys(role for each in of for role in each.cpu_us) if role not in INSIDE]
            cpu = {role: median(of, lambda each, role=role: each.cpu_us.get(role, 0.0)) for role in roles}  # type: ignore[misc]
            yield {"": cell.in_words, "system": name, **figures, **cpu}


def _rounds(found: Run) -> Iterator[dict[str, object]]:
    """Yield each round of each system."""
    for cell, rounds in found.rounds.items():
        for name, of in rounds.items():
            for number, each in enumerate(of):
                yield {**cell._asdict(), "system": name, "round": number, **each._asdict()}


def _systems(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [each for each in found if each not in NAMES]:
        raise argparse.ArgumentTypeError(f"of {', '.join(NAMES)}, got {unknown[0]!r}")
    return [NAMES[each] for each in found]


def _setting(text: str) -> tuple[str, str]:
    key, is_there, value = text.partition("=")
    if not is_there or key not in ENTRIES:
        raise argparse.ArgumentTypeError(f"KEY=VALUE with a setting's key, got {text!r}")
    return key, value


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


if __name__ == "__main__":
    main()

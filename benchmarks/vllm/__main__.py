"""Measure vLLM's own API server and Tokenbus side by side: `python -m benchmarks.vllm`.

Both serve the same model on this machine; one client asks them in turn. What follows -- are vLLM's own options, for
both. Without --model, a tiny one is made, with a tokenizer of its own.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.errors import NotRunError, WrongDeliveryError
from benchmarks.outputs import Record, declare_outputs, paint, progress, write_outputs
from benchmarks.vllm import model
from benchmarks.vllm.cells import PATHS, cells
from benchmarks.vllm.document import page
from benchmarks.vllm.measure import made_model, run
from benchmarks.vllm.systems import ROOT, Plan
from benchmarks.vllm.tables import render

_COMMAND = "python -m benchmarks.vllm --name {} --write-docs"
_NAME = "vllm"
_TESTED = ROOT / ".venv-vllm" / "bin" / "python"
"""What `make test-vllm` makes."""
_MOST_ROWS = 1024
_TOP_K = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of few cells: whether it works")
    parser.add_argument("--rounds", type=_at_least_one, default=7, metavar="N", help="how many rounds of each (7)")
    parser.add_argument("--streams", type=_counts, default=[1, 64, 256], metavar="N,N", help="at once (1,64,256)")
    parser.add_argument("--k", type=_top_ks, default=[None, 0, 5, 20], metavar="K,K", help="top-k (none,0,5,20)")
    parser.add_argument(
        "--endpoints", type=_endpoints, default=list(PATHS), metavar="NAME,NAME", help="(completions,chat)"
    )
    parser.add_argument("--tokens", type=_at_least_one, default=64, metavar="N", help="of each answer (64)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model's folder (a tiny one is made)")
    parser.add_argument("--gateways", type=_at_least_one, default=1, metavar="N", help="of Tokenbus (1)")
    parser.add_argument("--api-servers", type=_at_least_one, default=1, metavar="N", help="of vLLM (1)")
    parser.add_argument(
        "--python", metavar="FILE", help="the interpreter that has vLLM (this one, or that of `make test-vllm`)"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="measure nothing, take the figures of an earlier run"
    )
    parser.add_argument("--name", default=_NAME, help=f"what the files are called that are written ({_NAME})")
    declare_outputs(parser, "NAME", has_plot=True)
    options = parser.parse_args(given[:split])
    if options.record:
        record: Record = json.loads(options.record.read_text())
    else:
        try:
            record = _measured(options, given[split + 1 :])
        except (NotRunError, WrongDeliveryError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    print(render(record, paint()))
    if options.plot or options.write_docs:
        from benchmarks.vllm.plot import plot  # noqa: PLC0415 - where vLLM is, matplotlib need not be

        drawn = partial(plot, name=options.name)
        write_outputs(
            options, options.name, record, lambda: page(record, _COMMAND.format(options.name), options.name), drawn
        )
    else:
        write_outputs(options, options.name, record, lambda: "")


def _measured(options: argparse.Namespace, engine_options: list[str]) -> Record:
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

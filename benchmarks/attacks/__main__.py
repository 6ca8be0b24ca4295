"""Measure what attackers can do to another client: `python -m benchmarks.attacks`.

Processor, worker and attacker are processes of their own on this machine; each attack has its control in the same run.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from benchmarks.attacks.attackers import ATTACKS
from benchmarks.attacks.document import page
from benchmarks.attacks.measure import measure
from benchmarks.machine import Placement, description
from benchmarks.outputs import Record, declare_outputs, progress, write_outputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two attacks for a second: whether it works")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each stretch is (12)")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only this one; may be repeated")
    declare_outputs(parser, "attacks", has_plot=False)
    options = parser.parse_args(arguments)
    names = ["none", "frames that are none"] if options.quick else options.attack or list(ATTACKS)
    seconds = 1.0 if options.quick else options.seconds
    figures = []
    for name in names:
        progress(f"{name}: {2 * seconds + 2:g} s")
        figures.append(asyncio.run(measure(name, seconds)))
    machine = {name: value for name, value in description(Placement.here(), vllm=False).items() if name != "pinned"}
    text = page(figures, seconds, machine)
    sys.stdout.write(text)
    found = [
        {"attack": name, "control": control._asdict(), "under": under._asdict()} for name, control, under in figures
    ]
    record: Record = {"machine": machine, "seconds": seconds, "figures": found}
    write_outputs(options, "attacks", record, lambda: text)


if __name__ == "__main__":
    main()

"""Measure what attackers can do to another client: `python -m benchmarks.attacks`.

What is attacked runs as processes of its own, and so does the attacker; each attack has its control in the same run.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence

from benchmarks.attacks.attackers import ATTACKS
from benchmarks.attacks.measure import Figures, measure
from benchmarks.machine import Placement, description, in_words
from benchmarks.outputs import Record, declare_outputs, progress, write_outputs

LEAST_SHARE, LEAST_AFTER, MOST_MIB = 0.8, 0.95, 256
_ABOUT = f"""\
# Under attack

Written by `python -m benchmarks.attacks --write-docs`. What is attacked has default settings, and another client, the
victim, 8 requests of 300 tokens at once all the while, each compared with the truth (at the gateway by its length).
Each attack begins after a stretch without it, in the same run, and comes from a process of its own.

"Share" is the victim's rate under the attack, of that without (goal: at least {LEAST_SHARE}), "after" that from a
second after it on (at least {LEAST_AFTER}). "Longest wait" is the longest time in which an open request got no token,
that until its first one included. "Failed" counts its requests that ended with an error, or with tokens that are not
theirs (0). "More memory" is that of the processor, or of the gateway with its encoders, above the most without the
attack (at most {MOST_MIB} MiB); CPU is that of the processor, or of the gateway without them. A figure in bold misses
its goal. docs/security.md says what each attack is, and which tests hold that it harms no other client.
"""
_HEAD = """\
| attack | share | after | longest wait without | under it | failed | more memory | CPU without | under it |
|---|---|---|---|---|---|---|---|---|
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="an attack on each system for a second: whether it works")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each stretch is (12)")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only this one; may be repeated")
    declare_outputs(parser, "attacks", has_plot=False)
    options = parser.parse_args(arguments)
    one_of_each = list({run: name for name, (run, _) in ATTACKS.items()}.values())
    names = options.attack or (one_of_each if options.quick else list(ATTACKS))
    seconds = 1.0 if options.quick else options.seconds
    figures = []
    for place, name in enumerate(names, 1):
        progress(f"{place} of {len(names)}, {name}: {2 * seconds + 10:g} s")
        figures.append(asyncio.run(measure(name, seconds)))
    machine = {name: value for name, value in description(Placement.here(), vllm=False).items() if name != "pinned"}
    text = page(figures, seconds, machine)
    sys.stdout.write(text)
    found = [
        {"attack": each.attack, **{name: getattr(each, name)._asdict() for name in ("control", "under", "after")}}
        for each in figures
    ]
    record: Record = {"machine": machine, "seconds": seconds, "figures": found}
    write_outputs(options, "attacks", record, lambda: text)


def page(figures: Sequence[Figures], seconds: float, machine: Mapping[str, str]) -> str:
    """Return the page: what was printed, and what it means."""
    rows = "".join(map(_row, figures))
    return f"{_ABOUT}\nStretches of {seconds:g} s. Machine: {in_words(machine)}.\n\n{_HEAD}{rows}"


def _row(figures: Figures) -> str:
    name, control, under, after = figures
    share, later = (each.tokens_per_second / control.tokens_per_second for each in (under, after))
    more = under.peak_mib - control.peak_mib
    cells = [
        name,
        _marked(f"{share:.2f}", share >= LEAST_SHARE),
        _marked(f"{later:.2f}", later >= LEAST_AFTER),
        f"{control.longest_wait_s:.2f} s",
        f"{under.longest_wait_s:.2f} s",
        _marked(str(under.failed), not under.failed),
        _marked(f"{more:.0f} MiB", more <= MOST_MIB),
        f"{control.cpu_s:.1f} s",
        f"{under.cpu_s:.1f} s",
    ]
    return f"| {' | '.join(cells)} |\n"


def _marked(text: str, is_met: bool) -> str:  # noqa: FBT001 - private, and named at the call
    return text if is_met else f"**{text}**"


if __name__ == "__main__":
    main()

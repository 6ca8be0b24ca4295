"""Measure what attackers can do to another client: `python -m benchmarks.attacks`.

What is attacked runs as processes of its own, and so does the attacker; each attack has its control in the same run.
"""

import asyncio
from collections.abc import Sequence

from benchmarks.attacks.attackers import ATTACKS
from benchmarks.attacks.measure import Figures, measure
from benchmarks.report import Goal, Report, Row, progress

LEAST_SHARE, LEAST_AFTER, MOST_MIB = 0.8, 0.95, 256


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    report = Report("attacks", __doc__)
    report.parser.add_argument("--seconds", type=float, default=12.0, help="how long each stretch is (12)")
    report.parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only this; may be repeated")
    options = report.parse(arguments)
    one_of_each = list({run: name for name, (run, _) in ATTACKS.items()}.values())
    names = options.attack or (one_of_each if options.quick else list(ATTACKS))
    seconds = 1.0 if options.quick else options.seconds
    report.say(f"Stretches of {seconds:g} s.")
    rows = []
    for place, name in enumerate(names, 1):
        progress(f"{place} of {len(names)}, {name}: {2 * seconds + 10:g} s")
        rows.append(row_of(asyncio.run(measure(name, seconds))))
    report.table(rows)
    report.write()


def row_of(figures: Figures) -> Row:
    """Return what an attack did to the victim, beside the stretch before it."""
    name, control, under, after = figures
    share, later = (each.tokens_per_second / control.tokens_per_second for each in (under, after))
    return {
        "attack": name,
        "share": Goal.at_least(share, LEAST_SHARE, ".2f"),
        "after": Goal.at_least(later, LEAST_AFTER, ".2f"),
        "longest wait without, s": control.longest_wait_s,
        "under it, s": under.longest_wait_s,
        "failed": Goal.at_most(under.failed, 0),
        "more memory, MiB": Goal.at_most(under.peak_mib - control.peak_mib, MOST_MIB, ".0f"),
        "CPU without, s": control.cpu_s,
        "CPU under it, s": under.cpu_s,
    }


if __name__ == "__main__":
    main()

"""Measure the codec beside its peers: `python -m benchmarks.codec`.

From a step's arrays to every request's queue, in one process on one core. The peers take turns in an order drawn anew
for every round; the first step of a turn, which finds the caches as another peer left them, does not count.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.codec.measure import Timing, lineup, measure
from benchmarks.codec.ours import Views
from benchmarks.report import Cell, Report, Row, core_to_keep, on_cores, progress
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS, Case, cases

_OTHER_SIZES_SHARE = 4


def main(arguments: Sequence[str] | None = None) -> None:
    report = Report("codec", __doc__)
    report.parser.add_argument("--turns", type=int, default=0, help="of the headline size (100, quick 2)")
    report.parser.add_argument("--seed", type=int, default=1, help="of the random steps (1)")
    options = report.parse(arguments)
    turns = options.turns or (2 if options.quick else 100)
    found: dict[Case, dict[str, Timing]] = {}
    with on_cores(core_to_keep()), lineup() as (peers, absent):
        for case in cases(quick=options.quick):
            progress(str(case))
            share = turns if case.is_headline else max(1, turns // _OTHER_SIZES_SHARE)
            found[case] = measure(case, peers, share, options.seed)
        size = f"{HEADLINE_ROWS} rows x {HEADLINE_TOKENS} tokens"
        headline = {case: timings for case, timings in found.items() if case.is_headline}
        for label, why in absent.items():
            report.say(f"{label}: {why}.")
        report.table(list(_times(headline)), f"{size}: microseconds a step")
        report.table(
            list(_beside({case: headline[case] for case in headline if case.top_k in {0, 20}})),
            f"{size}: times Tokenbus's, and bytes a token",
        )
    if others := [_all(case, timings) for case, timings in found.items() if not case.is_headline]:
        report.table(others, "other sizes: microseconds a step")
    report.write()


def _times(found: Mapping[Case, Mapping[str, Timing]]) -> Iterator[Row]:
    for label in next(iter(found.values())):
        yield {"peer": label} | {f"k = {case.top_k_name}": timings[label].us for case, timings in found.items()}


def _beside(found: Mapping[Case, Mapping[str, Timing]]) -> Iterator[Row]:
    for label in next(iter(found.values())):
        row: dict[str, Cell] = {"peer": label}
        for case, timings in found.items():
            row[f"k = {case.top_k_name}"] = timings[label].us / timings[Views.label].us
        for case, timings in found.items():
            row[f"bytes, k = {case.top_k_name}"] = timings[label].message_bytes / case.tokens
        yield row


def _all(case: Case, timings: Mapping[str, Timing]) -> Row:
    taken = {label: timing.us for label, timing in timings.items()}
    return {"rows": case.rows, "tokens": case.tokens_per_row, "k": case.top_k_name, **taken}


if __name__ == "__main__":
    main()

"""Measure the codec beside its peers: `python -m benchmarks.codec`.

From a step's arrays to every request's queue, in one process on one core. The peers take turns in an order drawn anew
for every round; the first step of a turn, which finds the caches as another peer left them, does not count.
"""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.codec.measure import DECODED, LISTS, READ, Timing, lineup, measure, measure_rows
from benchmarks.codec.ours import RawZeroMQ, Views
from benchmarks.codec.peer import Peer
from benchmarks.machine import core_to_keep, on_cores
from benchmarks.report import Cell, Goal, Report, Row, progress
from benchmarks.workload import HEADLINE_ROWS, HEADLINE_TOKENS, TOP_KS, Case, cases

_LEAST_TIMES_OURS = {"FastDeploy SysV struct": 16, "vLLM": 60, RawZeroMQ.label: 1 / 3}
_MOST_BYTES = 20
"""Of a token at k = 0."""
_MOST_ROW_US = {(1, DECODED): 15, (HEADLINE_ROWS, READ): 1, (HEADLINE_ROWS, LISTS): 2}
_OTHER_SIZES_SHARE = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    report = Report("codec", __doc__)
    report.parser.add_argument("--turns", type=int, default=0, help="of the goals' sizes (100, quick 2)")
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
        report.table(list(_rows(peers, turns, options.seed)), "microseconds a row, for its reader")
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
            times, least = timings[label].us / timings[Views.label].us, _LEAST_TIMES_OURS.get(label)
            row[f"k = {case.top_k_name}"] = Goal.at_least(times, round(least, 2)) if least else times
        for case, timings in found.items():
            size = timings[label].message_bytes / case.tokens
            is_judged = label == Views.label and case.top_k == 0
            row[f"bytes, k = {case.top_k_name}"] = Goal.at_most(size, _MOST_BYTES) if is_judged else size
        yield row


def _rows(peers: Sequence[Peer], turns: int, seed: int) -> Iterator[Row]:
    for case in (Case(count, HEADLINE_TOKENS, top_k) for count in (1, HEADLINE_ROWS) for top_k in TOP_KS):
        progress(f"rows of {case}")
        row: dict[str, Cell] = {"rows": case.rows, "k": case.top_k_name}
        for label, us in measure_rows(case, peers, turns, seed).items():
            most = _MOST_ROW_US.get((case.rows, label))
            row[label] = us if most is None or case.top_k is None else Goal.at_most(us, most)
        yield row


def _all(case: Case, timings: Mapping[str, Timing]) -> Row:
    taken = {label: timing.us for label, timing in timings.items()}
    return {"rows": case.rows, "tokens": case.tokens_per_row, "k": case.top_k_name, **taken}


if __name__ == "__main__":
    main()

"""The figures that were to be reached, and what was."""

from collections.abc import Iterator

from benchmarks.outputs import Record

_MANY_ROWS = 256
_TIMES_OF_FLOOR = {0: 1.3, 20: 1.6}
_ADVERSARIAL_TIMES = 3.0
_FEW_ROWS = (1, 16)
_FEW_ROWS_US = 25.0
_HOST_US = 30.0


def goals_of(card: Record) -> list[Record]:
    """Return every goal with what was measured; a goal for several sizes is as good as the worst of them."""
    return list(_goals(card))


def _goals(card: Record) -> Iterator[Record]:
    results = [result for result in card["results"] if result["dtype"] == "bfloat16"]
    many = [result for result in results if result["rows"] >= _MANY_ROWS]
    for top_k, times in _TIMES_OF_FLOOR.items():
        for kind in ("random", "peaked"):
            chosen = [r for r in many if (r["top_k"], r["kind"]) == (top_k, kind)]
            if chosen:
                yield _goal(f"k = {top_k}, {kind}, from {_MANY_ROWS} rows: times the floor", times, _worst(chosen))
    sorted_ones = [r for r in many if r["kind"] in ("ascending", "descending") and r["top_k"] in _TIMES_OF_FLOOR]
    if sorted_ones:
        name = f"k = 0 and 20, sorted, from {_MANY_ROWS} rows: times the floor"
        yield _goal(name, _ADVERSARIAL_TIMES, _worst(sorted_ones))
    for rows in _FEW_ROWS:
        few = [result["kernel_us"] for result in results if result["rows"] == rows]
        if few:
            yield _goal(f"{rows} row{'s' if rows > 1 else ''}, every k and kind: microseconds", _FEW_ROWS_US, max(few))
    alike = [us for name, us in card["host"].items() if name.startswith("rows")]
    yield _goal("host, rows all alike: microseconds a call", _HOST_US, max(alike))


def _worst(results: list[Record]) -> float:
    worst: float = max(round(result["kernel_us"] / result["floor_us"], 3) for result in results)
    return worst


def _goal(name: str, wanted: float, measured: float) -> Record:
    return {"goal": name, "wanted": f"at most {wanted:g}", "measured": measured, "met": measured <= wanted}

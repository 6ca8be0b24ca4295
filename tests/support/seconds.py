"""The table at the end of a run of all tests: seconds by folder beside its share, and the slowest tests."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from tokenbus.backports import tomllib

TESTS = Path(__file__).resolve().parents[1]
SHARES: dict[str, float] = tomllib.loads((TESTS / "seconds.toml").read_text())["folders"]
_SLOWEST = 10
_TOO_MUCH = 1.5


def folder_of(test: str) -> str:
    parts = test.split("::", maxsplit=1)[0].removeprefix("tests/").split("/")[:-1]
    names = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in SHARES), ".")


def table(durations: Iterable[tuple[str, float]]) -> Iterator[str]:
    """Yield the lines for tests with their seconds: setup, call and teardown may come one by one.

    A folder that takes half more than its share of the whole is named. Shares are compared, since machines differ.
    """
    by_test: defaultdict[str, float] = defaultdict(float)
    for test, seconds in durations:
        by_test[test] += seconds
    by_folder: defaultdict[str, float] = defaultdict(float)
    for test, seconds in by_test.items():
        by_folder[folder_of(test)] += seconds
    whole, shares = sum(by_folder.values()), sum(SHARES.values())
    # Shares say nothing of a run of some folders.
    is_whole = by_folder.keys() >= SHARES.keys()
    yield f"{'seconds':>8}  folder"
    for folder, seconds in _most_first(by_folder):
        share = SHARES.get(folder, 0) / shares * whole
        note = f"  MORE THAN ITS SHARE, {share:.1f} s" if is_whole and seconds > _TOO_MUCH * share else ""
        yield f"{seconds:8.1f}  {folder}{note}"
    yield f"{whole:8.1f}  in all"
    yield f"{'seconds':>8}  slowest tests"
    for test, seconds in _most_first(by_test)[:_SLOWEST]:
        yield f"{seconds:8.1f}  {test}"


def _most_first(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=itemgetter(1), reverse=True)

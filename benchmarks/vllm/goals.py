"""The figures that were to be reached, and what was: medians of the ratios of rounds that were taken side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.outputs import Record
from benchmarks.vllm.cells import COMPLETIONS, Cell
from benchmarks.vllm.samples import Sample, ratio
from benchmarks.vllm.systems import TOKENBUS, VLLM

Figure = Callable[[Sample], float | None]
Rounds = Mapping[Cell, Mapping[str, Sequence[Sample]]]

_STREAMS = 256
_FIRST_TOKEN_STREAMS = (1, 64)
_TIMES_VLLM = {20: 3.0}
_TIMES_VLLM_ON_CARD = {None: 1.0, 0: 1.8, 20: 5.0}
_OF_NONE = {20: 0.9}
_OF_NONE_ON_CARD = {0: 0.98, 20: 0.95}
_OUTSIDE = {None: 1.0, 20: 0.25}


def goals_of(found: Rounds, answers: Record, *, on_card: bool) -> list[Record]:
    """Return every goal whose cells were measured; with a card there are others than without."""
    return list(_goals(found, answers, on_card=on_card))


def _goals(found: Rounds, answers: Record, *, on_card: bool) -> Iterator[Record]:
    wanted = answers["asked"]
    yield _goal("the same tokens at temperature 0, answers", answers["same_tokens"], wanted, at_least=True)
    most = max((cell.streams for cell in found), default=_STREAMS)
    for streams in dict.fromkeys((_STREAMS, most)):
        for top_k, times in (_TIMES_VLLM_ON_CARD if on_card else _TIMES_VLLM).items():
            name = f"{streams} streams, k = {_named(top_k)}: tokens/s, times vLLM's"
            yield from _judged(name, _beside(found, Cell(COMPLETIONS, top_k, streams), _rate), times, at_least=True)
        none = found.get(Cell(COMPLETIONS, None, streams))
        for top_k, share in (_OF_NONE_ON_CARD if on_card else _OF_NONE).items():
            rounds = found.get(Cell(COMPLETIONS, top_k, streams))
            if none and rounds:
                name = f"{streams} streams, k = {top_k}: tokens/s, of our own without logprobs"
                yield from _judged(name, ratio(rounds[TOKENBUS], none[TOKENBUS], _rate), share, at_least=True)
    for top_k, share in _OUTSIDE.items():
        name = f"{_STREAMS} streams, k = {_named(top_k)}: processor time outside the model, of vLLM's"
        yield from _judged(name, _beside(found, Cell(COMPLETIONS, top_k, _STREAMS), _outside), share)
    for cell in found:
        if cell.endpoint == COMPLETIONS and cell.streams in _FIRST_TOKEN_STREAMS:
            name = f"{cell.streams} stream{'s' * (cell.streams > 1)}, k = {cell.top_k_name}"
            yield from _judged(f"{name}: time to first token, of vLLM's", _beside(found, cell, _first), 1.0)


def _beside(found: Rounds, cell: Cell, figure: Figure) -> float | None:
    rounds = found.get(cell)
    return ratio(rounds[TOKENBUS], rounds[VLLM], figure) if rounds else None


def _judged(name: str, measured: float | None, wanted: float, *, at_least: bool = False) -> Iterator[Record]:
    if measured is not None:
        yield _goal(name, round(measured, 3), wanted, at_least=at_least)


def _goal(name: str, measured: float, wanted: float, *, at_least: bool) -> Record:
    met = measured >= wanted if at_least else measured <= wanted
    return {
        "goal": name,
        "wanted": f"{'at least' if at_least else 'at most'} {wanted:g}",
        "measured": measured,
        "met": met,
    }


def _named(top_k: int | None) -> str:
    return "none" if top_k is None else str(top_k)


def _rate(each: Sample) -> float:
    return each.tokens_per_second


def _first(each: Sample) -> float:
    return each.first_ms


def _outside(each: Sample) -> float | None:
    return each.outside_us

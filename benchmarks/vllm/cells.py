"""What is asked of all systems: cells of top-k and streams, and the bodies of a cell's round."""

import random
from typing import Any, NamedTuple

PATH = "/v1/completions"
_FEWEST_REQUESTS = 8
"""A round's requests; fewer streams than that ask several times, one after the other."""
_WORDS = """\
market morning train station river library teacher children garden winter music harbour ship captain storm letter window
kitchen bread table machine engine wheel bird forest mountain summer road bridge island friend question"""
_WORDS_OF_A_PROMPT = 12
_BOUNDED = {"top_k": 20, "top_p": 0.95}
"""Without such a bound vLLM returns no sampling masks."""


class Cell(NamedTuple):
    """One kind of request, asked by so many streams at once; without logprobs `top_k` is None."""

    top_k: int | None
    streams: int

    @property
    def top_k_name(self) -> str:
        return "none" if self.top_k is None else str(self.top_k)

    @property
    def in_words(self) -> str:
        return f"{self.streams} stream{'s' * (self.streams > 1)}, k = {self.top_k_name}"


def bodies(
    cell: Cell, model: str, max_tokens: int, round_number: int, *, wants_masks: bool = False
) -> list[list[dict[str, Any]]]:
    """Return the bodies of each stream, one after the other; every prompt and seed of a run is another."""
    turns = max(1, _FEWEST_REQUESTS // cell.streams)
    drawn = random.Random(f"{round_number} {cell}")  # noqa: S311 - the same for all systems, and no secret
    bound = _BOUNDED if wants_masks else {}
    return [[_body(cell, model, max_tokens, drawn) | bound for _ in range(turns)] for _ in range(cell.streams)]


def _body(cell: Cell, model: str, max_tokens: int, drawn: random.Random) -> dict[str, Any]:
    text = " ".join(drawn.choices(_WORDS.split(), k=_WORDS_OF_A_PROMPT))
    return {
        "prompt": text,
        **({} if cell.top_k is None else {"logprobs": cell.top_k}),
        "model": model,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": drawn.getrandbits(31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }

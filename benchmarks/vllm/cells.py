"""What is asked of both systems: cells of endpoint, top-k and streams, and the bodies of a cell's round."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

COMPLETIONS, CHAT = "completions", "chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
_FEWEST_REQUESTS = 8
"""A round's requests; fewer streams than that ask several times, one after the other."""
_WORDS = """\
market morning train station river library teacher children garden winter music harbour ship captain storm letter window
kitchen bread table machine engine wheel bird forest mountain summer road bridge island friend question"""
_WORDS_OF_A_PROMPT = 12


class Cell(NamedTuple):
    """One kind of request, asked by so many streams at once; without logprobs `top_k` is None."""

    endpoint: str
    top_k: int | None
    streams: int

    @property
    def top_k_name(self) -> str:
        """The top-k as the tables and the JSON name it."""
        return "none" if self.top_k is None else str(self.top_k)

    @property
    def in_words(self) -> str:
        """The cell for a line of text."""
        return f"{self.endpoint}, {self.streams} stream{'s' * (self.streams > 1)}, k = {self.top_k_name}"


def cells(endpoints: Sequence[str], top_ks: Sequence[int | None], streams: Sequence[int]) -> Iterator[Cell]:
    """Yield what is measured: all of completions; of chats the most streams, with the least and the most logprobs."""
    for endpoint in endpoints:
        whole = endpoint == COMPLETIONS
        for count in streams if whole else [max(streams)]:
            for top_k in top_ks if whole else dict.fromkeys((top_ks[0], top_ks[-1])):
                yield Cell(endpoint, top_k, count)


def bodies(cell: Cell, model: str, max_tokens: int, round_number: int) -> list[list[dict[str, Any]]]:
    """Return what each stream asks for, one body after the other; every prompt and seed of a run is another."""
    turns = max(1, _FEWEST_REQUESTS // cell.streams)
    drawn = random.Random(f"{round_number} {cell}")  # noqa: S311 - the same for both systems, and no secret
    return [[_body(cell, model, max_tokens, drawn) for _ in range(turns)] for _ in range(cell.streams)]


def _body(cell: Cell, model: str, max_tokens: int, drawn: random.Random) -> dict[str, Any]:
    text = " ".join(drawn.choices(_WORDS.split(), k=_WORDS_OF_A_PROMPT))
    return {
        **asked(cell.endpoint, cell.top_k, text),
        "model": model,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": drawn.getrandbits(31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def asked(endpoint: str, top_k: int | None, text: str) -> dict[str, Any]:
    """Return the prompt and the logprobs as an endpoint's fields."""
    if endpoint == COMPLETIONS:
        return {"prompt": text} | ({} if top_k is None else {"logprobs": top_k})
    messages = {"messages": [{"role": "user", "content": text}]}
    return messages | ({} if top_k is None else {"logprobs": True, "top_logprobs": top_k})

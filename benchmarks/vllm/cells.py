"""What is asked of all systems: cells of endpoint, top-k and streams, and the bodies of a cell's round."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.vllm.systems import System

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
        return "none" if self.top_k is None else str(self.top_k)

    @property
    def in_words(self) -> str:
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
    drawn = random.Random(f"{round_number} {cell}")  # noqa: S311 - the same for all systems, and no secret
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


Record = dict[str, Any]
"""How many answers there are, and in how many of them what is the same."""
_SAME_PROMPTS = (
    "the market is open from six in the morning",
    "harbour",
    "one train, two bridges and 3 letters",
    "Why?",
)
_SAME_TOP_KS = (None, 0, 5)
_SAME_TOKENS = 24
_TOLERANCE = 1e-4
"""What two logprobs may differ by and be called the same: prefixes that are cached make sums in another order."""


def compare(theirs: System, ours: System, endpoints: list[str], model: str) -> Record:
    """Return how many answers were asked for, and how many are the same in tokens, texts and logprobs."""
    record: Record = {"asked": 0, "same_tokens": 0, "same_texts": 0, "same_logprobs": 0, "tokens": 0, "worst": 0.0}
    for endpoint in endpoints:
        for top_k in _SAME_TOP_KS:
            for prompt in _SAME_PROMPTS:
                body = {
                    **asked(endpoint, top_k, prompt),
                    "model": model,
                    "max_tokens": _SAME_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                their_choice, our_choice = (each.get(PATHS[endpoint], body)["choices"][0] for each in (theirs, ours))
                _add(record, their_choice, our_choice, top_k or 0)
    return record


def _add(record: Record, theirs: dict[str, Any], ours: dict[str, Any], top_k: int) -> None:
    record["asked"] += 1
    record["tokens"] += len(theirs["token_ids"])
    record["same_tokens"] += theirs["token_ids"] == ours["token_ids"]
    record["same_texts"] += _text(theirs) == _text(ours)
    mine, others = _logprobs(ours, top_k), _logprobs(theirs, top_k)
    worst = max((abs(a - b) for a, b in zip(mine, others, strict=False)), default=0.0)
    record["worst"] = max(record["worst"], worst)
    record["same_logprobs"] += len(mine) == len(others) and worst <= _TOLERANCE


def _text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _logprobs(choice: dict[str, Any], top_k: int) -> list[float]:
    """Return each token's own, then the alternatives' that were asked for, the most probable first."""
    found = choice.get("logprobs")
    if not found:
        return []
    if "content" in found:
        own = [token["logprob"] for token in found["content"]]
        others = [[each["logprob"] for each in token["top_logprobs"]] for token in found["content"]]
    else:
        own = found["token_logprobs"]
        others = [list(each.values()) for each in found["top_logprobs"] or () if each]
    return [*own, *(value for each in others for value in sorted(each, reverse=True)[:top_k])]

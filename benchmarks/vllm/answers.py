"""Whether both systems answer the same: a few prompts at temperature 0, one after the other, before the rounds."""

from typing import Any

from benchmarks.vllm.cells import PATHS, asked
from benchmarks.vllm.systems import TOKENBUS, VLLM, System

Record = dict[str, Any]
"""How many answers there are, and in how many of them what is the same."""
_PROMPTS = ("the market is open from six in the morning", "harbour", "one train, two bridges and 3 letters", "Why?")
_TOP_KS = (None, 0, 5)
_TOKENS = 24
_TOLERANCE = 1e-4
"""What two logprobs may differ by and be called the same: prefixes that are cached make sums in another order."""


def compare(systems: dict[str, System], endpoints: list[str], model: str) -> Record:
    """Return how many answers were asked for, and how many are the same in tokens, texts and logprobs."""
    record: Record = {"asked": 0, "same_tokens": 0, "same_texts": 0, "same_logprobs": 0, "tokens": 0, "worst": 0.0}
    for endpoint in endpoints:
        for top_k in _TOP_KS:
            for prompt in _PROMPTS:
                body = {
                    **asked(endpoint, top_k, prompt),
                    "model": model,
                    "max_tokens": _TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                theirs, ours = (systems[name].get(PATHS[endpoint], body)["choices"][0] for name in (VLLM, TOKENBUS))
                _add(record, theirs, ours, top_k or 0)
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

"""Made events: a short text whose tokens, drafts and probabilities are known."""

import math
import random
from typing import Any

BEGIN = {"request": "00c0ffee00c0ffee", "model": "made", "prompt_tokens": 5}
Draft = tuple[str, float, bool]


def _id_of(text: str) -> int:
    return sum(text.encode())


def token(text: str, probability: float, *, rank: int = 1) -> dict[str, Any]:
    """Return a token with two alternatives; of rank 1 it is the first of them, else it is none of them."""
    others = [(" one", 0.5), (" other", 0.25)] if rank > 1 else [(text, probability), (" other", (1 - probability) / 2)]
    return {
        "id": _id_of(text),
        "text": text,
        "logprob": math.log(probability),
        "rank": rank,
        "alternatives": [[_id_of(other), other, math.log(max(share, 1e-9))] for other, share in others],
    }


def row(step: int, position: int, tokens: list[dict[str, Any]], drafts: list[Draft] | None = None) -> dict[str, Any]:
    proposed = [
        {"id": _id_of(text), "text": text, "logprob": math.log(probability), "accepted": accepted}
        for text, probability, accepted in drafts or []
    ]
    origin = {"worker": "worker-0", "epoch": "77", "step": step, "position": position}
    return {**origin, "status": "active", "verified": len(proposed), "tokens": tokens, "draft": proposed}


STORY = [
    row(11, 0, [token("There", 0.62)]),
    row(12, 1, [token(" is", 0.97), token(" something", 0.74), token(" new", 0.004, rank=37)], [(" is", 0.9, True), (" something", 0.6, True), (" alive", 0.8, False)]),  # noqa: E501
    row(13, 4, [token(" in", 0.41)], [(" to", 0.5, False), (" the", 0.7, False)]),
    row(14, 5, [token(" the", 0.93), token(" dough", 0.15), token(".\n", 0.55)], [(" the", 0.8, True), (" dough", 0.2, True)]),  # noqa: E501
]  # fmt: skip
"""Eight tokens in four steps: "There is something new in the dough." and a line's end."""
STORY_TEXT = "There is something new in the dough.\n"
STORY_TOKENS = 8


def long_story(rows: int) -> list[dict[str, Any]]:
    """Return rows of four tokens each, with probabilities of all kinds and a draft of three."""
    chance = random.Random(7)  # noqa: S311 - no secret
    words = [" bread", " water", " because", " it", " rises", " slowly", ",", ".", "\n", " every", " morning"]
    made = []
    for step in range(rows):
        texts = chance.choices(words, k=4)
        tokens = [token(text, chance.uniform(0.001, 0.999)) for text in texts]
        drafts = [(text, chance.uniform(0.1, 0.9), True) for text in texts[:3]]
        made.append(row(step + 1, step * 4, tokens, drafts))
    return made


def worker(name: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - a field has any value
    plain = {
        "role": "mixed", "model": "made", "epoch": "77", "connected": True, "open_requests": 1, "lag": 0, "gaps": 0,
        "token_scores": ["entropies"],
    }  # fmt: skip
    return {"id": name, **plain, "replays": 0, "tokens": 1234, "steps": 600, "acceptance_by_head": [0.8, 0.5], **fields}

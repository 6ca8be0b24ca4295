"""An example of a trainer that reads whole steps and makes arrays of rollouts, as another company would write it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import tokenbus


@dataclass
class Rollout:
    """The answer to one prompt: an array of token ids and an array of their logprobs for each step."""

    token_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    status: tokenbus.RowStatus | None = None
    error: str = ""


@dataclass
class Batch:
    """One line of tokens for each rollout, padded to the longest; `mask` is false for padding."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray


async def rollouts(client: tokenbus.Client, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Rollout]:
    """Sample and return an answer to each prompt, including answers that ended with an error."""
    async with client.steps() as steps:
        found = {client.submit(prompt, max_tokens=max_tokens, top_logprobs=0): Rollout() for prompt in prompts}
        open_requests = len(found)
        while open_requests:
            item = await anext(steps)
            if isinstance(item, tokenbus.StepRows):
                for row in item.target.rows():
                    found[row.request_id].token_ids.append(row.token_ids)
                    found[row.request_id].logprobs.append(row.logprobs)
            else:
                rollout = found[item.request_id]
                rollout.status, rollout.error = item.status, str(item.error or "")
                open_requests -= 1
    return list(found.values())


def batch_of(found: Sequence[Rollout]) -> Batch:
    """Return the rollouts that ended without an error as one batch."""
    whole = [rollout for rollout in found if not rollout.error]
    sizes = [sum(map(len, rollout.token_ids)) for rollout in whole]
    shape = len(whole), max(sizes, default=0)
    batch = Batch(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.bool_))
    for line, (rollout, size) in enumerate(zip(whole, sizes, strict=True)):
        if size:
            batch.token_ids[line, :size] = np.concatenate(rollout.token_ids)
            batch.logprobs[line, :size] = np.concatenate(rollout.logprobs)
            batch.mask[line, :size] = True
    return batch


def importance_ratios(batch: Batch, of_trainer: np.ndarray) -> np.ndarray:
    """Return each token's probability in the trainer's model divided by the sampler's, and 1 for padding."""
    return np.where(batch.mask, np.exp(of_trainer - batch.logprobs), 1.0)

"""Prompts: the scores of prompts' tokens, as vLLM has them when a prompt is computed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tokenbus.engines.prompt_scoring import LEAST
from tokenbus.engines.vllm.columns import in_order
from tokenbus_contracts import PromptScores
from tokenbus_contracts.generated.request_pb2 import Generate


class _Wanted(NamedTuple):
    key: int
    first: int
    alternatives: int
    are_named: bool
    """Whether these are given ids, in the place of the most probable."""


class PromptsToScore:
    """The requests whose prompts are to be scored, by vLLM's names for them, until they are."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Wanted] = {}
        self.alone: set[str] = set()
        """The requests that want the scores and no token, which vLLM makes in any case."""

    def add(self, name: str, generate: Generate) -> None:
        """Add a request that vLLM has from now on, if it asks for scores."""
        if generate.HasField("prompt_scoring"):
            asked = generate.prompt_scoring
            first, given = max(1, asked.first_position), len(asked.token_ids)
            self._wanted[name] = _Wanted(generate.request_id, first, given or asked.top_logprobs, given > 0)
            if asked.without_generation:
                self.alone.add(name)

    def remove(self, name: str) -> None:
        """Forget a request that has ended."""
        self._wanted.pop(name, None)
        self.alone.discard(name)

    def taken(self, computed: Mapping[str, Any]) -> list[PromptScores]:
        """Return the scores of the prompts that a step has computed to their ends, from its LogprobsTensors."""
        found = []
        for name, tensors in computed.items():
            wanted = self._wanted.pop(name, None) if tensors is not None else None
            if wanted is not None:
                found.append(_scores(wanted, tensors))
        return found


def _scores(wanted: _Wanted, tensors: Any) -> PromptScores:  # noqa: ANN401 - vLLM's LogprobsTensors
    """Return a prompt's scores; vLLM has a line for each of its tokens but the first."""
    count = len(tensors.logprobs)
    lines, width = slice(wanted.first - 1, None), slice(1, 1 + wanted.alternatives)
    ids, values = (np.asarray(each)[lines] for each in (tensors.logprob_token_ids, tensors.logprobs))
    others, logprobs = ids[:, width], values[:, width]
    if wanted.alternatives and len(ids) and not wanted.are_named:
        others, logprobs = in_order(others, logprobs, np.full(len(ids), wanted.alternatives))
    return PromptScores(
        wanted.key,
        min(wanted.first, max(1, count + 1)),
        count + 1,
        ids[:, 0].astype(np.uint32),
        np.maximum(values[:, 0], LEAST).astype(np.float32),
        np.asarray(tensors.selected_token_ranks)[lines].astype(np.uint32),
        others.astype(np.uint32),
        np.maximum(logprobs, LEAST).astype(np.float32),
        are_named=wanted.are_named,
    )

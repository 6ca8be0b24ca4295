"""Prompts: converts vLLM's scores of prompt tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tokenbus.engines.prompt_scoring import LEAST
from tokenbus.engines.vllm.columns import in_order
from tokenbus_contracts import PromptScores
from tokenbus_contracts.generated.request_pb2 import Generate


class _Wanted(NamedTuple):
    request_id: int
    first: int
    alternatives: int
    are_named: bool
    """Whether the request named the ids of the alternatives, instead of their number."""


class PromptsToScore:
    """Requests whose prompts are not scored yet, with vLLM's names of the requests as keys."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Wanted] = {}
        self.alone: set[str] = set()
        """Requests that ask only for prompt scores. vLLM still computes a token for these requests."""

    def add(self, name: str, generate: Generate) -> None:
        """Add a request if it asks for prompt scores."""
        if generate.HasField("prompt_scoring"):
            asked = generate.prompt_scoring
            first, given = max(1, asked.first_position), len(asked.token_ids)
            self._wanted[name] = _Wanted(generate.request_id, first, given or asked.top_logprobs, given > 0)
            if asked.without_generation:
                self.alone.add(name)

    def remove(self, name: str) -> None:
        self._wanted.pop(name, None)
        self.alone.discard(name)

    def taken(self, computed: Mapping[str, Any]) -> list[PromptScores]:
        """Return the scores of the prompts that a step has completed."""
        found = []
        for name, tensors in computed.items():
            wanted = self._wanted.pop(name, None) if tensors is not None else None
            if wanted is not None:
                found.append(_scores(wanted, tensors))
        return found


def _scores(wanted: _Wanted, tensors: Any) -> PromptScores:  # noqa: ANN401 - vLLM's LogprobsTensors
    """Return a prompt's scores. vLLM's tensors have a line for each token except the first."""
    count = len(tensors.logprobs)
    lines, width = slice(wanted.first - 1, None), slice(1, 1 + wanted.alternatives)
    ids, values = (np.asarray(each)[lines] for each in (tensors.logprob_token_ids, tensors.logprobs))
    others, logprobs = ids[:, width], values[:, width]
    if wanted.alternatives and len(ids) and not wanted.are_named:
        others, logprobs = in_order(others, logprobs, np.full(len(ids), wanted.alternatives))
    return PromptScores(
        wanted.request_id,
        min(wanted.first, max(1, count + 1)),
        count + 1,
        ids[:, 0].astype(np.uint32),
        np.maximum(values[:, 0], LEAST).astype(np.float32),
        np.asarray(tensors.selected_token_ranks)[lines].astype(np.uint32),
        others.astype(np.uint32),
        np.maximum(logprobs, LEAST).astype(np.float32),
        are_named=wanted.are_named,
    )

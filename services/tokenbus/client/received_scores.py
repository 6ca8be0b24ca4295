"""ReceivedScores: the received chunks of prompt scores, in order and without repetitions."""

from dataclasses import replace

import numpy as np

from tokenbus_contracts import ContractError, PromptScores, Rule
from tokenbus_contracts.generated.request_pb2 import Generate, PromptScoresChunk


class ReceivedScores:
    """The received prompt scores of one request, without chunks that a restarted processor has repeated."""

    def __init__(self, generate: Generate) -> None:
        self._next = max(1, generate.prompt_scoring.first_position)
        self._prompt = np.array(generate.tokens.token_ids, np.uint32)
        self._chunks: list[PromptScores] = []

    def add(self, message: PromptScoresChunk) -> bool:
        """Add a chunk, and return whether it was the last; raises ContractError if it is not the next chunk."""
        chunk = PromptScores.of(message)
        if chunk.end <= self._next and self._chunks:
            return False
        # A first position beyond the prompt counts as the end of the prompt.
        expected = min(self._next, chunk.prompt_tokens)
        if chunk.position != expected:
            raise ContractError(
                "prompt_scores.position", f"{expected}, the next position", chunk.position, rule=Rule.MIN
            )
        if self._prompt.size and not self._is_of_prompt(chunk):
            limit = "those of the request's prompt"
            raise ContractError("prompt_scores.token_ids", limit, "others", rule=Rule.AGREEMENT)
        if self._chunks and _alternatives(chunk) != _alternatives(self._chunks[-1]):
            limit = "as many, or the same named, as in the chunk before"
            raise ContractError("prompt_scores.alternatives", limit, "others", rule=Rule.AGREEMENT)
        self._chunks.append(chunk)
        self._next = chunk.end
        return chunk.is_last

    def _is_of_prompt(self, chunk: PromptScores) -> bool:
        own = self._prompt[chunk.position : chunk.end]
        return chunk.prompt_tokens == self._prompt.size and np.array_equal(chunk.token_ids, own)

    def scores(self, request_id: int) -> PromptScores:
        whole = self._chunks[0] if len(self._chunks) == 1 else PromptScores.joined(self._chunks)
        self._chunks = [whole]
        return replace(whole, request_id=request_id)


def _alternatives(chunk: PromptScores) -> tuple[int, bytes]:
    """Return the number of alternatives per token, and the ids of the alternatives if the request named them."""
    return chunk.alternative_logprobs.shape[1], chunk.alternative_token_ids[:1].tobytes() if chunk.are_named else b""

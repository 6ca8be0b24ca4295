"""PromptScores: the logprobs of a prompt's tokens, as arrays and as chunks in a stream."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.request_pb2 import PromptScoresChunk

Ids = npt.NDArray[np.uint32]
Values = npt.NDArray[np.float32]
_MOST_BYTES = 61_440
"""The maximum total size of a chunk's arrays in bytes, so that the chunk fits into an event."""
_ITEM_BYTES = 4
_TOKEN_BYTES = 3 * _ITEM_BYTES
_ARRAYS = ("token_ids", "logprobs", "ranks", "alternative_logprobs", "alternative_token_ids")


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """The scores of consecutive tokens of a prompt. Position 0 has no score.

    Example:
        async with tokenbus.connect(address) as client:
            generation = client.generate([1, 2, 3], max_tokens=1, prompt_logprobs=2)
            async for token in generation:
                print(token.id)
            scores = generation.prompt_scores
            print(scores.position, scores.logprobs, scores.alternative_token_ids)
    """

    request_id: int
    position: int
    prompt_tokens: int
    """The prompt's length in tokens."""
    token_ids: Ids
    """The ids of the scored tokens."""
    logprobs: Values
    ranks: Ids
    """The ranks of the scored tokens: 1 for the most probable token."""
    alternative_token_ids: Ids
    """For each token, the most probable tokens in order, or the tokens that the request named."""
    alternative_logprobs: Values
    are_named: bool = False
    """Whether the request named the alternatives."""

    @property
    def end(self) -> int:
        """The position after the last scored token."""
        return self.position + int(self.token_ids.size)

    @property
    def is_last(self) -> bool:
        """Whether these scores reach the end of the prompt."""
        return self.end >= self.prompt_tokens

    def chunks(self) -> Iterator[PromptScoresChunk]:
        """Yield the scores as one or more messages. If there are no scores, yield one message without tokens."""
        alternatives = self.alternative_logprobs.shape[1]
        line = alternatives * _ITEM_BYTES
        once, each = (line, line) if self.are_named else (0, 2 * line)
        at_once = (_MOST_BYTES - once) // (_TOKEN_BYTES + each)
        for begin in range(0, max(1, self.token_ids.size), at_once):
            part = slice(begin, begin + at_once)
            ids = self.alternative_token_ids[part]
            yield PromptScoresChunk(
                request_id=self.request_id,
                position=self.position + begin,
                prompt_tokens=self.prompt_tokens,
                token_ids=_bytes(self.token_ids[part], "<u4"),
                logprobs=_bytes(self.logprobs[part], "<f4"),
                ranks=_bytes(self.ranks[part], "<u4"),
                alternatives=alternatives,
                alternative_token_ids=_bytes(ids[:1] if self.are_named else ids, "<u4"),
                alternative_logprobs=_bytes(self.alternative_logprobs[part], "<f4"),
                alternatives_are_named=self.are_named,
            )

    @classmethod
    def of(cls, message: PromptScoresChunk) -> "PromptScores":
        """Return the scores in a chunk. A ContractError names a value that breaks the contract."""
        count, alternatives = len(message.token_ids) // _ITEM_BYTES, message.alternatives
        lines = min(1, count) if message.alternatives_are_named else count
        ids = _array("alternative_token_ids", message.alternative_token_ids, "<u4", lines, alternatives)
        read = cls(
            message.request_id,
            message.position,
            message.prompt_tokens,
            _array("token_ids", message.token_ids, "<u4", count),
            _array("logprobs", message.logprobs, "<f4", count),
            _array("ranks", message.ranks, "<u4", count),
            np.broadcast_to(ids, (count, alternatives)) if message.alternatives_are_named else ids,
            _array("alternative_logprobs", message.alternative_logprobs, "<f4", count, alternatives),
            message.alternatives_are_named,
        )
        read.check()
        return read

    def check(self) -> None:
        """Raise a ContractError for values that no prompt can have."""
        if self.end > max(self.prompt_tokens, 1) and self.token_ids.size:
            limit = f"at most prompt_tokens, {self.prompt_tokens}, the end of the chunk"
            raise ContractError("prompt_scores.position", limit, self.end, rule=Rule.MAX)
        for name, values in (("logprobs", self.logprobs), ("alternative_logprobs", self.alternative_logprobs)):
            if not np.isfinite(values).all():
                raise ContractError(f"prompt_scores.{name}", "finite numbers", "others", rule=Rule.FINITE)
        if self.ranks.size and not self.ranks.min():
            raise ContractError("prompt_scores.ranks", 1, 0, rule=Rule.MIN)

    @classmethod
    def joined(cls, chunks: Sequence["PromptScores"]) -> "PromptScores":
        """Return the joined scores of consecutive chunks."""
        last = chunks[-1]
        names = _ARRAYS[:-1] if last.are_named else _ARRAYS
        whole: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in chunks]) for name in names}
        if last.are_named:  # all tokens have the same alternatives
            whole[_ARRAYS[-1]] = np.broadcast_to(last.alternative_token_ids[:1], whole["alternative_logprobs"].shape)
        return replace(chunks[0], **whole)


def _bytes(values: npt.NDArray[Any], kind: str) -> bytes:
    return np.ascontiguousarray(values, kind).tobytes()


def _array(name: str, data: bytes, kind: str, *shape: int) -> Any:  # noqa: ANN401 - an array of either type
    size = _ITEM_BYTES * math.prod(shape)
    if len(data) != size:
        raise ContractError(f"prompt_scores.{name}", f"{size} bytes, for {shape}", len(data), rule=Rule.LENGTH)
    return np.frombuffer(data, kind).reshape(shape)

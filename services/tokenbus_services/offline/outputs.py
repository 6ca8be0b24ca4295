"""Outputs: what a call of `LLM.generate` returns, as arrays over all of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import RowStatus
from tokenbus_services.offline.texts import Texts

if TYPE_CHECKING:
    import pyarrow as pa

_REASONS = {RowStatus.FINISHED_STOP: "stop", RowStatus.FINISHED_LENGTH: "length"}


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One sample of one prompt. Its arrays are views of those of its `Outputs`.

    Example:
        with tokenbus.LLM(engine="ngram") as llm:
            (output,) = llm.generate(["In the evening"], max_tokens=4, top_logprobs=0, seed=1)
        assert output.token_ids.size == output.logprobs.size <= 4
    """

    prompt_index: int
    """Which prompt of the call it is of, from 0."""
    sample: int
    """Which of the prompt's `n` samples it is, from 0."""
    token_ids: npt.NDArray[np.uint32]
    """Its tokens."""
    logprobs: npt.NDArray[np.float32] | None
    """Each token's logprob; None where no request of the call asked for logprobs."""
    ranks: npt.NDArray[np.uint32] | None
    """Each token's place by probability, from 1; None as above."""
    alternative_token_ids: npt.NDArray[np.uint32]
    """A line for each token: the most probable tokens, as many as its request asked for."""
    alternative_logprobs: npt.NDArray[np.float32]
    """Their logprobs, the largest first."""
    finish_reason: str
    """`stop` or `length`."""
    stop_reason: int | str | None
    """Which of its request's own stops ended it: the id of a stop token, or a text of `stop`; None where none did."""
    _texts: Texts = field(repr=False)

    @property
    def text(self) -> str:
        """The text of its tokens, without special tokens and without the stop that ended it, decoded at each look.

        Raises ValueError if the engine has no tokenizer, or the model's cannot be loaded.
        """
        is_stopped, ids = self.finish_reason == "stop", self.token_ids.tolist()
        return self._texts.text(self.prompt_index, ids, self.stop_reason, is_stopped=is_stopped)


@dataclass(frozen=True, slots=True, eq=False)
class Outputs(Sequence[Output]):
    """A sequence of `Output`, `n` for each prompt in the order of the prompts, above arrays over all tokens.

    The tokens of output `i` are those from `offsets[i]` to before `offsets[i + 1]`, in each array.

    Example:
        with tokenbus.LLM(engine="ngram") as llm:
            outputs = llm.generate(["In the evening", "At sea"], n=2, max_tokens=4, top_logprobs=3, seed=1)
        assert len(outputs) == 4 and outputs[3].prompt_index == 1
        assert outputs.logprobs.dtype == "float32" and outputs.logprobs.size == outputs.offsets[-1]
        mean = outputs.logprobs.mean()
    """

    n: int
    """How many samples each prompt has."""
    offsets: npt.NDArray[np.int64]
    """Where each output's tokens begin, and at the end how many tokens there are."""
    token_ids: npt.NDArray[np.uint32]
    """The tokens."""
    logprobs: npt.NDArray[np.float32] | None
    """Each token's logprob, NaN where its request asked for none; None where no request asked for any."""
    ranks: npt.NDArray[np.uint32] | None
    """Each token's place by probability, from 1; 0 and None as above."""
    alternative_token_ids: npt.NDArray[np.uint32]
    """A line for each token, as long as the largest `top_logprobs`: the most probable tokens; 0 where fewer came."""
    alternative_logprobs: npt.NDArray[np.float32]
    """Their logprobs, the largest first; NaN where fewer came."""
    top_ks: npt.NDArray[np.uint8]
    """How many alternatives each output's tokens have."""
    statuses: npt.NDArray[np.uint8]
    """How each output ended, as a `RowStatus`."""
    _stops: Mapping[int, int | str] = field(repr=False)
    """By output, which of its request's own stops ended it."""
    _texts: Texts = field(repr=False)

    def __len__(self) -> int:
        """Return how many outputs there are: the prompts times `n`."""
        return self.statuses.size

    @overload
    def __getitem__(self, index: int) -> Output: ...
    @overload
    def __getitem__(self, index: slice) -> list[Output]: ...
    def __getitem__(self, index: int | slice) -> Output | list[Output]:
        """Return an output, or several."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        begin, end = self.offsets[place : place + 2].tolist()
        top_k = int(self.top_ks[place])
        prompt_index, sample = divmod(place, self.n)
        return Output(
            prompt_index,
            sample,
            self.token_ids[begin:end],
            None if self.logprobs is None else self.logprobs[begin:end],
            None if self.ranks is None else self.ranks[begin:end],
            self.alternative_token_ids[begin:end, :top_k],
            self.alternative_logprobs[begin:end, :top_k],
            _REASONS[RowStatus(self.statuses[place])],
            self._stops.get(place),
            self._texts,
        )

    def to_arrow(self) -> "pa.Table":
        """Return a table with a row for each token; needs the extra arrow.

        Its columns are `prompt_index`, `sample`, `position` and `token_id`; `logprob` and `rank` where a request asked
        for logprobs, null where its own did not; `alternative_token_ids` and `alternative_logprobs`, lists, where one
        asked for alternatives.

        Example:
            with tokenbus.LLM(engine="ngram") as llm:
                table = llm.generate(["In the evening"], max_tokens=4, top_logprobs=2).to_arrow()
            print(table.column_names, table.num_rows)
        """
        import pyarrow as pa  # noqa: PLC0415 - an extra

        counts = np.diff(self.offsets)
        of_output = np.repeat(np.arange(len(self), dtype=np.int32), counts)
        begins = np.repeat(self.offsets[:-1], counts)
        columns: dict[str, Any] = {
            "prompt_index": of_output // self.n,
            "sample": of_output % self.n,
            "position": (np.arange(self.token_ids.size) - begins).astype(np.int32),
            "token_id": self.token_ids,
        }
        if self.logprobs is not None and self.ranks is not None:
            lacks = np.isnan(self.logprobs)
            columns |= {"logprob": pa.array(self.logprobs, mask=lacks), "rank": pa.array(self.ranks, mask=lacks)}
        if width := self.alternative_token_ids.shape[1]:
            top_ks = np.repeat(self.top_ks, counts)
            has = np.arange(width) < top_ks[:, None]
            ends = np.concatenate([[0], np.cumsum(top_ks, dtype=np.int64)])
            columns |= {
                name: pa.LargeListArray.from_arrays(ends, values[has])
                for name, values in (
                    ("alternative_token_ids", self.alternative_token_ids),
                    ("alternative_logprobs", self.alternative_logprobs),
                )
            }
        return pa.table(columns)

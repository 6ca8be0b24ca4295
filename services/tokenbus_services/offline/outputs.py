"""Outputs: what a call of `LLM.generate` returns, as arrays over all of its tokens; Collector makes them of steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import Extra, Extras, LogprobBatch, PromptScores, RowStatus, Scoring
from tokenbus_contracts.schema import COLUMN
from tokenbus_services.client import RequestEnd
from tokenbus_services.delivery.stop_strings import RunningText, Stopping
from tokenbus_services.delivery.weight_spans import WeightSpan
from tokenbus_services.plugins import Tokenizer, load_tokenizer
from tokenbus_services.token_columns import BATCH_EXTRAS, ExtraColumns, extra_columns, lists_of

if TYPE_CHECKING:
    import pyarrow as pa

    from tokenbus_services.model_files import ModelTokenizer

Array = npt.NDArray[Any]
_OF_ROWS = ("request_keys", "positions", "token_counts", "scorings", "top_ks")
_OF_TOKENS = ("token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs")
_NO_TEXT = "numbers"
_REASONS = {RowStatus.FINISHED_STOP: "stop", RowStatus.FINISHED_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Texts:
    """Makes texts of tokens."""

    tokenizer: str
    """The tokenizer's name, as an engine's kind has it, or a model's folder, with a slash."""
    stoppings: Sequence[Stopping]
    """What ends the text of each prompt's outputs; a single one is of all."""

    def text(
        self, prompt_index: int, token_ids: Sequence[int], stop_reason: int | str | None, *, is_stopped: bool
    ) -> str:
        """Return the text of an output; `is_stopped` says that it ended at a stop and not at its length."""
        stopping = self.stoppings[prompt_index if len(self.stoppings) > 1 else 0]
        tokenizer = tokenizer_named(self.tokenizer)
        if isinstance(stop_reason, int) and not stopping.is_included:
            token_ids = token_ids[:-1]
        size = tokenizer.vocabulary_size  # a model may have more ids than its tokenizer
        pieces = [tokenizer.token_bytes(token_id) if token_id < size else b"" for token_id in token_ids]
        running = RunningText(stopping if is_stopped else None)
        text = running.add_until_stop(pieces)[0] if stopping.texts else running.add(b"".join(pieces))
        return text + running.end()


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
    prompt_scores: PromptScores | None
    """What the model says of the prompt's tokens, as arrays; None where its request did not ask for it."""
    weight_spans: tuple[WeightSpan, ...]
    """Which versions of the weights computed its tokens; empty while they have had none."""
    extras: Extras | None
    """What its request asked for of each token beside its logprob; None: nothing, or some was dropped on the way."""
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
    _ends: Mapping[int, RequestEnd] = field(repr=False)
    """How each output ended."""
    _extras: Mapping[int, Sequence[Extras]] = field(repr=False)
    """Those of each output's rows that have any."""
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
            self._ends[place].stop,
            self._ends[place].prompt_scores,
            self._ends[place].weight_spans,
            Extras.joined(self._extras[place]) if place in self._extras else None,
            self._texts,
        )

    def to_arrow(self) -> "pa.Table":
        """Return a table with a row for each token; needs the extra arrow.

        Its columns are `prompt_index` and `sample`, and those of a recording's table that outputs have: `position`,
        `token_id`, `logprob` and `rank`, null where the request did not ask for logprobs, the lists
        `alternative_token_ids` and `alternative_logprobs`, and what a request may ask for beside them, from
        `other_logprob` to `mask_token_ids`, null where it did not.

        Example:
            with tokenbus.LLM(engine="ngram") as llm:
                table = llm.generate(["In the evening"], max_tokens=4, top_logprobs=2).to_arrow()
            print(table.column_names, table.num_rows)
        """
        import pyarrow as pa  # noqa: PLC0415 - an extra

        from tokenbus_services.token_table import EXTRAS, SCHEMA, column_of, extra_arrays  # noqa: PLC0415 - as above

        counts = np.diff(self.offsets)
        of_output = np.repeat(np.arange(len(self), dtype=np.int32), counts)
        top_ks = np.repeat(self.top_ks, counts)
        has = np.arange(self.alternative_token_ids.shape[1]) < top_ks[:, None]
        logprobs = np.full(self.token_ids.size, np.nan) if self.logprobs is None else self.logprobs
        columns: dict[str, Any] = {
            "position": np.arange(self.token_ids.size) - np.repeat(self.offsets[:-1], counts),
            "token_id": self.token_ids,
            "logprob": logprobs,
            "rank": np.zeros_like(self.token_ids) if self.ranks is None else self.ranks,
            "alternative_token_ids": lists_of(top_ks, self.alternative_token_ids[has]),
            "alternative_logprobs": lists_of(top_ks, self.alternative_logprobs[has]),
        }
        ours = pa.schema([pa.field(name, pa.int32(), nullable=False) for name in ("prompt_index", "sample")])
        table: dict[str, Any] = {"prompt_index": of_output // self.n, "sample": of_output % self.n}
        table |= {name: column_of(name, values) for name, values in columns.items()}
        table |= zip(EXTRAS, extra_arrays(self._extra_columns(), self.token_ids.size), strict=True)
        return pa.table(table, pa.schema([*ours, *map(SCHEMA.field, (*columns, *EXTRAS))]))

    def _extra_columns(self) -> ExtraColumns | None:
        if not self._extras:
            return None
        found = {place: Extras.joined(parts) for place, parts in sorted(self._extras.items())}
        of_rows = np.zeros((3, len(self)), np.uint32)
        for place, each in found.items():
            kinds = Extra.OTHER_LOGPROB * bool(each.other_logprobs.size) | Extra.ENTROPY * bool(each.entropies.size)
            of_rows[:, place] = kinds, each.given_token_ids.size, each.mask_bound
        of_tokens = [
            np.concatenate([getattr(each, name).ravel() for each in found.values()])
            for name in BATCH_EXTRAS[len(of_rows) :]
        ]
        return extra_columns(np.diff(self.offsets), [*of_rows, *of_tokens])


class Collector:
    """Keeps rows as they come, without a Python object for a row or a token, and puts them in order at the end.

    The requests' ids follow one another, so that a row's id says which output it belongs to.
    """

    def __init__(self, first_id: int, count: int) -> None:
        self._first_id = first_id
        # A bytearray grows in place where it can, and becomes an array without a copy.
        self._columns = {name: bytearray() for name in (*_OF_ROWS, *_OF_TOKENS)}
        self._statuses = np.full(count, RowStatus.ACTIVE, np.uint8)
        self._ends: dict[int, RequestEnd] = {}
        self._extras: defaultdict[int, list[Extras]] = defaultdict(list)
        self._shed: set[int] = set()
        self.tokens = 0
        """How many tokens came."""

    def add(self, rows: LogprobBatch) -> None:
        """Add the rows of a step; those of one request come in order."""
        for name, column in self._columns.items():
            column.extend(getattr(rows, name))
        self.tokens += rows.token_ids.size
        for row in rows.rows() if rows.has_extras else ():
            if row.extras is not None:
                self._extras[row.key - self._first_id].append(row.extras)
        for key in rows.request_keys[rows.scorings == Scoring.SHED].tolist():
            self._shed.add(key - self._first_id)

    def end(self, ended: RequestEnd, status: RowStatus) -> None:
        """Note how a request ended."""
        place = ended.request_id - self._first_id
        self._statuses[place], self._ends[place] = status, ended

    def outputs(self, n: int, texts: Texts) -> Outputs:
        """Return the outputs, `n` of each prompt."""
        keys, positions, counts, scorings, row_top_ks = map(self._column, _OF_ROWS)
        of_output = (keys - np.uint64(self._first_id)).astype(np.intp)
        offsets = np.zeros(self._statuses.size + 1, np.int64)
        np.add.at(offsets, of_output + 1, counts)
        np.cumsum(offsets, out=offsets)
        top_ks = np.zeros(self._statuses.size, np.uint8)
        np.maximum.at(top_ks, of_output, row_top_ks)

        # Where each token belongs, and how many alternatives it has.
        begins = np.cumsum(counts, dtype=np.intp) - counts
        places = np.repeat(offsets[of_output] + positions - begins, counts) + np.arange(self.tokens)
        token_top_ks = np.repeat(row_top_ks, counts)
        scored = places[np.repeat(scorings != Scoring.NONE, counts)]
        table = (self.tokens, int(top_ks.max(initial=0)))

        token_ids = np.zeros(self.tokens, np.uint32)
        token_ids[places] = self._column("token_ids")
        logprobs = ranks = None
        if scored.size:
            logprobs, ranks = np.full(self.tokens, np.nan, np.float32), np.zeros(self.tokens, np.uint32)
            logprobs[scored] = self._column("logprobs")
            ranks[scored] = self._column("ranks")
        alternative_token_ids, alternative_logprobs = np.zeros(table, np.uint32), np.full(table, np.nan, np.float32)
        _put_lines(alternative_token_ids, places, token_top_ks, self._column("alternative_token_ids"))
        _put_lines(alternative_logprobs, places, token_top_ks, self._column("alternative_logprobs"))
        alternatives = alternative_token_ids, alternative_logprobs
        return Outputs(
            n,
            offsets,
            token_ids,
            logprobs,
            ranks,
            *alternatives,
            top_ks,
            self._statuses,
            self._ends,
            {place: parts for place, parts in self._extras.items() if place not in self._shed},
            texts,
        )

    def _column(self, name: str) -> Array:
        """Return a column, which is let go of here."""
        return np.frombuffer(self._columns.pop(name), COLUMN[name].dtype)


def _put_lines(into: Array, places: npt.NDArray[np.intp], top_ks: npt.NDArray[np.uint8], values: Array) -> None:
    """Put each token's alternatives, which follow one another in `values`, into the token's line."""
    begins = np.cumsum(top_ks, dtype=np.intp) - top_ks
    for top_k in np.unique(top_ks[top_ks > 0]).tolist():
        tokens = np.flatnonzero(top_ks == top_k)
        is_all = tokens.size * top_k == values.size
        lines = values.reshape(-1, top_k) if is_all else values[begins[tokens][:, None] + np.arange(top_k)]
        into[places[tokens], :top_k] = lines


@cache
def tokenizer_named(name: str) -> Tokenizer:
    """Return the tokenizer of an engine; a ValueError says why there is none."""
    if name == _NO_TEXT:
        raise ValueError("text: an engine with a tokenizer, got one whose tokens have no text")
    return model_tokenizer(name) if "/" in name else load_tokenizer(name)


@cache
def model_tokenizer(folder: str) -> "ModelTokenizer":
    """Return the tokenizer of a model's folder; a ValueError says why there is none."""
    try:
        from tokenbus_services.model_files import ModelTokenizer  # noqa: PLC0415 - the extra models may be missing
    except ImportError as error:
        raise ValueError(f"text: a model's own tokenizer needs the extra models: {error}") from None
    return ModelTokenizer(Path(folder))

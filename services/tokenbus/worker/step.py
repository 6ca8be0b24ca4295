"""StepArrays: what an engine's step computed, as arrays of any framework; and Launches, for steps that overlap."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenbus_contracts import BatchKind, ContractError, PromptScores, Rule, SpeculativeMethod, StepPhase, ValueKind

Array = Any
"""An array of numpy, paddle, torch, cupy or anything else that numpy can convert, on any device; or a sequence."""


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """One batch of a step, the target's or the draft's, as the engine has it; StepAssembler makes batches of it.

    Arrays "of tokens" are either flat, the tokens of all rows one after the other as `token_counts` says, or padded:
    one line for each row, its tokens first; the padding is ignored.

    Example:
        import numpy as np

        step = tokenbus.StepArrays(
            request_ids=np.array([7, 9], np.uint64), positions=[0, 0], token_counts=[2, 1], token_ids=[4, 2, 1]
        )
    """

    request_ids: Array
    """Of rows: the request's id."""
    positions: Array
    """Of rows: the position of the first token in the request's output; of a row without tokens, of the next one."""
    token_counts: Array
    """Of rows: how many tokens it got in this step."""
    token_ids: Array
    """Of tokens."""
    statuses: Array | None = None
    """Of rows: RowStatus; if absent, ACTIVE with tokens and IDLE without."""
    stops: Array | None = None
    """Of rows: where one is FINISHED_STOP, which of its request's own stops ended it; if absent, it is not known.

    1: a stop token, its last one; from 2 on, the text at that place less two in `sampling.stop`; 0: none of them.
    """
    kept_counts: Array | None = None
    """Of rows: how many of these tokens are kept, where a stop lies inside an accepted block; if absent, all are.

    Ids, logprobs, ranks and alternatives of the others are cut off together.
    """
    logprobs: Array | None = None
    """Of tokens, or flat of the tokens of scored rows alone; if absent, no row is scored."""
    ranks: Array | None = None
    """As logprobs."""
    alternative_token_ids: Array | None = None
    """As logprobs, with one dimension more, the most probable first; or flat, as `top_ks` says."""
    alternative_logprobs: Array | None = None
    """As alternative_token_ids."""
    scored: Array | None = None
    """Of rows: whether its request wants logprobs; if absent, all do where there are logprobs."""
    top_ks: Array | None = None
    """Of rows: how many alternatives its request wants; if absent, as many as are given."""
    extras: Array | None = None
    """Of rows: a sum of what `LogprobBatch.extras` has, for those that want `other_logprobs` or `entropies`."""
    other_logprobs: Array | None = None
    """Of tokens, or flat of the tokens of rows that want it alone: each one's value in the other distribution."""
    entropies: Array | None = None
    """As other_logprobs, of the rows that want it: the entropy of the distribution that the values are of."""
    given_counts: Array | None = None
    """Of rows: how many token ids its request gave, to know their values at each position."""
    given_token_ids: Array | None = None
    """Those ids, row after row."""
    given_logprobs: Array | None = None
    """Of each token, the values of its row's given ids; all of them flat."""
    mask_bounds: Array | None = None
    """Of rows: the size of the largest mask whose ids its request wants; 0: it wants no masks."""
    mask_sizes: Array | None = None
    """As other_logprobs, of the rows with a bound: how many tokens sampling could have chosen."""
    mask_token_ids: Array | None = None
    """Of each token whose row asked and that has no more of them than its bound: those ids, in order; all flat."""
    draft_token_counts: Array | None = None
    """Of rows: how many draft tokens were verified in this step; if absent, none."""
    proposal_token_ids: Array | None = None
    """Of proposals: draft tokens that are not verified yet, flat or padded, as arrays of tokens are."""
    proposal_counts: Array | None = None
    """Of rows: how many proposals it has."""
    index_to_batch_id: Array | None = None
    """Of rows: the index in the original batch; if absent, rows are in that order."""
    kind: BatchKind = BatchKind.TARGET
    phase: StepPhase = StepPhase.MIXED
    method: SpeculativeMethod = SpeculativeMethod.NONE
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """What `logprobs` and `alternative_logprobs` are."""
    step: int = 0
    """The engine's own number of the step; 0: the one after the last target's, and for a draft, that of the last.

    An engine that launches a step while the one before is computed has it from `Launches`.
    """
    draft_follows: bool = False
    """Whether a draft batch of this step follows, be it some steps later."""
    weight_version: int = 0
    """The version of the weights that computed the step; 0: unknown."""
    parts: int = 1
    """The least number of messages that it is split into; its size may need more."""
    transfer_states: Mapping[int, bytes] = field(default_factory=dict)
    """By request id, of HANDED_OFF requests: with it a decode worker's engine need not compute their tokens again.

    At most 48 KiB each; they are published before the batch.
    """
    prompt_scores: Sequence[PromptScores] = ()
    """Of requests that asked for them: they are published before the batch, which has the request's first row."""
    cached_prompts: Sequence[tuple[int, int, int]] = ()
    """Of requests with their first tokens in this batch: the id, the prompt's length, and how many of these tokens the
    engine had in its cache. Those without any may be left out. They are published before the batch."""


ARRAYS = tuple(each.name for each in fields(StepArrays) if each.type in (Array, Array | None))
"""The names of the fields that are arrays."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launched step: the number that its batches carry, and the most tokens that it can emit."""

    step: int
    tokens: int


class Launches:
    """Numbers steps when they are launched, and checks what they emit, for an engine with overlap scheduling.

    Such an engine prepares a step while the one before it is still computed: how many tokens that one will accept is
    not known yet, and its draft may finish only after the next target.
    """

    def __init__(self, tokens_per_step: int, most: int = 2) -> None:
        self._tokens_per_step = tokens_per_step
        self._most = most
        self._next = 1
        self._open: OrderedDict[int, Launch] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def launch(self, real_batch_size: int) -> Launch:
        """Launch the next step for so many requests, padding not counted.

        The most tokens are the real batch size times the tokens of one step: what the step before accepts changes where
        a row's tokens begin, and not how many this step can have.
        """
        if len(self._open) >= self._most:
            raise ContractError("launched steps", self._most, len(self._open) + 1, rule=Rule.MAX)
        launch = Launch(self._next, real_batch_size * self._tokens_per_step)
        self._next += 1
        self._open[launch.step] = launch
        return launch

    def finish(self, step: int, tokens: int) -> None:
        """Finish a step, in any order, with the number of tokens that it emitted; its draft may come later."""
        launch = self._open.pop(step, None)
        if launch is None:
            raise ContractError("step", f"one of those launched, {list(self._open)}", step)
        if tokens > launch.tokens:
            raise ContractError(f"tokens of step {step}", launch.tokens, tokens, rule=Rule.MAX)

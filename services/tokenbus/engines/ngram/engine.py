"""NgramEngine: drafts with short contexts, and verifies with the full model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from tokenbus.engines.engine import BatchEngine, Block, EngineOptions, Outcome, mask_of
from tokenbus.engines.ngram.model import WIDTH, Model, default_model
from tokenbus.engines.ngram.tokenizer import default_tokenizer
from tokenbus.engines.prompt_scoring import PromptPiece, Scores
from tokenbus.engines.requests import Request, Requests
from tokenbus.engines.sampling import DRAFT, Drafts, Ids, SamplingParams, distribution, drawn, uniforms, verified
from tokenbus.engines.scheduler import Plan
from tokenbus.worker.step import Array
from tokenbus_contracts import Extra, SpeculativeMethod
from tokenbus_contracts.generated.request_pb2 import TokenScoring


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions(EngineOptions):
    """Options of the ngram engine."""

    most_top_logprobs: ClassVar[int] = WIDTH


class Drafted(NamedTuple):
    """Tokens that the draft model proposed, one row per slot."""

    tokens: Ids
    columns: Ids
    """Column of each token in the draft model's context."""
    contexts: Ids
    """Contexts of the target model before each token and after the last token."""
    drafts: Drafts
    """Argument of `verified`: the proposed tokens as columns of the target model's contexts."""


class NgramRequests(Requests):
    """Requests with their contexts in the model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self.contexts = np.zeros(0, np.int64)

    def _write(self, slot: int, request: Request) -> None:
        self.contexts[slot] = self._model.context_of(request.prompt + request.output)


@dataclass(slots=True, kw_only=True, eq=False)
class NgramBlock(Block):
    """Output of a step, with the model's contexts and columns."""

    drafted: Drafted
    columns: Ids
    after: Ids


class NgramEngine(BatchEngine[NgramBlock]):
    """An n-gram engine over words, with the model from the package."""

    _requests: NgramRequests
    token_scores = frozenset({"entropies"})
    _method = SpeculativeMethod.NGRAM

    def __init__(self, options: NgramOptions | None = None) -> None:
        self._model = model = default_model()
        super().__init__(options or NgramOptions(), default_tokenizer(), NgramRequests(model))

    def _compute(self, plan: Plan) -> NgramBlock:
        """Draft and verify tokens. First tokens come only from the target model."""
        requests, model, decoding = self._requests, self._model, plan.decode.size
        slots = np.concatenate([plan.decode, plan.first])
        params, positions = requests.params(slots), requests.positions[slots]
        drafted = propose(
            model, requests.contexts[slots], params, positions, self._options.speculate if decoding else 0
        )
        drafted.drafts.counts[decoding:] = 0
        contexts = drafted.contexts
        if params.are_plain:
            chances = model.chances.take(contexts, 0)
        else:
            chances = distribution(model.logits.take(contexts, 0), params, are_sorted=True)
        columns, counts = verified(chances, drafted.drafts, params, positions)
        every, last = np.arange(slots.size), counts - 1
        tokens = np.zeros(contexts.shape, np.int64)
        tokens[:, :-1] = drafted.tokens
        tokens[every, last] = model.ids[contexts[every, last], columns[every, last]]
        return NgramBlock(
            slots=slots,
            tokens=tokens,
            counts=counts,
            drafts=drafted.tokens[:decoding],
            draft_counts=drafted.drafts.counts[:decoding],
            drafted=drafted,
            columns=columns,
            after=model.next[contexts[every, last], columns[every, last]],
        )

    def _scores(self, block: NgramBlock, rows: Ids, counts: Ids, top_ks: Ids, *, are_drafts: bool) -> Scores:
        model, contexts, columns = self._model, block.drafted.contexts, block.columns
        if are_drafts:
            contexts, columns = model.drafts[contexts[:, :-1]], block.drafted.columns
        mask = mask_of(counts, columns.shape[1])
        contexts, columns = contexts[rows][mask], columns[rows][mask]
        most = int(top_ks.max(initial=0))
        ids, logprobs = model.ids[contexts, :most], model.logits[contexts, :most]
        cut = mask_of(np.repeat(top_ks, counts), most)
        return Scores(model.logits[contexts, columns], model.ranks[contexts, columns], ids[cut], logprobs[cut])

    def _extras(self, block: NgramBlock, rows: Ids, asked: Sequence[TokenScoring]) -> dict[str, Array]:
        counts, wanted = block.counts[rows], np.array([each.entropies for each in asked])
        mask = mask_of(counts, block.columns.shape[1]) & wanted[:, None]
        logprobs = self._model.logits[block.drafted.contexts[rows][mask]].astype(float)
        logprobs[np.isneginf(logprobs)] = 0  # impossible tokens add nothing to the entropy
        entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
        return {"extras": wanted * np.uint32(Extra.ENTROPY), "entropies": np.maximum(entropies, 0).astype(np.float32)}

    def _piece_scores(self, block: NgramBlock, piece: PromptPiece) -> Scores:
        """Return the scores. A token that cannot follow its context has probability 0 and the last rank."""
        del block
        model = self._model
        contexts = np.zeros(piece.tokens.size, np.int64)
        context = np.array([model.context_of(list(piece.context))])
        for index, token in enumerate(piece.tokens):
            contexts[index] = context[0]
            context = model.after(context, token[None])
        columns, ranks = model.columns(contexts, piece.tokens[:, None])[:, 0], model.ranks[contexts]
        own = np.where(columns < WIDTH, ranks[np.arange(columns.size), np.minimum(columns, WIDTH - 1)], WIDTH + 1)
        if piece.named.size:
            ids: Ids = np.broadcast_to(piece.named, (contexts.size, piece.named.size))
            logprobs = model.logits[contexts[:, None], model.columns(contexts, ids)]
        else:
            ids = model.ids[contexts, : piece.top_logprobs].astype(np.int64)
            logprobs = model.logits[contexts, : piece.top_logprobs]
        return Scores(model.logits[contexts, columns], own, ids, logprobs)

    def _keep(self, block: NgramBlock, result: Outcome) -> None:
        del result
        self._requests.contexts[block.slots] = block.after


def propose(model: Model, contexts: Ids, params: SamplingParams, positions: Ids, count: int) -> Drafted:
    """Draft `count` tokens for each row."""
    rows = contexts.size
    tokens, own, columns = (np.zeros((rows, count), np.int64) for _ in range(3))
    before = np.empty((rows, count + 1), np.int64)
    chances = np.empty((rows, count, WIDTH + 1))
    before[:, 0] = contexts
    begins = np.arange(rows)[:, None] * (WIDTH + 1)
    numbers, is_plain = uniforms(params.seeds, positions[:, None] + np.arange(count), DRAFT), params.are_plain
    for turn in range(count):
        at = before[:, turn]
        drafts = model.drafts[at]
        if is_plain:
            mine = model.chances.take(drafts, 0)
        else:
            mine = distribution(model.logits.take(drafts, 0), params, are_sorted=True)
        own[:, turn] = places = drawn(mine, numbers[:, turn])
        chances[:, turn] = mine.take(model.columns_in_draft.take(at, 0) + begins)
        tokens[:, turn] = model.ids[drafts, places]
        columns[:, turn] = model.draft_columns[at, places]
        before[:, turn + 1] = model.draft_next[at, places]
    return Drafted(tokens, own, before, Drafts(columns, chances, np.full(rows, count)))

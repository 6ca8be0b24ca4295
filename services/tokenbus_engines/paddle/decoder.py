"""Decoder: computes what a step plans, and gives requests the tokens that follow."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import RowStatus
from tokenbus_engines.emission import raise_failed
from tokenbus_engines.paddle.emission import Outcome
from tokenbus_engines.paddle.network import Tensor
from tokenbus_engines.paddle.requests import Request
from tokenbus_engines.paddle.runner import Piece, Runner
from tokenbus_engines.paddle.scheduler import Plan
from tokenbus_engines.paddle.speculation import Drafts, Fronts, Ids, Logits, SamplingParams, Verified, drafted, verified
from tokenbus_engines.paddle.tokenizer import VOCABULARY_SIZE

Places = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """Requests that get tokens in a step, and what was computed for each, filled up to the one with most drafts."""

    requests: list[Request]
    drafts: Drafts
    params: SamplingParams
    positions: Ids
    states: Tensor
    """What describes each row's tokens: [rows x (drafts + 1), width]."""
    logits: Logits
    """The target's: [rows, drafts + 1, vocabulary]."""


class Decoder:
    """Turns plans into tokens: verifies what was drafted, and drafts what may follow."""

    def __init__(self, runner: Runner, speculate: int) -> None:
        """Take what computes, and how many tokens to draft for a row."""
        self._runner = runner
        self._speculate = speculate

    def emit(self, plan: Plan) -> list[Outcome]:
        """Compute a step, and return the rows that get tokens: those that had some, and those with their first.

        An EngineStepError names the requests that failed alone; what was changed of any is not undone here.
        """
        rows = self._computed(plan)
        for chunk in plan.chunks:
            chunk.request.computed = chunk.end
        if rows is None:
            return []
        sound: npt.NDArray[np.bool_] = np.asarray(np.isfinite(rows.logits).all(axis=(1, 2)))
        logits = np.where(sound[:, None, None], rows.logits, 0)
        found = verified(logits, rows.drafts, rows.params, rows.positions)
        outcomes: list[Outcome] = []
        failed: dict[int, Exception] = {}
        for place, request in enumerate(rows.requests):
            try:
                outcomes.append(_outcome(request, found, rows, place) if sound[place] else _lost(request))
            except Exception as error:  # noqa: BLE001 - it ends this request, and no other
                failed[request.key] = error
        raise_failed(failed)
        self._draft(outcomes, rows, found)
        return outcomes

    def _computed(self, plan: Plan) -> _Rows | None:
        """Compute all that is planned, and return what belongs to the rows that get tokens of it, if any does."""
        lines: list[Tensor] = []
        firsts: list[int] = []
        begin = 0
        if plan.decoding:
            pieces = [
                Piece(_slot(request), request.computed, [request.output[-1], *request.drafts])
                for request in plan.decoding
            ]
            lines.append(self._runner.compute(pieces))
            width = max(len(piece.tokens) for piece in pieces)
            firsts += range(0, len(pieces) * width, width)
            begin = len(pieces) * width
        if plan.chunks:
            pieces = [
                Piece(_slot(chunk.request), chunk.begin, chunk.request.tokens(chunk.begin, chunk.end))
                for chunk in plan.chunks
            ]
            lines.append(self._runner.compute(pieces))
            width = max(len(piece.tokens) for piece in pieces)
            firsts += [
                begin + place * width + len(piece.tokens) - 1
                for place, (piece, chunk) in enumerate(zip(pieces, plan.chunks, strict=True))
                if chunk.gives_token
            ]
        requests = [*plan.decoding, *(chunk.request for chunk in plan.chunks if chunk.gives_token)]
        if not requests:
            return None
        return self._rows(requests, self._runner.lines(lines), np.array(firsts, np.int64))

    def _rows(self, requests: list[Request], lines: Tensor, firsts: Places) -> _Rows:
        drafts = _verifiable(requests)
        most = drafts.tokens.shape[1]
        wanted = firsts[:, None] + np.minimum(np.arange(most + 1), drafts.counts[:, None])
        states = self._runner.chosen(lines, wanted.reshape(-1))
        logits = self._runner.logits(states).reshape(len(requests), most + 1, VOCABULARY_SIZE)
        positions = np.array([request.position for request in requests], np.int64)
        return _Rows(requests, drafts, _params_of(requests), positions, states, logits)

    def _draft(self, outcomes: Sequence[Outcome], rows: _Rows, found: Verified) -> None:
        """Draft what may follow the last token of each row that is not finished."""
        going_on = [place for place, outcome in enumerate(outcomes) if outcome.status is RowStatus.ACTIVE]
        if not going_on:
            return
        mine = np.array(going_on, np.int64)
        requests = [rows.requests[place] for place in going_on]
        # The last token that can be is never a draft's successor, so it needs none.
        counts = np.array([min(self._speculate, request.most - request.position - 1) for request in requests])
        last = found.counts[mine] - 1
        width = rows.drafts.tokens.shape[1] + 1
        fronts = Fronts(
            self._runner.chosen(rows.states, mine * width + last),
            found.tokens[mine, last],
            rows.positions[mine] + found.counts[mine],
            counts,
        )
        drafts = drafted(self._runner.further, fronts, rows.params.of(mine))
        for row, (place, request) in enumerate(zip(going_on, requests, strict=True)):
            count = counts[row]
            request.drafts = drafts.tokens[row, :count].tolist()
            request.draft_logits = drafts.logits[row, :count]
            if outcomes[place].position == 0:
                outcomes[place].proposals = request.drafts


def _outcome(request: Request, found: Verified, rows: _Rows, place: int) -> Outcome:
    """Give a request its tokens, up to one that ends it, and say what became of it."""
    count = int(found.counts[place])
    tokens = found.tokens[place, :count].tolist()
    outcome = Outcome(
        request=request,
        position=request.position,
        status=RowStatus.ACTIVE,
        tokens=tokens,
        logits=rows.logits[place, :count],
        drafts=request.drafts,
        draft_logits=rows.drafts.logits[place, : len(request.drafts)],
    )
    for token in tokens:
        outcome.kept += 1
        if request.append(token):
            outcome.status = RowStatus.FINISHED_STOP
            break
    if outcome.status is RowStatus.ACTIVE and request.position >= request.most:
        outcome.status = RowStatus.FINISHED_LENGTH
    request.computed = request.to_compute
    return outcome


def _lost(request: Request) -> Outcome:
    """Return the outcome of a request whose logits are not numbers, so that no token can come of them."""
    return Outcome(request=request, position=request.position, status=RowStatus.UNRECOVERABLE)


def _verifiable(requests: Sequence[Request]) -> Drafts:
    counts = np.array([len(request.drafts) for request in requests], np.int64)
    most = int(counts.max())
    tokens = np.zeros((len(requests), most), np.int64)
    logits = np.zeros((len(requests), most, VOCABULARY_SIZE), np.float32)
    for row, request in enumerate(requests):
        if request.draft_logits is not None:
            tokens[row, : counts[row]] = request.drafts
            logits[row, : counts[row]] = request.draft_logits
    return Drafts(tokens, logits, counts)


def _params_of(requests: Sequence[Request]) -> SamplingParams:
    return SamplingParams(
        np.array([request.temperature for request in requests], np.float64),
        np.array([request.top_k for request in requests], np.int64),
        np.array([request.top_p for request in requests], np.float64),
        np.array([request.seed for request in requests], np.uint64),
    )


def _slot(request: Request) -> int:
    if request.slot is None:
        raise RuntimeError(f"request {request.key:016x} was planned without a slot")
    return request.slot

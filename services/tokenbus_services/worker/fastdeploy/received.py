"""From a step that the bus delivered back to the messages that were saved."""

import numpy as np
import numpy.typing as npt

from tokenbus_contracts import LogprobBatch, RowStatus, Scoring
from tokenbus_services.delivery import Step
from tokenbus_services.worker.fastdeploy.layout import NOTHING, PREEMPTED, SLOTS, UNRECOVERABLE, MessageFlag
from tokenbus_services.worker.fastdeploy.message import Integers, Message, Scores
from tokenbus_services.worker.fastdeploy.sender import BESIDE
from tokenbus_services.worker.fastdeploy.slots import GOING_ON, REPLACED, STOP

_BEHIND_SLOTS = np.array([REPLACED, STOP], np.uint8)


def messages_of(step: Step) -> list[Message]:
    """Return a step's messages in the order in which the engine reads them: its target's, then its draft's."""
    target, draft = step.target, step.draft
    slots, is_running = _slots(target), not bool((target.statuses == STOP).any())
    found = []
    if target.header.phase != BESIDE:
        found.append(_message(target, MessageFlag.TARGET, slots, is_running=is_running))
    if draft is not None:
        ends = (draft.statuses == RowStatus.FINISHED_STOP).any()
        goes_on = np.isin(draft.statuses, GOING_ON).any()
        rows = min(draft.header.step_rows, SLOTS)
        found.append(_message(draft, MessageFlag.DRAFT, rows, is_running=bool(goes_on or (is_running and not ends))))
    return found


def _slots(target: LogprobBatch) -> int:
    """Return how many slots a step is about. A row that its processor dropped leaves its slot without tokens."""
    behind = target.batch_indices[np.isin(target.statuses, _BEHIND_SLOTS)]
    return min(int(behind.min()) if behind.size else target.header.step_rows, SLOTS)


def _message(batch: LogprobBatch, flag: MessageFlag, slots: int, *, is_running: bool) -> Message:
    rows = batch.batch_indices < slots
    of_slots = batch if rows.all() else batch.select(np.flatnonzero(rows))
    places = of_slots.batch_indices.astype(np.intp)
    counts, proposals = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    counts[places] = of_slots.token_counts
    counts[places[of_slots.statuses == RowStatus.PREEMPTED]] = PREEMPTED
    counts[places[of_slots.statuses == RowStatus.UNRECOVERABLE]] = UNRECOVERABLE
    proposals[places] = of_slots.proposal_counts
    return Message(
        flag=flag,
        is_running=is_running,
        counts=counts,
        token_ids=of_slots.token_ids.astype(np.int64),
        scores=_scores(of_slots),
        proposal_counts=proposals,
        proposal_ids=of_slots.proposal_token_ids.astype(np.int64),
    )


def _scores(batch: LogprobBatch) -> Scores | None:
    """Return what is known of the tokens, or None: no row is scored. Alternatives that were dropped are blank."""
    scored = batch.scorings != Scoring.NONE
    if not scored.any():
        return None
    by_token = np.repeat(scored, batch.token_counts)
    tokens, width = by_token.size, int(batch.top_ks.max())
    logprobs, ranks = np.zeros(tokens, np.float32), np.zeros(tokens, np.int64)
    logprobs[by_token], ranks[by_token] = batch.logprobs, batch.ranks
    own: npt.NDArray[np.bool_] = np.arange(width) < np.repeat(batch.top_ks, batch.token_counts)[:, None]
    ids: Integers = np.full((tokens, width), NOTHING, np.int64)
    values = np.zeros((tokens, width), np.float32)
    ids[own], values[own] = batch.alternative_token_ids, batch.alternative_logprobs
    return Scores(logprobs=logprobs, ranks=ranks, alternative_ids=ids, alternative_logprobs=values)

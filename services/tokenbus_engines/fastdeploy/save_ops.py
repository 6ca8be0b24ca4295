"""The save ops, by that engine's names and positions: `_FORMS` says what each argument is.

Each reads from its tensors what that engine's op reads, returns when the message is in the queue, and refuses only
what would be written past the struct's end or read from beyond a tensor, before anything of it is sent. What the
numbers mean is not checked.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_engines.fastdeploy import tensors
from tokenbus_engines.fastdeploy.environment import message_id
from tokenbus_engines.fastdeploy.message import (
    COLUMNS,
    NOTHING,
    PREEMPTED,
    SLOTS,
    SPECULATIVE_SLOTS,
    TARGET,
    TOKENS,
    Flags,
    Floats,
    Integers,
    Ints,
    Kind,
    Lengths,
    Message,
    Tensor,
)
from tokenbus_engines.fastdeploy.process import PROCESS
from tokenbus_engines.fastdeploy.tensors import Arguments
from tokenbus_services.worker.arrays import Host

_FLAG = 0xFF
"""The high bits of the flag's field count columns, and must not be another number's."""
_Places = slice | Integers


def _forms(names: str, *missing: str) -> dict[int, list[str]]:
    """Return an op's arguments by position, by how many it is given; earlier releases had some fewer each."""
    forms = [names.split()]
    for fewer in missing:
        forms.append([name for name in forms[-1] if name not in fewer.split()])
    return {len(form): form for form in forms}


_SPECULATED_TOPK = (
    "sampled_token_ids logprob_token_ids logprob_scores logprob_ranks token_num_per_batch cu_batch_token_offset"
    " not_need_stop seq_lens_decoder prompt_lens preempted_idx message_flag rank_id save_each_rank"
)
_FORMS = {
    "speculate_save_output_topk": _forms(
        _SPECULATED_TOPK, "preempted_idx", "seq_lens_decoder prompt_lens save_each_rank"
    ),
    "mtp_save_first_token_with_topk": _forms(_SPECULATED_TOPK),
    "save_output_topk": _forms(
        "sampled_token_ids logprob_token_ids logprobs ranks not_need_stop preempted_idx rank_id", "preempted_idx"
    ),
    "speculate_save_output": _forms(
        "accept_tokens accept_num not_need_stop seq_lens_decoder prompt_lens preempted_idx rank_id save_each_rank"
        " skip_chunk_prefill",
        "preempted_idx",
    ),
    "mtp_save_first_token": _forms(
        "base_model_draft_tokens not_need_stop seq_lens_decoder prompt_lens step_idx rank_id save_each_rank"
        " skip_chunk_prefill"
    ),
    "save_output": _forms("sampled_token_ids not_need_stop preempted_idx rank_id save_each_rank", "preempted_idx"),
}


def _op(make: Callable[[Arguments], Message]) -> Callable[..., None]:
    """Return the op that saves what is made of its arguments, if its rank is one that sends."""
    name = make.__name__
    forms = _FORMS[name]

    def save(*arguments: Tensor) -> None:
        if len(arguments) not in forms:
            known = " or ".join(", ".join(map(str, forms)).rsplit(", ", 1))
            raise TypeError(f"{name}: {known} arguments, got {len(arguments)}")
        given = Arguments(zip(forms[len(arguments)], arguments, strict=True))
        preempted = given.get("preempted_idx")
        try:
            rank = int(given["rank_id"])
            if rank <= 0 or given.get("save_each_rank"):  # the other ranks compute the same
                PROCESS.sender().save(make(given), rank)
        finally:
            if preempted is not None:  # the next step must not see them, on whichever rank, whatever happened
                tensors.clear(preempted)

    save.__name__ = save.__qualname__ = name
    save.__doc__ = make.__doc__
    return save


@_op
def speculate_save_output_topk(given: Arguments) -> Message:
    """Save a step's accepted tokens (message flag 3), or what was drafted for them (4)."""
    counts, lengths = _counts(given, "token_num_per_batch", given.slots("token_num_per_batch", SLOTS), TOKENS)
    offsets = given.line("cu_batch_token_offset", counts.size)
    sampled = given.integers("sampled_token_ids").reshape(-1)
    places, end = _places(np.maximum(counts, 0), offsets, sampled.size)
    tokens, scores, ranks = _columns(given, _logprob_ids(given), places, end)
    tokens[:, 0] = sampled[places]
    return _message(given, Kind.SPECULATED_SCORED, counts, tokens, scores=scores, ranks=ranks, lengths=lengths)


@_op
def mtp_save_first_token_with_topk(given: Arguments) -> Message:
    """Save a prefill's first tokens, with their logprobs, and the draft ids that a decode worker goes on with.

    A slot with n accepted tokens has n + 1 ids in its line of sampled_token_ids, the first of which is its token.
    """
    count = given.slots("token_num_per_batch", SLOTS)
    accepted, lengths = _counts(given, "token_num_per_batch", count, TOKENS - 1)
    has_token = accepted > 0
    counts = accepted + has_token
    ids = _of_lines(given, "sampled_token_ids", counts)
    table = _logprob_ids(given)
    offsets = given.line("cu_batch_token_offset", count)
    places, end = _places(has_token.astype(np.int32), offsets, table.shape[0])
    # What comes with a first token has an id alone.
    shape = ids.size, table.shape[1]
    tokens, scores = np.full(shape, NOTHING, np.int32), np.zeros(shape, np.float32)
    ranks = np.zeros(ids.size, np.int32)
    own = np.maximum(counts, 0)
    firsts = (np.cumsum(own) - own)[has_token]
    tokens[firsts], scores[firsts], ranks[firsts] = _columns(given, table, places, end)
    tokens[:, 0] = ids
    kind = Kind.SPECULATED_SCORED
    return _message(given, kind, counts, tokens, scores=scores, ranks=ranks, lengths=lengths, is_first=True)


@_op
def save_output_topk(given: Arguments) -> Message:
    """Save a step without speculation: one token a slot, with its logprobs."""
    ids, table = _one_of_each_slot(given), _logprob_ids(given)
    count, columns = ids.size, table.shape[1]
    values, own = given.floats("logprobs").reshape(-1), given.integers("ranks").reshape(-1)
    # Of slots without a token there may be nothing behind the others.
    needed = int((np.flatnonzero(ids >= 0) + 1).max(initial=0))
    there = min(count, table.shape[0], values.size // columns, own.size)
    if there < needed:
        raise ContractError("logprobs", f"{needed} lines, one for each token", there, rule=Rule.LENGTH)
    tokens, scores = np.full((count, columns), NOTHING, np.int32), np.zeros((count, columns), np.float32)
    ranks = np.zeros(count, np.int32)
    tokens[:there] = table[:there]
    tokens[:, 0] = ids
    scores[:there] = values[: there * columns].reshape(there, columns)
    ranks[:there] = own[:there]
    return _message(given, Kind.SINGLE_SCORED, np.ones(count, np.int32), tokens, scores=scores, ranks=ranks)


@_op
def speculate_save_output(given: Arguments) -> Message:
    """Save a step's accepted tokens, a line for each slot."""
    counts, lengths = _counts(given, "accept_num", given.slots("accept_tokens", SPECULATIVE_SLOTS), TOKENS)
    tokens = _of_lines(given, "accept_tokens", counts)
    return _message(given, Kind.SPECULATED, counts, tokens.reshape(-1, 1), lengths=lengths)


@_op
def mtp_save_first_token(given: Arguments) -> Message:
    """Save a prefill's first tokens, each with the first draft id, of the slots that are at their first step."""
    count = given.slots("base_model_draft_tokens", SPECULATIVE_SLOTS)
    at_first, lengths = _counts(given, "step_idx", count)
    counts = 2 * (at_first == 1).astype(np.int32)
    tokens = _of_lines(given, "base_model_draft_tokens", counts)
    return _message(given, Kind.SPECULATED, counts, tokens.reshape(-1, 1), lengths=lengths, is_first=True)


@_op
def save_output(given: Arguments) -> Message:
    """Save a step without speculation and without logprobs: one token a slot."""
    ids = _one_of_each_slot(given)
    return _message(given, Kind.SINGLE, np.ones(ids.size, np.int32), ids.reshape(-1, 1))


def _message(given: Arguments, kind: Kind, counts: Ints, tokens: Ints, **others: Any) -> Message:  # noqa: ANN401 - fields
    stop_flag = message_id() if given.truth("not_need_stop") else -message_id()
    flag = int(given.get("message_flag", TARGET)) & _FLAG
    return Message(kind=kind, stop_flag=stop_flag, flag=flag, counts=counts, tokens=tokens, **others)


def _counts(given: Arguments, name: str, count: int, most: int | None = None) -> tuple[Ints, Lengths | None]:
    """Return the slots' counts, magic ones too, and their lengths where the form has them."""
    counts, lengths = given.line(name, count).astype(np.int32), None
    if given.get("seq_lens_decoder") is not None:
        lengths = Lengths(given.line("seq_lens_decoder", count), given.line("prompt_lens", count))
        if given.get("skip_chunk_prefill", True):
            _put(counts, lengths.decoder < lengths.prompt, 0)
    _mark_preempted(counts, given)
    if most is not None and counts.size and int(counts.max()) > most:
        slot = int(counts.argmax())
        raise ContractError(f"{name}[{slot}]", most, int(counts[slot]), rule=Rule.MAX)
    return counts, lengths


def _one_of_each_slot(given: Arguments) -> Ints:
    ids = given.line("sampled_token_ids", given.slots("sampled_token_ids", SLOTS)).astype(np.int32)
    _mark_preempted(ids, given)
    return ids


def _mark_preempted(counts: Ints, given: Arguments) -> None:
    if given.get("preempted_idx") is not None:
        _put(counts, given.line("preempted_idx", counts.size) == 1, PREEMPTED)


def _put(counts: Ints, slots: Flags, value: int) -> None:
    if np.count_nonzero(slots):  # few steps have any: to ask costs a tenth of doing it
        counts[slots] = value


def _logprob_ids(given: Arguments) -> Host:
    """Return the ids of tokens and their alternatives, a line for each token."""
    table = given.table("logprob_token_ids", "tokens and columns", 1)
    if table.shape[1] > COLUMNS:
        raise ContractError("logprob_token_ids.columns", COLUMNS, table.shape[1], rule=Rule.MAX)
    return table


def _columns(given: Arguments, table: Host, places: _Places, end: int) -> tuple[Ints, Floats, Ints]:
    """Return the ids, scores and ranks of the tokens at some places, all of them before an end."""
    columns = table.shape[1]
    scores = tensors.lines("logprob_scores", given.floats("logprob_scores"), columns, end)[places].astype(np.float32)
    ids = np.empty(scores.shape, np.int32)
    if columns > 1:  # the first is the sampled token's own, which comes from elsewhere
        ids[...] = tensors.lines("logprob_token_ids", table, columns, end)[places]
    return ids, scores, given.line("logprob_ranks", end, "token")[places].astype(np.int32)


def _of_lines(given: Arguments, name: str, counts: Ints) -> Ints:
    """Return, of each slot's line of ids, as many as it has tokens."""
    ids = given.table(name, "slots and tokens")
    begins = np.arange(counts.size) * ids.shape[1]
    places, _ = _places(np.maximum(counts, 0), begins, ids.size, name)
    found: Ints = ids.reshape(-1)[places].astype(np.int32)
    return found


def _places(own: Host, offsets: Host, tokens: int, name: str = "cu_batch_token_offset") -> tuple[_Places, int]:
    """Return where the tokens of all slots lie in what is flat, and where the last one ends."""
    starts: Integers = np.cumsum(own, dtype=np.int64)
    total = int(starts[-1]) if own.size else 0
    if not total:
        return slice(0, 0), 0
    starts -= own
    if total <= tokens and not np.count_nonzero(starts != offsets):
        return slice(0, total), total
    filled = np.flatnonzero(own)
    begins = offsets[filled].astype(np.int64)
    ends = begins + own[filled]
    if int(begins.min()) < 0 or int(ends.max()) > tokens:
        which = int(((begins < 0) | (ends > tokens)).argmax())
        slot, count = int(filled[which]), int(own[filled[which]])
        limit = f"a place that leaves {count} of {tokens} tokens"
        raise ContractError(f"{name}[{slot}]", limit, int(begins[which]), rule=Rule.LENGTH)
    return np.arange(total) + np.repeat(offsets - starts, own), int(ends.max())

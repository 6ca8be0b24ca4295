"""The save ops, by that engine's names and positions.

Each reads from its tensors what that engine's op reads, returns when the message is in the queue, and refuses only
what would be written past the struct's end or read from beyond a tensor, before anything of it is sent. What the
numbers mean is not checked.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
from tokenbus_services.worker.arrays import Host

_FLAG = 0xFF
_TODAY, _WITHOUT_PREEMPTED, _WITHOUT_LENGTHS = 13, 12, 9


def speculate_save_output_topk(*arguments: Tensor) -> None:
    """Save a step's accepted tokens (message flag 3), or what was drafted for them (4).

    By position: sampled_token_ids, logprob_token_ids, logprob_scores, logprob_ranks, token_num_per_batch,
    cu_batch_token_offset, not_need_stop, seq_lens_decoder, prompt_lens, preempted_idx, message_flag, rank_id,
    save_each_rank. There are 12 without preempted_idx, and 9 also without the lengths and save_each_rank.
    """
    given = _Speculated.of("speculate_save_output_topk", arguments)

    def message() -> Message:
        counts, lengths, offsets = given.slots()
        _check_counts("token_num_per_batch", counts, TOKENS)
        sampled = tensors.integers("sampled_token_ids", given.sampled).reshape(-1)
        places, end = _places(np.maximum(counts, 0), offsets, sampled.size)
        columns, scores, ranks = given.scored(places, end)
        tokens = given.ids(columns, places, end)
        tokens[:, 0] = sampled[places]
        return Message(
            kind=Kind.SPECULATED_SCORED,
            stop_flag=_stop_flag(given.not_need_stop),
            flag=given.flag,
            counts=counts,
            tokens=tokens,
            scores=scores,
            ranks=ranks,
            lengths=lengths,
        )

    _save(message, given.preempted, given.rank, given.each_rank)


def mtp_save_first_token_with_topk(*arguments: Tensor) -> None:
    """Save a prefill's first tokens, with their logprobs, and the draft ids that a decode worker goes on with.

    By position as `speculate_save_output_topk` with 13. A slot with n accepted tokens has n + 1 ids in its line of
    sampled_token_ids, the first of which is its token.
    """
    given = _Speculated.of("mtp_save_first_token_with_topk", arguments, only_today=True)

    def message() -> Message:
        accepted, lengths, offsets = given.slots()
        _check_counts("token_num_per_batch", accepted, TOKENS - 1)  # there is one entry more than is accepted
        ids, _, width = tensors.lines_of_slots("sampled_token_ids", given.sampled, SLOTS)
        has = accepted > 0
        counts = accepted + has
        own = np.maximum(counts, 0)
        entries, end = _places(own, np.arange(counts.size) * width, ids.size, "sampled_token_ids")
        lines = tensors.table("logprob_token_ids", given.logprob_ids, COLUMNS).shape[0]
        places, end = _places(has.astype(np.int32), offsets, lines)
        columns, scores, ranks = given.scored(places, end)
        # What comes with a first token has an id alone.
        firsts, total = (np.cumsum(own) - own)[has], int(own.sum())
        found = Message(
            kind=Kind.SPECULATED_SCORED,
            stop_flag=_stop_flag(given.not_need_stop),
            flag=given.flag,
            counts=counts,
            tokens=np.full((total, columns), NOTHING, np.int32),
            scores=np.zeros((total, columns), np.float32),
            ranks=np.zeros(total, np.int32),
            lengths=lengths,
            is_first=True,
        )
        found.tokens[firsts] = given.ids(columns, places, end)
        found.tokens[:, 0] = ids[entries]
        found.scores[firsts], found.ranks[firsts] = scores, ranks
        return found

    _save(message, given.preempted, given.rank, given.each_rank)


def save_output_topk(*arguments: Tensor) -> None:
    """Save a step without speculation: one token a slot, with its logprobs.

    By position: sampled_token_ids, logprob_token_ids, logprobs, ranks, not_need_stop, preempted_idx, rank_id. There
    are 6 without preempted_idx.
    """
    given = _with_preempted("save_output_topk", arguments, 7, 6)
    sampled, logprob_ids, logprobs, ranks, not_need_stop, preempted, rank = given

    def message() -> Message:
        ids = _one_of_each_slot(sampled, preempted)
        count = ids.size
        table = tensors.table("logprob_token_ids", logprob_ids, COLUMNS)
        columns = table.shape[1]
        values, own = tensors.floats("logprobs", logprobs).reshape(-1), tensors.integers("ranks", ranks).reshape(-1)
        # Of slots without a token there may be nothing behind the others.
        needed = int(np.flatnonzero(ids >= 0)[-1]) + 1 if (ids >= 0).any() else 0
        there = min(count, table.shape[0], values.size // columns, own.size)
        if there < needed:
            raise ContractError("logprobs", f"{needed} lines, one for each token", there, rule=Rule.LENGTH)
        found = Message(
            kind=Kind.SINGLE_SCORED,
            stop_flag=_stop_flag(not_need_stop),
            flag=TARGET,
            counts=np.ones(count, np.int32),
            tokens=np.full((count, columns), NOTHING, np.int32),
            scores=np.zeros((count, columns), np.float32),
            ranks=np.zeros(count, np.int32),
        )
        found.tokens[:there] = table[:there]
        found.tokens[:, 0] = ids
        found.scores[:there] = values[: there * columns].reshape(there, columns)
        found.ranks[:there] = own[:there]
        return found

    _save(message, preempted, rank)


def speculate_save_output(*arguments: Tensor) -> None:
    """Save a step's accepted tokens, a line for each slot.

    By position: accept_tokens, accept_num, not_need_stop, seq_lens_decoder, prompt_lens, preempted_idx, rank_id,
    save_each_rank, skip_chunk_prefill. There are 8 without preempted_idx.
    """
    given = _with_preempted("speculate_save_output", arguments, 9, 6)
    accept_tokens, accept_num, not_need_stop, decoder, prompt, preempted, rank, each_rank, skip_chunk_prefill = given

    def message() -> Message:
        lines = tensors.lines_of_slots("accept_tokens", accept_tokens, SPECULATIVE_SLOTS)
        lengths = _lengths(decoder, prompt, lines[1])
        counts = tensors.line("accept_num", accept_num, lines[1]).astype(np.int32)
        if skip_chunk_prefill:
            _put(counts, lengths.decoder < lengths.prompt, 0)
        _mark_preempted(counts, preempted)
        _check_counts("accept_num", counts, TOKENS)
        return _speculated("accept_tokens", lines, counts, lengths, not_need_stop)

    _save(message, preempted, rank, each_rank)


def mtp_save_first_token(  # noqa: PLR0913, PLR0917 - by that engine's positions
    base_model_draft_tokens: Tensor,
    not_need_stop: Tensor,
    seq_lens_decoder: Tensor,
    prompt_lens: Tensor,
    step_idx: Tensor,
    rank_id: int,
    save_each_rank: bool,  # noqa: FBT001 - as above
    skip_chunk_prefill: bool,  # noqa: FBT001 - as above
    /,
) -> None:
    """Save a prefill's first tokens, each with the first draft id, of the slots that are at their first step."""
    name = "base_model_draft_tokens"

    def message() -> Message:
        lines = tensors.lines_of_slots(name, base_model_draft_tokens, SPECULATIVE_SLOTS)
        lengths = _lengths(seq_lens_decoder, prompt_lens, lines[1])
        at_first: Flags = tensors.line("step_idx", step_idx, lines[1]) == 1
        if skip_chunk_prefill:
            at_first &= lengths.decoder >= lengths.prompt
        found = _speculated(name, lines, 2 * at_first.astype(np.int32), lengths, not_need_stop)
        found.is_first = True
        return found

    _save(message, None, rank_id, save_each_rank)


def save_output(*arguments: Tensor) -> None:
    """Save a step without speculation and without logprobs: one token a slot.

    By position: sampled_token_ids, not_need_stop, preempted_idx, rank_id, save_each_rank. There are 4 without
    preempted_idx.
    """
    sampled, not_need_stop, preempted, rank, each_rank = _with_preempted("save_output", arguments, 5, 3)

    def message() -> Message:
        ids = _one_of_each_slot(sampled, preempted)
        return Message(
            kind=Kind.SINGLE,
            stop_flag=_stop_flag(not_need_stop),
            flag=TARGET,
            counts=np.ones(ids.size, np.int32),
            tokens=ids.reshape(-1, 1),
        )

    _save(message, preempted, rank, each_rank)


def _save(message: Callable[[], Message], preempted: Tensor | None, rank: Any, each_rank: Any = False) -> None:  # noqa: ANN401, FBT002 - the ops' own
    """Make and save a message, if this rank sends one, and clear the preempted flags whatever happens."""
    try:
        if each_rank or int(rank) <= 0:  # the other ranks compute the same
            PROCESS.sender().save(message(), int(rank))
    finally:
        if preempted is not None:  # the next step must not see them
            tensors.clear(preempted)


# What an op was given.


class _Speculated(NamedTuple):
    """What is saved of a step under speculation, with logprobs."""

    sampled: Tensor
    logprob_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    token_numbers: Tensor
    cu_offsets: Tensor
    not_need_stop: Tensor
    decoder: Tensor | None
    prompt: Tensor | None
    preempted: Tensor | None
    flag: int
    rank: int
    each_rank: bool

    @classmethod
    def of(cls, op: str, arguments: tuple[Tensor, ...], *, only_today: bool = False) -> "_Speculated":
        """Take an op's arguments by position."""
        count = len(arguments)
        known = (_TODAY,) if only_today else (_TODAY, _WITHOUT_PREEMPTED, _WITHOUT_LENGTHS)
        if count not in known:
            raise TypeError(f"{op}: {_either(known)} arguments, got {count}")
        if count == _WITHOUT_LENGTHS:
            arguments = (*arguments[:7], None, None, None, *arguments[7:], False)
        elif count == _WITHOUT_PREEMPTED:
            arguments = (*arguments[:9], None, *arguments[9:])
        # The high bits of the field count columns, and must not be another number's.
        flag, rank, each_rank = int(arguments[10]) & _FLAG, int(arguments[11]), bool(arguments[12])
        return cls(*arguments[:10], flag, rank, each_rank)  # type: ignore[call-arg]

    def slots(self) -> tuple[Ints, Lengths | None, Host]:
        """Return the slots' counts, magic ones too, their lengths where the form has them, and their offsets."""
        count = tensors.slots("token_num_per_batch", self.token_numbers, SLOTS)
        counts = tensors.line("token_num_per_batch", self.token_numbers, count).astype(np.int32)
        lengths = None if self.decoder is None else _lengths(self.decoder, self.prompt, count)
        if lengths is not None:
            _put(counts, lengths.decoder < lengths.prompt, 0)
        _mark_preempted(counts, self.preempted)
        return counts, lengths, tensors.line("cu_batch_token_offset", self.cu_offsets, count)

    def scored(self, places: "_Places", end: int) -> tuple[int, Floats, Ints]:
        """Return how many columns there are, and the scores and ranks at some places, all of them before an end."""
        columns = int(tensors.table("logprob_token_ids", self.logprob_ids, COLUMNS).shape[1])
        values = tensors.lines("logprob_scores", tensors.floats("logprob_scores", self.logprobs), columns, end)
        own = tensors.line("logprob_ranks", self.ranks, end, "token")
        return columns, values[places].astype(np.float32), own[places].astype(np.int32)

    def ids(self, columns: int, places: "_Places", end: int) -> Ints:
        """Return the lines of ids at some places."""
        if columns == 1:  # it is the sampled token's own, which comes from elsewhere
            count = places.stop if isinstance(places, slice) else places.size
            return np.empty((count, 1), np.int32)
        table = tensors.integers("logprob_token_ids", self.logprob_ids)
        return tensors.lines("logprob_token_ids", table, columns, end)[places].astype(np.int32)


_Places = slice | Integers


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


def _one_of_each_slot(sampled: Tensor, preempted: Tensor | None) -> Ints:
    count = tensors.slots("sampled_token_ids", sampled, SLOTS)
    ids = tensors.line("sampled_token_ids", sampled, count).astype(np.int32)
    _mark_preempted(ids, preempted)
    return ids


def _lengths(decoder: Tensor, prompt: Tensor, count: int) -> Lengths:
    decoder_lengths = tensors.line("seq_lens_decoder", decoder, count)
    return Lengths(decoder_lengths, tensors.line("prompt_lens", prompt, count))


def _mark_preempted(counts: Ints, preempted: Tensor | None) -> None:
    if preempted is not None:
        _put(counts, tensors.flags("preempted_idx", preempted, counts.size), PREEMPTED)


def _put(counts: Ints, slots: Flags, value: int) -> None:
    if np.count_nonzero(slots):  # few steps have any: to ask costs a tenth of doing it
        counts[slots] = value


def _check_counts(name: str, counts: Ints, most: int) -> None:
    if counts.size and int(counts.max()) > most:
        slot = int(counts.argmax())
        raise ContractError(f"{name}[{slot}]", most, int(counts[slot]), rule=Rule.MAX)


def _stop_flag(not_need_stop: Tensor) -> int:
    return message_id() if tensors.truth("not_need_stop", not_need_stop) else -message_id()


def _speculated(
    name: str, lines: tuple[Host, int, int], counts: Ints, lengths: Lengths, not_need_stop: Tensor
) -> Message:
    """Return a message under speculation, without logprobs: of each slot's line, as many ids as it has tokens."""
    ids, count, width = lines
    places, _ = _places(np.maximum(counts, 0), np.arange(count) * width, ids.size, name)
    return Message(
        kind=Kind.SPECULATED,
        stop_flag=_stop_flag(not_need_stop),
        flag=TARGET,
        counts=counts,
        tokens=ids[places].astype(np.int32).reshape(-1, 1),
        lengths=lengths,
    )


def _with_preempted(op: str, arguments: tuple[Tensor, ...], most: int, count: int) -> tuple[Tensor, ...]:
    """Return an op's arguments, with None for `preempted_idx`, the last of its tensors, in its older form."""
    if len(arguments) == most - 1:
        return (*arguments[: count - 1], None, *arguments[count - 1 :])
    if len(arguments) != most:
        raise TypeError(f"{op}: {_either((most, most - 1))} arguments, got {len(arguments)}")
    return arguments


def _either(numbers: tuple[int, ...]) -> str:
    *others, last = (str(number) for number in numbers)
    return f"{', '.join(others)} or {last}" if others else last

"""The save ops, with FastDeploy's names and positional arguments, which `_FORMS` lists.

An op returns when its message is in the queue. It refuses a step that would be written past the end of FastDeploy's
struct, or read from beyond a tensor, and then sends nothing of it. It does not check what the numbers mean.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_engines.fastdeploy import native, tensors
from tokenbus_engines.fastdeploy.environment import message_id
from tokenbus_engines.fastdeploy.message import Kind, Lengths, Tensor
from tokenbus_engines.fastdeploy.process import PROCESS
from tokenbus_engines.fastdeploy.published import SavedMessage


class _Role(IntEnum):
    """The roles of an op's tensors, in the order of `enum role` in ops.c."""

    TOKENS = 0
    IDS = 1
    SCORES = 2
    RANKS = 3
    COUNTS = 4
    OFFSETS = 5
    STOP = 6
    DECODER = 7
    PROMPT = 8
    PREEMPTED = 9
    STEP = 10


_DTYPES = tuple(map(np.dtype, ("i8", "i8", "f4", "i8", "i4", "i4", "?", "i4", "i8", "i4", "i8")))
_ROLES = {
    "sampled_token_ids": _Role.TOKENS,
    "accept_tokens": _Role.TOKENS,
    "base_model_draft_tokens": _Role.TOKENS,
    "logprob_token_ids": _Role.IDS,
    "logprob_scores": _Role.SCORES,
    "logprobs": _Role.SCORES,
    "logprob_ranks": _Role.RANKS,
    "ranks": _Role.RANKS,
    "token_num_per_batch": _Role.COUNTS,
    "accept_num": _Role.COUNTS,
    "cu_batch_token_offset": _Role.OFFSETS,
    "not_need_stop": _Role.STOP,
    "seq_lens_decoder": _Role.DECODER,
    "prompt_lens": _Role.PROMPT,
    "preempted_idx": _Role.PREEMPTED,
    "step_idx": _Role.STEP,
}


def _forms(names: str, *missing: str) -> dict[int, list[str]]:
    """Return an op's argument names by their number: `missing` says what earlier and earlier releases lack."""
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


class _Call:
    """One signature of an op: the position of each argument."""

    def __init__(self, op: str, code: int, kind: Kind, names: list[str]) -> None:
        """`code` is the op in `enum op` of ops.c; `names` are its arguments in their order."""
        self.op = op
        self.kind = kind
        self.is_first = "first_token" in op
        self.names = {_ROLES[name]: name for name in names if name in _ROLES}
        places = {_ROLES[name]: at for at, name in enumerate(names) if name in _ROLES}
        self.places = [places.get(role, -1) for role in _Role]
        self.rank, self.each_rank, flag, skips = (
            names.index(name) if name in names else -1
            for name in ("rank_id", "save_each_rank", "message_flag", "skip_chunk_prefill")
        )
        self.native = native.Call(code, False, flag, skips, tuple(self.places))  # noqa: FBT003 - by ops.c's positions

    def arrays(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the tensors as contiguous arrays of FastDeploy's dtypes; raises ContractError."""
        found = list(given)
        for role, at in zip(_Role, self.places, strict=True):
            if at >= 0:
                array = tensors.host(self._field(role), given[at])
                found[at] = np.asarray(tensors.converted(self._field(role), array, _DTYPES[role]), order="C")
        return tuple(found)

    def check_flag(self, given: tuple[Any, ...]) -> None:
        """Raise a ContractError if the message flag is no number."""
        if self.native.flag_at >= 0:
            tensors.whole_number(f"{self.op}.message_flag", given[self.native.flag_at])

    def error(self, outcome: native.Outcome, given: tuple[Any, ...]) -> Exception:
        """Return the error for an outcome."""
        if outcome.what == native.What.NO_MESSAGE_ID:
            message_id()
        return self._error(outcome, given)

    def _field(self, role: _Role) -> str:
        return f"{self.op}.{self.names[role]}"

    def _what_each(self, role: _Role, given: tuple[Any, ...]) -> str:
        """Return the unit in which a tensor is too short."""
        if role not in {_Role.IDS, _Role.SCORES, _Role.RANKS}:
            has_lines = role is _Role.TOKENS and not self.kind.is_single
            return "lines, one for each slot" if has_lines else "elements, one for each slot"
        wide = 1 if role is _Role.RANKS else np.shape(given[self.places[_Role.IDS]])[-1]
        return f"lines of {wide}, one for each token"

    def _error(self, fault: native.Outcome, given: tuple[Any, ...]) -> ContractError:
        role, of_slot = _Role(fault.role & 0xFF), fault.role >> 8
        field, limit, actual, rule = self._field(role), str(fault.limit), fault.value, Rule.LENGTH
        shape = np.shape(given[self.places[role]])
        match fault.what:
            case native.What.DIMENSIONS:
                some = "1 or 2 dimensions" if role is _Role.TOKENS else "1 dimension"
                limit = some if fault.limit == 1 else f"{limit} dimensions"
                actual, rule = f"shape {shape}", Rule.TYPE
            case native.What.NO_COLUMNS:
                limit = "at least 1 column"
            case native.What.MOST_SLOTS:
                limit = f"at most {limit} slots"
            case native.What.TOO_SHORT:
                limit += f" {self._what_each(role, given)}"
            case native.What.TOO_MANY:
                field, rule = f"{field}[{fault.slot}]", Rule.MAX
            case native.What.NO_PLACE:
                field, limit = f"{field}[{fault.slot}]", f"a place that leaves {of_slot} of {limit} tokens"
            case native.What.NARROW:
                field, limit = f"{field}[{fault.slot}]", f"a line of at least {limit} tokens"
            case _:
                limit, actual = "one flag", "none"
        return ContractError(field, limit, actual, rule=rule)


class _Step:
    """One call of a save op: its arguments, and how to pack them."""

    __slots__ = ("_call", "_given", "kind", "op", "rank")

    def __init__(self, call: _Call, given: tuple[Any, ...], rank: int) -> None:
        self.op, self.kind, self.rank = call.op, call.kind, rank
        self._call = call
        self._given = given

    def pack(self, socket: int, sequence: int, /) -> tuple[bytes, int]:
        """Return the message, and how many of its bytes the socket took."""
        call, outcome, make = self._call, native.Outcome(), native.pack()
        try:
            data: bytes = make(call.native, outcome, self._given, socket, sequence)
        except (TypeError, ValueError, OverflowError):  # an argument beside the tensors is no number
            call.check_flag(self._given)
            raise
        if not data and outcome.what == native.What.NO_BUFFER:  # an argument is no numpy array, or has another dtype
            self._given = call.arrays(self._given)
            data = make(call.native, outcome, self._given, socket, sequence)
        if not data:
            raise call.error(outcome, self._given)
        return data, outcome.sent

    def saved(self, data: bytes) -> SavedMessage:
        """Return the message with the slots' lengths, which only the bus needs."""
        decoder, prompt = (self._call.places[role] for role in (_Role.DECODER, _Role.PROMPT))
        lengths = None
        if decoder >= 0:
            lengths = Lengths(*(tensors.host(self._call.op, self._given[at]) for at in (decoder, prompt)))
        return SavedMessage(data, lengths, self._call.is_first)


class _SaveOp:
    """A save op, called with its arguments by position."""

    def __init__(self, name: str, kind: Kind, doc: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        code, forms = list(_FORMS).index(name), _FORMS[name]
        self._calls = {count: _Call(name, code, kind, names) for count, names in forms.items()}

    def __call__(self, *given: Tensor) -> None:
        """Save a step, if its rank is one that sends."""
        call = self._calls.get(len(given))
        if call is None:
            known = " or ".join(", ".join(map(str, self._calls)).rsplit(", ", 1))
            raise TypeError(f"{self.__name__}: {known} arguments, got {len(given)}")
        preempted = call.places[_Role.PREEMPTED]
        if preempted >= 0:
            tensors.check_writable(f"{self.__name__}.preempted_idx", given[preempted])
        try:
            rank, form = tensors.whole_number(f"{self.__name__}.rank_id", given[call.rank]), PROCESS.form
            heeds_each_rank = call.is_first or PROCESS.is_xpu or (form.each_rank and not call.kind.is_single)
            if rank <= 0 or (heeds_each_rank and call.each_rank >= 0 and given[call.each_rank]):
                call.native.is_dense = form.packs_slots
                PROCESS.sender().save(_Step(call, given, rank))
        finally:
            if preempted >= 0:  # on every rank, also after an error: the next step must not see them
                tensors.clear(given[preempted])


speculate_save_output_topk = _SaveOp(
    "speculate_save_output_topk",
    Kind.SPECULATED_SCORED,
    "Save a step's accepted tokens (message flag 3), or what was drafted for them (4).",
)
mtp_save_first_token_with_topk = _SaveOp(
    "mtp_save_first_token_with_topk",
    Kind.SPECULATED_SCORED,
    """Save a prefill's first tokens, with their logprobs, and the draft ids that a decode worker goes on with.

    A slot with n accepted tokens has n + 1 ids in its line of sampled_token_ids: its token, then n draft ids.
    """,
)
save_output_topk = _SaveOp(
    "save_output_topk",
    Kind.SINGLE_SCORED,
    "Save a step without speculation: one token a slot, with its logprobs.",
)
speculate_save_output = _SaveOp(
    "speculate_save_output", Kind.SPECULATED, "Save a step's accepted tokens, a line for each slot."
)
mtp_save_first_token = _SaveOp(
    "mtp_save_first_token",
    Kind.SPECULATED,
    "Save a prefill's first tokens, each with the first draft id, of the slots that are at their first step.",
)
save_output = _SaveOp(
    "save_output", Kind.SINGLE, "Save a step without speculation and without logprobs: one token a slot."
)

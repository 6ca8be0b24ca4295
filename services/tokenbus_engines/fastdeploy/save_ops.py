"""The save ops, by FastDeploy's names and positions: `_FORMS` says what each argument is.

Each returns when its message is in the queue, and refuses only what would be written past the end of FastDeploy's
struct or read from beyond a tensor, before anything of it is sent. What the numbers mean is not checked.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_engines.fastdeploy import native, tensors
from tokenbus_engines.fastdeploy.environment import message_id
from tokenbus_engines.fastdeploy.forms import Form
from tokenbus_engines.fastdeploy.message import TARGET, Kind, Lengths, Tensor
from tokenbus_engines.fastdeploy.process import PROCESS, Outline
from tokenbus_services.worker.arrays import Host

_FLAG = 0xFF
"""The high bits of the flag's field count columns, and must not be another number's."""


class _Role(IntEnum):
    """What a tensor is to an op, in the order of `enum role` in ops.c."""

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


class _What(IntEnum):
    """What does not fit, in the order of `enum what` in ops.c."""

    FITS = 0
    NOT_CONTIGUOUS = 1
    DIMENSIONS = 2
    MOST_SLOTS = 3
    TOO_SHORT = 4
    TOO_MANY = 5
    NO_PLACE = 6
    NARROW = 7
    EMPTY = 8


class _Call:
    """An op with one number of arguments: where each of them is."""

    def __init__(self, op: str, names: list[str]) -> None:
        """Take the op, and its arguments' names by position."""
        self.op = op
        self.names = {_ROLES[name]: name for name in names if name in _ROLES}
        places = {_ROLES[name]: at for at, name in enumerate(names) if name in _ROLES}
        self.places = [places.get(role) for role in _Role]
        """Of each role: which argument it is."""
        self.rank, self.flag, self.each_rank, self.skips_prefill = (
            names.index(name) if name in names else None
            for name in ("rank_id", "message_flag", "save_each_rank", "skip_chunk_prefill")
        )

    def arrays(self, given: Sequence[Any]) -> list[Host | None]:
        """Return the tensors by role, as arrays of the types that FastDeploy has, or raise a ContractError."""
        arrays = [None if at is None else tensors.host(self.op, given[at]) for at in self.places]
        for role, (array, dtype) in enumerate(zip(arrays, _DTYPES, strict=True)):
            if array is not None and array.dtype is not dtype:
                arrays[role] = tensors.converted(self._field(_Role(role)), array, dtype)
        return arrays

    def pack(self, options: native.PackOptions, arrays: list[Host | None]) -> bytes:
        """Return the message, or raise a ContractError that names the argument which does not fit."""
        fault = native.Fault()
        while not (data := native.pack()(options, fault, *arrays)):
            if fault.what != _What.NOT_CONTIGUOUS:
                raise self._error(fault, arrays)
            arrays[fault.role] = np.ascontiguousarray(arrays[fault.role])
        return bytes(data)

    def _field(self, role: _Role) -> str:
        return f"{self.op}.{self.names[role]}"

    def _error(self, fault: native.Fault, arrays: list[Host | None]) -> ContractError:
        role, of_slot = _Role(fault.role & 0xFF), fault.role >> 8
        field, limit, actual, rule = self._field(role), str(fault.limit), fault.value, Rule.LENGTH
        match fault.what:
            case _What.DIMENSIONS:
                array = arrays[role]
                limit += " dimensions"
                actual = "none" if array is None else f"shape {array.shape}"
                rule = Rule.TYPE
            case _What.MOST_SLOTS:
                limit = f"at most {limit} slots"
            case _What.TOO_SHORT:
                limit += _each(role, arrays[_Role.IDS])
            case _What.TOO_MANY:
                field, rule = f"{field}[{fault.slot}]", Rule.MAX
            case _What.NO_PLACE:
                field, limit = f"{field}[{fault.slot}]", f"a place that leaves {of_slot} of {limit} tokens"
            case _What.NARROW:
                field, limit = f"{field}[{fault.slot}]", f"a line of at least {limit} tokens"
            case _:
                limit, actual = "one flag", "none"
        return ContractError(field, limit, actual, rule=rule)


def _each(role: _Role, ids: Host | None) -> str:
    """Return what a tensor that is too short has its elements for."""
    if role in {_Role.IDS, _Role.SCORES, _Role.RANKS} and ids is not None:
        return f" lines of {1 if role is _Role.RANKS else ids.shape[1]}, one for each token"
    return " elements, one for each slot"


class _SaveOp:
    """A save op, called with its arguments by position."""

    def __init__(self, name: str, kind: Kind, heeds_each_rank: Callable[[Form], bool], doc: str) -> None:
        """Take its name, the kind of its messages, and whether a form heeds `save_each_rank`."""
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self._code = list(_FORMS).index(name)
        self._kind = kind
        self._heeds_each_rank = heeds_each_rank
        self._calls = {count: _Call(name, names) for count, names in _FORMS[name].items()}

    def __call__(self, *given: Tensor) -> None:
        """Save a step, if its rank is one that sends."""
        call = self._calls.get(len(given))
        if call is None:
            known = " or ".join(", ".join(map(str, self._calls)).rsplit(", ", 1))
            raise TypeError(f"{self.__name__}: {known} arguments, got {len(given)}")
        preempted = call.places[_Role.PREEMPTED]
        try:
            rank = int(given[call.rank or 0])
            if rank <= 0 or self._saves_each_rank(call, given):  # the other ranks compute the same
                self._save(call, given, rank)
        finally:
            if preempted is not None:  # the next step must not see them, on whichever rank, whatever happened
                tensors.clear(given[preempted])

    def _saves_each_rank(self, call: _Call, given: Sequence[Any]) -> bool:
        return call.each_rank is not None and bool(given[call.each_rank]) and self._heeds_each_rank(PROCESS.form)

    def _save(self, call: _Call, given: Sequence[Any], rank: int) -> None:
        flag = TARGET if call.flag is None else int(given[call.flag]) & _FLAG
        skips = call.skips_prefill is None or bool(given[call.skips_prefill])
        own, is_dense, arrays = message_id(), PROCESS.form.packs_slots, call.arrays(given)

        def pack(sequence: int, stamp: int) -> bytes:
            return call.pack(native.PackOptions(self._code, own, flag, skips, is_dense, sequence, stamp), arrays)

        decoder, prompt = arrays[_Role.DECODER], arrays[_Role.PROMPT]
        lengths = None if decoder is None or prompt is None else Lengths(decoder, prompt)
        PROCESS.sender().save(pack, Outline(self._kind, flag, rank, lengths, "first_token" in self.__name__))


def _always(form: Form) -> bool:
    del form
    return True


def _never(form: Form) -> bool:
    del form
    return False


def _until_7172(form: Form) -> bool:
    return form.each_rank


speculate_save_output_topk = _SaveOp(
    "speculate_save_output_topk",
    Kind.SPECULATED_SCORED,
    _until_7172,
    "Save a step's accepted tokens (message flag 3), or what was drafted for them (4).",
)
mtp_save_first_token_with_topk = _SaveOp(
    "mtp_save_first_token_with_topk",
    Kind.SPECULATED_SCORED,
    _always,
    """Save a prefill's first tokens, with their logprobs, and the draft ids that a decode worker goes on with.

    A slot with n accepted tokens has n + 1 ids in its line of sampled_token_ids, the first of which is its token.
    """,
)
save_output_topk = _SaveOp(
    "save_output_topk",
    Kind.SINGLE_SCORED,
    _never,
    "Save a step without speculation: one token a slot, with its logprobs.",
)
speculate_save_output = _SaveOp(
    "speculate_save_output", Kind.SPECULATED, _until_7172, "Save a step's accepted tokens, a line for each slot."
)
mtp_save_first_token = _SaveOp(
    "mtp_save_first_token",
    Kind.SPECULATED,
    _always,
    "Save a prefill's first tokens, each with the first draft id, of the slots that are at their first step.",
)
save_output = _SaveOp(
    "save_output", Kind.SINGLE, _never, "Save a step without speculation and without logprobs: one token a slot."
)

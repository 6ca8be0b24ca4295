"""Signatures: the arguments of each save op in each release, and their conversion into a message."""

from enum import IntEnum
from typing import Any

import numpy as np

from tokenbus.engines.fastdeploy import native, tensors
from tokenbus.engines.fastdeploy.environment import message_id
from tokenbus.engines.fastdeploy.message import Kind, Lengths
from tokenbus_contracts import ContractError, Rule

Role = IntEnum("Role", "TOKENS IDS SCORES RANKS COUNTS OFFSETS STOP DECODER PROMPT PREEMPTED STEP", start=0)
"""Roles of an op's tensors, as in `enum role` of ops.c."""
_ARGUMENTS = {
    Role.TOKENS: ("i8", "sampled_token_ids accept_tokens base_model_draft_tokens"),
    Role.IDS: ("i8", "logprob_token_ids"),
    Role.SCORES: ("f4", "logprob_scores logprobs"),
    Role.RANKS: ("i8", "logprob_ranks ranks"),
    Role.COUNTS: ("i4", "token_num_per_batch accept_num"),
    Role.OFFSETS: ("i4", "cu_batch_token_offset"),
    Role.STOP: ("?", "not_need_stop"),
    Role.DECODER: ("i4", "seq_lens_decoder"),
    Role.PROMPT: ("i8", "prompt_lens"),
    Role.PREEMPTED: ("i4", "preempted_idx"),
    Role.STEP: ("i8", "step_idx"),
}
"""FastDeploy's dtype for each role, and the names that the ops give to the role's argument."""
_ROLES = {name: role for role, (_, names) in _ARGUMENTS.items() for name in names.split()}
_SCORES = "logprob_token_ids logprob_scores logprob_ranks"
_SLOTS = "not_need_stop seq_lens_decoder prompt_lens"
_RANK = "rank_id save_each_rank"
_SPECULATED_TOPK = (
    f"sampled_token_ids {_SCORES} token_num_per_batch cu_batch_token_offset {_SLOTS} preempted_idx message_flag {_RANK}"
)
_SIGNATURES: dict[str, tuple[Kind, str, tuple[str, ...]]] = {
    "speculate_save_output_topk": (
        Kind.SPECULATED_SCORED,
        _SPECULATED_TOPK,
        ("preempted_idx", "seq_lens_decoder prompt_lens save_each_rank"),
    ),
    "mtp_save_first_token_with_topk": (Kind.SPECULATED_SCORED, _SPECULATED_TOPK, ()),
    "save_output_topk": (
        Kind.SINGLE_SCORED,
        "sampled_token_ids logprob_token_ids logprobs ranks not_need_stop preempted_idx rank_id",
        ("preempted_idx",),
    ),
    "speculate_save_output": (
        Kind.SPECULATED,
        f"accept_tokens accept_num {_SLOTS} preempted_idx {_RANK} skip_chunk_prefill",
        ("preempted_idx",),
    ),
    "mtp_save_first_token": (
        Kind.SPECULATED,
        f"base_model_draft_tokens {_SLOTS} step_idx {_RANK} skip_chunk_prefill",
        (),
    ),
    "save_output": (
        Kind.SINGLE,
        f"sampled_token_ids not_need_stop preempted_idx {_RANK}",
        ("preempted_idx",),
    ),
}
"""For each op, in the order of `enum op` in ops.c: the kind of message, newest arguments, and newly added arguments."""


class Signature:
    """Positions of an op's arguments in one release."""

    def __init__(self, op: str, kind: Kind, names: list[str]) -> None:
        self.op, self.kind, self.is_first = op, kind, "first_token" in op
        self.places = {_ROLES[name]: at for at, name in enumerate(names) if name in _ROLES}
        self.rank, self.each_rank, flag, skips = (
            names.index(name) if name in names else -1
            for name in ("rank_id", "save_each_rank", "message_flag", "skip_chunk_prefill")
        )
        places = tuple(self.places.get(role, -1) for role in Role)
        self.native = native.Call(list(_SIGNATURES).index(op), False, flag, skips, places)  # noqa: FBT003 - by position
        self._names = names

    def pack(self, given: tuple[Any, ...], socket: int, sequence: int, lost: bytes | None) -> tuple[bytes, int]:
        """Return the message, and the number of bytes that the socket accepted or -errno.

        `socket` is -1 if there is no socket. `lost` marks the slots whose earlier tokens were lost.
        """
        make, outcome, identity = native.library().pack, native.Outcome(), message_id()
        try:
            data: bytes = make(self.native, outcome, given, socket, identity, sequence, lost)
        except (TypeError, ValueError, OverflowError):  # a scalar argument is not a number
            if self.native.flag_at >= 0:
                tensors.whole_number(f"{self.op}.message_flag", given[self.native.flag_at])
            raise
        if not data and outcome.what == native.What.NO_BUFFER:  # a tensor is not a numpy array, or has another dtype
            given = self._arrays(given)
            data = make(self.native, outcome, given, socket, identity, sequence, lost)
        if not data:
            raise self._error(outcome, given)
        return data, outcome.sent

    def lengths(self, given: tuple[Any, ...], slots: int) -> Lengths | None:
        """Return copies of the slots' lengths, which the engine soon overwrites, or None without lengths."""
        if Role.DECODER not in self.places:
            return None
        arrays = (tensors.host(self.op, given[self.places[role]]) for role in (Role.DECODER, Role.PROMPT))
        return Lengths(*(array.reshape(-1)[:slots].astype(np.int64) for array in arrays))

    def _arrays(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with all tensors as contiguous arrays of FastDeploy's dtypes, or raise ContractError."""
        found = list(given)
        for role, at in self.places.items():
            array = tensors.converted(
                self._field(role), tensors.host(self._field(role), given[at]), np.dtype(_ARGUMENTS[role][0])
            )
            found[at] = np.asarray(array, order="C")
        return tuple(found)

    def _field(self, role: Role) -> str:
        return f"{self.op}.{self._names[self.places[role]]}"

    def _error(self, fault: native.Outcome, given: tuple[Any, ...]) -> ContractError:
        role, of_slot = Role(fault.role & 0xFF), fault.role >> 8
        field, limit, actual, rule = self._field(role), str(fault.limit), fault.value, Rule.LENGTH
        match fault.what:
            case native.What.DIMENSIONS:
                some = "1 or 2 dimensions" if role is Role.TOKENS else "1 dimension"
                limit = some if fault.limit == 1 else f"{limit} dimensions"
                actual, rule = f"shape {np.shape(given[self.places[role]])}", Rule.TYPE
            case native.What.NO_COLUMNS:
                limit = "at least 1 column"
            case native.What.MOST_SLOTS:
                limit = f"at most {limit} slots"
            case native.What.TOO_SHORT:
                limit += f" {self._unit(role, given)}"
            case native.What.TOO_MANY:
                field, rule = f"{field}[{fault.slot}]", Rule.MAX
            case native.What.NO_PLACE:
                field, limit = f"{field}[{fault.slot}]", f"a start that leaves {of_slot} of {limit} tokens"
            case native.What.NARROW:
                field, limit = f"{field}[{fault.slot}]", f"a line of at least {limit} tokens"
            case _:
                limit, actual = "one flag", "none"
        return ContractError(field, limit, actual, rule=rule)

    def _unit(self, role: Role, given: tuple[Any, ...]) -> str:
        if role in {Role.IDS, Role.SCORES, Role.RANKS}:
            wide = 1 if role is Role.RANKS else np.shape(given[self.places[Role.IDS]])[-1]
            return f"lines of {wide}, one for each token"
        has_lines = role is Role.TOKENS and not self.kind.is_single
        return f"{'lines' if has_lines else 'elements'}, one for each slot"


def signatures_of(op: str) -> dict[int, Signature]:
    """Return an op's signatures by number of arguments, beginning with the newest release."""
    kind, newest, lacking = _SIGNATURES[op]
    lists = [newest.split()]
    for names in lacking:
        lists.append([name for name in lists[-1] if name not in names.split()])
    return {len(names): Signature(op, kind, names) for names in lists}

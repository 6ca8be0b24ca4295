"""The ops. A save op returns once its message is queued. A step with an invalid argument is refused as a whole.

A get op fills the same elements as FastDeploy's op, and drops a message of another kind with an error.
"""

import numpy as np

from tokenbus.engines.fastdeploy import native, tensors
from tokenbus.engines.fastdeploy.message import ALTERNATIVES, COLUMNS, Kind, Tensor
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.engines.fastdeploy.queue import Source
from tokenbus.engines.fastdeploy.signatures import Role, signatures_of
from tokenbus.worker.ragged import Host
from tokenbus_contracts import ContractError, Rule

_OUTPUTS = (("output_tokens", "int64"), ("output_scores", "float32"), ("output_ranks", "int64"))
_COLUMNS = {Kind.SPECULATED_SCORED: ("real_k", "packs_flag"), Kind.SINGLE_SCORED: ("k", "packs_slots")}
"""For each kind, the argument that requests columns, and the field of `Form` that says whether the op packs columns."""


class _SaveOp:
    def __init__(self, name: str, doc: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self._signatures = signatures_of(name)

    def __call__(self, *given: Tensor) -> None:
        signature = self._signatures.get(len(given))
        if signature is None:
            known = " or ".join(", ".join(map(str, self._signatures)).rsplit(", ", 1))
            raise TypeError(f"{self.__name__}: {known} arguments, got {len(given)}")
        preempted = signature.places.get(Role.PREEMPTED)
        if preempted is not None:
            tensors.check_writable(f"{self.__name__}.preempted_idx", given[preempted])
        try:
            rank, form = tensors.whole_number(f"{self.__name__}.rank_id", given[signature.rank]), PROCESS.form
            is_speculated = not signature.kind.is_single
            heeds_each_rank = signature.is_first or PROCESS.is_xpu or (form.each_rank and is_speculated)
            if rank <= 0 or (heeds_each_rank and signature.each_rank >= 0 and given[signature.each_rank]):
                signature.native.is_dense = form.packs_slots
                PROCESS.sender().save(signature, given, rank)
        finally:
            if preempted is not None:  # otherwise, the next step would contain old preemptions
                tensors.clear(given[preempted])


class _GetOp:
    """A get op with positional arguments: outputs, number of requested columns, rank, and whether to wait."""

    def __init__(self, name: str, kind: Kind, doc: str, *, ranks: str = "all") -> None:
        """`ranks` is `all`, `first` or `asked`: `asked` means that ranks above 0 need a fourth argument that is set."""
        self.__name__ = self.__qualname__ = name
        self.__doc__ = doc
        self._kind, self._ranks = kind, ranks

    def __call__(self, *given: Tensor) -> None:
        is_scored, may_ask = self._kind.is_scored, self._ranks == "asked"
        most = 6 if is_scored else 3 + may_ask
        if len(given) not in {most, most - may_ask}:
            raise TypeError(f"{self.__name__}: {most} arguments, got {len(given)}")
        if is_scored:
            (k_name, packed), k, wait = _COLUMNS[self._kind], given[3], given[5]
            if not 0 <= tensors.whole_number(f"{self.__name__}.{k_name}", k) <= ALTERNATIVES:
                raise ContractError(f"{self.__name__}.{k_name}", f"0 to {ALTERNATIVES}", k, rule=Rule.NAMED)
            self._get(given[:3], k + 1, packs=getattr(PROCESS.form, packed), wait=wait)
            return
        output, rank, wait, *asked = given
        if self._ranks == "all" or tensors.whole_number(f"{self.__name__}.rank_id", rank) <= 0 or any(asked):
            self._get((output,), COLUMNS, packs=False, wait=wait)

    def _get(self, given: tuple[Tensor, ...], columns: int, *, packs: bool, wait: bool) -> None:
        arrays = []
        for (name, _), tensor in zip(_OUTPUTS, given, strict=False):
            tensors.check_writable(f"{self.__name__}.{name}", tensor)
            arrays.append(tensors.host(f"{self.__name__}.{name}", tensor))
        outputs = (arrays * 3)[:3]  # ops.c ignores the last two outputs of an op without scores
        kind, outcome = self._kind, native.Outcome()

        def fill(address: int | None, *, is_empty: bool = False) -> bool:
            return bool(native.library().fill(kind, address, is_empty, packs, columns, *outputs, outcome))

        def take(found: Source) -> Kind:
            if (got := found.kind) is kind:
                fill(found.address)
            return got

        if not fill(None):
            raise self._error(outcome, arrays)
        got = PROCESS.receiver(kind).get(None if wait else 0.0, take)
        if got is None:
            fill(None, is_empty=True)
        elif got is not kind:
            limit = f"one of {kind.name.lower()}, as this op reads it"
            dropped = f"{got.name.lower()}, which is dropped"
            raise ContractError(f"{self.__name__}.message", limit, dropped, rule=Rule.KIND)
        for tensor, array in zip(given, arrays, strict=True):
            tensors.store(tensor, array)

    def _error(self, fault: native.Outcome, arrays: list[Host]) -> ContractError:
        (name, dtype), array = _OUTPUTS[fault.role], arrays[fault.role]
        field = f"{self.__name__}.{name}"
        if array.dtype != np.dtype(dtype):
            return ContractError(field, dtype, str(array.dtype), rule=Rule.TYPE)
        if fault.what == native.What.TOO_SHORT:
            return ContractError(field, f"at least {fault.limit} elements", fault.value, rule=Rule.LENGTH)
        return ContractError(field, "an array that is contiguous", "one that is not", rule=Rule.TYPE)


speculate_save_output_topk = _SaveOp(
    "speculate_save_output_topk",
    "Save a step's accepted tokens (message flag 3), or the tokens drafted for the step (4).",
)
mtp_save_first_token_with_topk = _SaveOp(
    "mtp_save_first_token_with_topk",
    """Save a prefill's first tokens with their logprobs, and the draft ids with which a decode worker continues.

    A slot with n accepted tokens has n + 1 ids in its line of sampled_token_ids: its token, then n draft ids.
    """,
)
save_output_topk = _SaveOp(
    "save_output_topk", "Save a step without speculation: one token for each slot, with its logprobs."
)
speculate_save_output = _SaveOp("speculate_save_output", "Save a step's accepted tokens, a line for each slot.")
mtp_save_first_token = _SaveOp(
    "mtp_save_first_token",
    "Save a prefill's first tokens, each with its first draft id, for the slots at their first step.",
)
save_output = _SaveOp("save_output", "Save a step without speculation or logprobs: one token for each slot.")

speculate_get_output_topk = _GetOp(
    "speculate_get_output_topk",
    Kind.SPECULATED_SCORED,
    "Get the next target or draft under speculation, with logprobs.",
)
get_output_topk = _GetOp(
    "get_output_topk",
    Kind.SINGLE_SCORED,
    "Get the next step without speculation, with logprobs.",
)
speculate_get_output = _GetOp(
    "speculate_get_output",
    Kind.SPECULATED,
    "Get the next step under speculation, without logprobs; with a fourth argument, ranks above 0 get it too.",
    ranks="asked",
)
get_output = _GetOp("get_output", Kind.SINGLE, "Get the next step without speculation or logprobs.", ranks="first")
get_output_ep = _GetOp(
    "get_output_ep",
    Kind.SINGLE,
    "Like `get_output`, but on every rank: with data parallelism each rank has its own queue.",
)

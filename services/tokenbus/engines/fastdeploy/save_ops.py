"""The save ops.

The save ops. Each returns when its message is in the queue; a step with an invalid argument is refused as a whole.
"""

from tokenbus.engines.fastdeploy import tensors
from tokenbus.engines.fastdeploy.message import Tensor
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.engines.fastdeploy.signatures import Role, signatures_of


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
            if preempted is not None:  # on every rank, also after an error: the next step must not see them
                tensors.clear(given[preempted])


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

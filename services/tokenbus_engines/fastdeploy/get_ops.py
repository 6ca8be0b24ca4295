"""The get ops, by FastDeploy's names and positions.

An op fills the same elements of its tensors as FastDeploy's op of that form, and no others. It consumes a message of
another op's kind, as from the kernel's queue, and raises an error that names the kind.
"""

from typing import Any

import numpy as np

from tokenbus_contracts import ContractError, Rule
from tokenbus_engines.fastdeploy import native, tensors
from tokenbus_engines.fastdeploy.message import ALTERNATIVES, Kind, Tensor
from tokenbus_engines.fastdeploy.process import PROCESS
from tokenbus_engines.fastdeploy.queue import Received
from tokenbus_services.worker.arrays import Host

_OUTPUTS = ("output_tokens", "output_scores", "output_ranks")
_DTYPES: tuple[np.dtype[Any], ...] = tuple(map(np.dtype, ("i8", "f4", "i8")))


def speculate_get_output_topk(  # noqa: PLR0913, PLR0917 - by that engine's positions
    output_tokens: Tensor,
    output_scores: Tensor,
    output_ranks: Tensor,
    real_k: int,
    rank_id: int,
    wait_flag: bool,  # noqa: FBT001 - as above
    /,
) -> None:
    """Get the next target or draft under speculation, with logprobs; if there is none, the stop flag is -2."""
    del rank_id  # each rank has a queue of its own, which the environment names
    _get(
        "speculate_get_output_topk",
        Kind.SPECULATED_SCORED,
        (output_tokens, output_scores, output_ranks),
        real_k,
        packs_columns=PROCESS.form.packs_flag,
        wait=wait_flag,
    )


def speculate_get_output(
    output_tokens: Tensor,
    rank_id: int,
    wait_flag: bool,  # noqa: FBT001 - by that engine's positions
    get_each_rank: bool = False,  # noqa: FBT001, FBT002 - as above
    /,
) -> None:
    """Get the next step under speculation, without logprobs; if there is none, the stop flag is -2."""
    if tensors.whole_number("speculate_get_output.rank_id", rank_id) <= 0 or get_each_rank:
        _get("speculate_get_output", Kind.SPECULATED, (output_tokens,), wait=wait_flag)


def get_output_topk(  # noqa: PLR0913, PLR0917 - by that engine's positions
    output_tokens: Tensor,
    output_scores: Tensor,
    output_ranks: Tensor,
    k: int,
    rank_id: int,
    wait_flag: bool,  # noqa: FBT001 - as above
    /,
) -> None:
    """Get the next step without speculation, with logprobs; if there is none, the stop flag is -2."""
    del rank_id  # as in speculate_get_output_topk
    _get(
        "get_output_topk",
        Kind.SINGLE_SCORED,
        (output_tokens, output_scores, output_ranks),
        k,
        packs_columns=PROCESS.form.packs_slots,
        wait=wait_flag,
    )


def get_output(output_tokens: Tensor, rank_id: int, wait_flag: bool, /) -> None:  # noqa: FBT001 - as above
    """Get the next step without speculation and without logprobs; if there is none, the stop flag is -2."""
    if tensors.whole_number("get_output.rank_id", rank_id) <= 0:
        _get("get_output", Kind.SINGLE, (output_tokens,), wait=wait_flag)


def get_output_ep(output_tokens: Tensor, rank_id: int, wait_flag: bool, /) -> None:  # noqa: FBT001 - as above
    """Get the next step as `get_output` does, but on every rank: under data parallelism each rank has its own queue."""
    del rank_id  # the environment names the queue
    _get("get_output_ep", Kind.SINGLE, (output_tokens,), wait=wait_flag)


def _get(  # noqa: PLR0913 - what differs between the ops
    op: str, kind: Kind, given: tuple[Tensor, ...], k: int = ALTERNATIVES, *, packs_columns: bool = False, wait: bool
) -> None:
    """Get the next message of a queue into an op's tensors."""
    name = f"{op}.k" if kind is Kind.SINGLE_SCORED else f"{op}.real_k"
    if not 0 <= tensors.whole_number(name, k) <= ALTERNATIVES:
        raise ContractError(name, f"0 to {ALTERNATIVES}", k, rule=Rule.NAMED)
    outputs = [_output(f"{op}.{name}", tensor) for name, tensor in zip(_OUTPUTS, given, strict=False)]
    places = (outputs * 3)[:3]  # an op without scores has one output; ops.c ignores the two others
    fill, fault, columns = native.fill(), native.Outcome(), k + 1
    if not fill(kind, None, False, packs_columns, columns, *places, fault):  # noqa: FBT003 - by ops.c's positions
        raise _error(op, fault, outputs)
    kinds: list[Kind] = []

    def take(found: Received) -> None:
        kinds.append(found.kind)
        if found.kind is kind:
            fill(kind, found.address, False, packs_columns, columns, *places, fault)  # noqa: FBT003 - as above

    if not PROCESS.receiver(kind).get(None if wait else 0.0, take):
        fill(kind, None, True, packs_columns, columns, *places, fault)  # noqa: FBT003 - as above
    elif kinds[0] is not kind:
        limit = f"one of {kind.name.lower()}, as this op reads it"
        raise ContractError(f"{op}.message", limit, f"{kinds[0].name.lower()}, which is dropped", rule=Rule.KIND)
    for tensor, output in zip(given, outputs, strict=True):
        tensors.store(tensor, output)


def _output(name: str, tensor: Tensor) -> Host:
    """Return the array for an output tensor; raises ContractError if the tensor cannot be written to."""
    tensors.check_writable(name, tensor)
    return tensors.host(name, tensor)


def _error(op: str, fault: native.Outcome, outputs: list[Host]) -> ContractError:
    field, dtype, output = f"{op}.{_OUTPUTS[fault.role]}", _DTYPES[fault.role], outputs[fault.role]
    if output.dtype != dtype:
        return ContractError(field, dtype.name, str(output.dtype), rule=Rule.TYPE)
    if fault.what == native.What.TOO_SHORT:
        return ContractError(field, f"at least {fault.limit} elements", fault.value, rule=Rule.LENGTH)
    return ContractError(field, "an array that is contiguous", "one that is not", rule=Rule.TYPE)

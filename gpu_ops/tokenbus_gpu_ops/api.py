"""The one function: from logits to columns, wherever the logits are."""

from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import ValueKind
from tokenbus_gpu_ops import cpu
from tokenbus_gpu_ops.arguments import as_ids, check_logits, check_top_k, host_ids
from tokenbus_gpu_ops.bridges import is_on_gpu, stream_of, tensor_of, to_host
from tokenbus_gpu_ops.columns import Arrival, TokenColumns, body
from tokenbus_gpu_ops.errors import GpuUnavailableError
from tokenbus_gpu_ops.plan import Plan, plan
from tokenbus_gpu_ops.tensor import Looks, Tensor

_LOGITS = (ValueKind.RAW_LOGITS, ValueKind.PROCESSED_LOGITS)
_ALL_ALIKE = (None, None, None)
"""No token counts, no offsets and no scoring: each row is the one token of one request."""
_PREPARED = 1024
_KINDS = (ValueKind.RAW_LOGPROBS, ValueKind.PROCESSED_LOGPROBS, *_LOGITS)


def token_logprobs(  # noqa: PLR0913 - each is a choice of the caller's, and has a name
    logits: Any,  # noqa: ANN401 - whatever speaks DLPack
    token_ids: Any,  # noqa: ANN401
    top_k: Any = 0,  # noqa: ANN401 - a number, or one for each request
    *,
    token_counts: Any = None,  # noqa: ANN401
    offsets: Any = None,  # noqa: ANN401
    scored: Any = None,  # noqa: ANN401
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS,
    stream: Any = None,  # noqa: ANN401
    cpu_fallback: bool = False,
) -> TokenColumns:
    """Return each token's logprob, rank and alternatives as columns, from one pass over its row of logits.

    `logits` are rows of a vocabulary in bfloat16, float16 or float32; `token_ids` has an id for each row, or for each
    token. Each row is one request's one token, unless `token_counts` says how many of each request's were accepted,
    and `offsets` where each request's rows begin. `top_k` is how many alternatives each token gets, and `scored` which
    requests get anything but their ids. Temperature, penalties and masks are the caller's: `value_kind` says what the
    logits are and whether logprobs of them are wanted. On a GPU it is queued on the caller's stream, and nothing waits
    until the result is looked at. What does not fit is a ContractError before anything is computed.

    Args:
        logits: rows of a vocabulary, in memory that speaks DLPack: numpy's, paddle's, torch's or cupy's.
        token_ids: the chosen token of each row.
        top_k: how many alternatives each token gets: a number, or one for each request.
        token_counts: how many tokens of each request were accepted; default: one each.
        offsets: where each request's rows begin; default: one request's rows follow another's.
        scored: which requests get anything but their ids; default: all.
        value_kind: what the logits are, and whether logprobs of them are wanted.
        stream: the GPU's stream; default: the framework's current one.
        cpu_fallback: whether to compute on the CPU where the GPU cannot be used.

    Returns:
        a `TokenColumns`: `token_ids`, `logprobs`, `ranks`, `top_ks`, `alternative_token_ids`, `alternative_logprobs`.

    Raises:
        ContractError: an argument does not fit the others.
        GpuUnavailableError: the logits are on a GPU that cannot be used.

    Example:
        import numpy as np

        logits = np.array([[0.0, 2.0, 1.0]], np.float32)
        scores = tokenbus.token_logprobs(logits, np.array([2]), top_k=1)
        assert (int(scores.ranks[0]), int(scores.alternative_token_ids[0])) == (2, 1)
    """
    if value_kind not in _KINDS:
        names = ", ".join(kind.name for kind in _KINDS)
        raise ContractError("value_kind", f"one of {names}", repr(value_kind), rule=Rule.NAMED)
    as_logits = value_kind in _LOGITS
    ids = as_ids(token_ids)
    if is_on_gpu(logits):
        try:
            return _on_gpu(logits, ids, (top_k, token_counts, offsets, scored), value_kind, stream)
        except GpuUnavailableError:
            if not cpu_fallback:
                raise
        logits = to_host(logits)
    elif is_on_gpu(ids):
        ids = to_host(ids)
    there = tensor_of("logits", logits, 0)
    check_logits(there)
    planned = _planned(there.shape[0], there.shape[1], top_k, token_counts, offsets, scored)
    their_ids = tensor_of("token_ids", to_host(ids) if is_on_gpu(ids) else ids, 0)
    checked = host_ids(their_ids, planned, there.shape[0], there.shape[1])
    layout = body(planned.tokens, planned.scored, planned.alternatives)
    memory = cpu.compute(planned, layout, there, checked, as_logits=as_logits)
    return TokenColumns(planned, layout, value_kind, Arrival(memory))


def _planned(rows: int, vocabulary: int, *arguments: Any) -> Plan:  # noqa: ANN401
    planned = plan(rows, *arguments)
    check_top_k(planned, vocabulary)
    return planned


def _on_gpu(
    logits: Any,  # noqa: ANN401
    ids: Any,  # noqa: ANN401
    arguments: tuple[Any, ...],
    value_kind: ValueKind,
    stream: Any,  # noqa: ANN401
) -> TokenColumns:
    gpu = _launching()
    handle = stream_of(logits, stream)
    there, their_ids = tensor_of("logits", logits, handle), tensor_of("token_ids", ids, handle)
    as_logits = value_kind in _LOGITS
    if type(arguments[0]) is int and arguments[1:] == _ALL_ALIKE and their_ids.device is not None:
        prepared = _prepared_once(there.looks, their_ids.looks, arguments[0], as_logits)
    else:
        check_logits(there)
        planned = _planned(*there.shape, *arguments)
        prepared = gpu.prepare(planned, there, their_ids, as_logits=as_logits)
    return TokenColumns(prepared.plan, prepared.layout, value_kind, gpu.queue(prepared, there, their_ids, handle))


@lru_cache(_PREPARED)
def _prepared_once(logits: Looks, ids: Looks, top_k: int, as_logits: bool) -> Any:  # noqa: ANN401, FBT001
    """Return what calls of one shape have in common, checked and laid out for all of them."""
    there, their_ids = Tensor.looking(logits), Tensor.looking(ids)
    check_logits(there)
    return _launching().prepare(_planned(*there.shape, top_k), there, their_ids, as_logits=as_logits)


@cache
def _launching() -> Any:  # noqa: ANN401 - a module of ours, whose names mypy knows where they are used
    """Return the module that launches. It is imported here: without a GPU nothing of it is needed."""
    return import_module("tokenbus_gpu_ops.cuda.launch")

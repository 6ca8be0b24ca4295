"""The one function: from logits to columns, wherever the logits are."""

from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.generated.enums import ValueKind
from tokenbus_gpu_ops import cpu
from tokenbus_gpu_ops.arguments import as_ids, check_logits, check_top_k, host_ids
from tokenbus_gpu_ops.bridges import is_on_gpu, stream_of, tensor_of, to_host
from tokenbus_gpu_ops.columns import Arrival, TokenColumns, layout_of
from tokenbus_gpu_ops.errors import GpuUnavailableError
from tokenbus_gpu_ops.extras import Asked, Extras, extras
from tokenbus_gpu_ops.plan import Plan, plan
from tokenbus_gpu_ops.tensor import Looks, Tensor

_LOGITS = (ValueKind.RAW_LOGITS, ValueKind.PROCESSED_LOGITS)
_PROCESSED = (ValueKind.PROCESSED_LOGPROBS, ValueKind.PROCESSED_LOGITS)
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
    other_logits: Any = None,  # noqa: ANN401
    other_logprobs: Any = None,  # noqa: ANN401 - a flag, or one for each request
    entropies: Any = False,  # noqa: ANN401
    given_token_ids: Any = None,  # noqa: ANN401
    given_counts: Any = None,  # noqa: ANN401
    mask_bounds: Any = 0,  # noqa: ANN401
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS,
    stream: Any = None,  # noqa: ANN401
    cpu_fallback: bool = False,
) -> TokenColumns:
    """Return each token's logprob, rank, alternatives and more as columns, from one pass over its row of logits.

    `logits` are rows of a vocabulary in bfloat16, float16 or float32; `token_ids` has an id for each row, or for each
    token. Each row is one request's one token, unless `token_counts` says how many of each request's were accepted,
    and `offsets` where each request's rows begin. `top_k` is how many alternatives each token gets, and `scored` which
    requests get anything but their ids. Temperature, penalties and masks are the caller's: `value_kind` says what the
    logits are and whether logprobs of them are wanted. On a GPU it is queued on the caller's stream, and nothing waits
    until the result is looked at. What does not fit is a ContractError before anything is computed.

    What else a request gets, it has to ask for. A mask is what sampling could have chosen, so it is that of processed
    logits: of `logits` where `value_kind` says so or there are no others, else of `other_logits`.

    Args:
        logits: rows of a vocabulary, in memory that speaks DLPack: numpy's, paddle's, torch's or cupy's.
        token_ids: the chosen token of each row.
        top_k: how many alternatives each token gets: a number, or one for each request.
        token_counts: how many tokens of each request were accepted; default: one each.
        offsets: where each request's rows begin; default: one request's rows follow another's.
        scored: which requests get anything but their ids; default: all.
        other_logits: rows of the same shape and type, under which tokens get a second value.
        other_logprobs: which requests get that, a flag or one for each; default: all if there are other logits.
        entropies: which requests get the entropies of the distributions that their values are of.
        given_token_ids: up to 128 ids whose values each token of a request gets: one request's behind another's.
        given_counts: how many of them each request gave; default: the same ids are every request's.
        mask_bounds: the size of a mask up to which its ids are returned, 1 to 1024, or 0: no mask.
        value_kind: what the logits are, and whether logprobs of them are wanted.
        stream: the GPU's stream; default: the framework's current one.
        cpu_fallback: whether to compute on the CPU where the GPU cannot be used.

    Returns:
        a `TokenColumns`: `token_ids`, `logprobs`, `ranks`, `top_ks`, `alternative_token_ids`, `alternative_logprobs`,
        and where they were asked for `other_logprobs`, `entropies`, `given_logprobs`, `mask_sizes`, `mask_token_ids`.

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
    asked = Asked(other_logprobs, entropies, as_ids(given_token_ids), given_counts, mask_bounds)
    ids, arguments = as_ids(token_ids), (top_k, token_counts, offsets, scored)
    if is_on_gpu(logits):
        try:
            return _on_gpu((logits, other_logits), ids, arguments, asked, value_kind, stream)
        except GpuUnavailableError:
            if not cpu_fallback:
                raise
        logits = to_host(logits)
        other_logits = to_host(other_logits) if is_on_gpu(other_logits) else other_logits
    elif is_on_gpu(ids):
        ids = to_host(ids)
    there = tensor_of("logits", logits, 0)
    other = None if other_logits is None else tensor_of("other_logits", other_logits, 0)
    planned, extra = _planned(there, other, arguments, asked, value_kind)
    their_ids = tensor_of("token_ids", to_host(ids) if is_on_gpu(ids) else ids, 0)
    checked = host_ids(their_ids, planned, there.shape[0], there.shape[1])
    layout = layout_of(planned, extra)
    memory = cpu.compute(planned, layout, there, checked, extra, other, as_logits=value_kind in _LOGITS)
    return TokenColumns(planned, layout, value_kind, Arrival(memory), extra)


def _planned(
    logits: Tensor, other: Tensor | None, arguments: tuple[Any, ...], asked: Asked, kind: ValueKind
) -> tuple[Plan, Extras | None]:
    check_logits(logits, other)
    rows, vocabulary = logits.shape
    planned = plan(rows, *arguments)
    check_top_k(planned, vocabulary)
    return planned, extras(planned, vocabulary, asked, has_other=other is not None, is_processed=kind in _PROCESSED)


def _on_gpu(  # noqa: PLR0913, PLR0917 - a call's own
    logits: tuple[Any, Any],
    ids: Any,  # noqa: ANN401
    arguments: tuple[Any, ...],
    asked: Asked,
    value_kind: ValueKind,
    stream: Any,  # noqa: ANN401
) -> TokenColumns:
    gpu = _launching()
    handle = stream_of(logits[0], stream)
    there, their_ids = tensor_of("logits", logits[0], handle), tensor_of("token_ids", ids, handle)
    other = None if logits[1] is None else tensor_of("other_logits", logits[1], handle)
    # No token counts, no offsets and no scoring: each row is the one token of one request.
    are_alike = type(arguments[0]) is int and all(each is None for each in arguments[1:]) and asked.is_alike
    if are_alike and their_ids.device is not None:
        looks = None if other is None else other.looks
        prepared = _prepared_once(there.looks, looks, their_ids.looks, arguments[0], asked, value_kind)
    else:
        planned, extra = _planned(there, other, arguments, asked, value_kind)
        prepared = gpu.prepare(planned, there, their_ids, extra, as_logits=value_kind in _LOGITS)
    arrival = gpu.queue(prepared, there, their_ids, handle, other)
    return TokenColumns(prepared.plan, prepared.layout, value_kind, arrival, prepared.extras)


@lru_cache(_PREPARED)
def _prepared_once(  # noqa: PLR0913, PLR0917 - a call's own
    logits: Looks, other: Looks | None, ids: Looks, top_k: int, asked: Asked, kind: ValueKind
) -> Any:  # noqa: ANN401
    """Return what calls of one shape have in common, checked and laid out for all of them."""
    there, their_ids = Tensor.looking(logits), Tensor.looking(ids)
    planned, extra = _planned(there, None if other is None else Tensor.looking(other), (top_k,), asked, kind)
    return _launching().prepare(planned, there, their_ids, extra, as_logits=kind in _LOGITS)


@cache
def _launching() -> Any:  # noqa: ANN401 - a module of ours, whose names mypy knows where they are used
    """Return the module that launches. It is imported here: without a GPU nothing of it is needed."""
    return import_module("tokenbus_gpu_ops.cuda.launch")

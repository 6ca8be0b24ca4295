"""token_logprobs: computes the logprob columns from logits, on the CPU or on a GPU."""

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


def token_logprobs(  # noqa: PLR0913 - keyword-only with defaults
    logits: Any,  # noqa: ANN401 - any DLPack array
    token_ids: Any,  # noqa: ANN401
    top_k: Any = 0,  # noqa: ANN401 - a number, or one number for each request
    *,
    token_counts: Any = None,  # noqa: ANN401
    offsets: Any = None,  # noqa: ANN401
    scored: Any = None,  # noqa: ANN401
    other_logits: Any = None,  # noqa: ANN401
    other_logprobs: Any = None,  # noqa: ANN401 - a flag, or one flag for each request
    entropies: Any = False,  # noqa: ANN401
    given_token_ids: Any = None,  # noqa: ANN401
    given_counts: Any = None,  # noqa: ANN401
    mask_bounds: Any = 0,  # noqa: ANN401
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS,
    stream: Any = None,  # noqa: ANN401
    cpu_fallback: bool = False,
) -> TokenColumns:
    """Return the logprob, rank and alternatives of each token, and extra scores, in one pass over the logits.

    By default, each row of `logits` is the only token of a request. `token_counts` and `offsets` describe other
    layouts. The caller applies temperature, penalties and masks before the call. `value_kind` says whether the logits
    are raw or processed, and whether the values are logprobs or logits. On a GPU, the call is queued on the caller's
    stream, and the first access to the result waits. Arguments are validated before anything is computed.

    A mask is the set of tokens that sampling could choose. Masks are computed from `logits` if `value_kind` is a
    processed kind or `other_logits` is absent. Otherwise, masks are computed from `other_logits`.

    Args:
        logits: [rows, vocabulary] in bfloat16, float16 or float32, as a DLPack array of numpy, paddle, torch or cupy.
        token_ids: the sampled id of each row, or of each token.
        top_k: the number of alternatives per token, as one number for all requests or one number per request.
        token_counts: the number of accepted tokens of each request, 1 by default.
        offsets: the first row of each request. By default, a request's rows follow the previous request's.
        scored: for each request, whether to return more than token ids. By default, all requests are scored.
        other_logits: logits of the other distribution, with the shape and type of `logits`.
        other_logprobs: whether to return values from `other_logits`, for all requests or per request. By default, they
        are returned.
        entropies: whether to return entropies, for all requests or per request.
        given_token_ids: up to 128 ids per request to score at each token, concatenated over the requests.
        given_counts: the number of given ids of each request. By default, all requests use all given ids.
        mask_bounds: the largest mask whose ids are returned (up to 1024, or 0 for no mask), for all requests or per
        request.
        value_kind: the kind of the logits and of the returned values.
        stream: the GPU stream, by default the framework's current stream.
        cpu_fallback: whether to compute on the CPU if the GPU cannot be used.

    Returns:
        a `TokenColumns` with `token_ids`, `logprobs`, `ranks`, `top_ks`, `alternative_token_ids` and
        `alternative_logprobs`. The columns `other_logprobs`, `entropies`, `given_logprobs`, `mask_sizes` and
        `mask_token_ids` are empty
        unless requested.

    Raises:
        ContractError: an argument is invalid.
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


def _on_gpu(  # noqa: PLR0913, PLR0917 - internal
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
    # Without token counts, offsets and scoring flags, each row is the only token of its request.
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
def _prepared_once(  # noqa: PLR0913, PLR0917 - internal
    logits: Looks, other: Looks | None, ids: Looks, top_k: int, asked: Asked, kind: ValueKind
) -> Any:  # noqa: ANN401
    """Validate a call's arguments, and plan its launch. The result is cached for later calls with the same shapes."""
    there, their_ids = Tensor.looking(logits), Tensor.looking(ids)
    planned, extra = _planned(there, None if other is None else Tensor.looking(other), (top_k,), asked, kind)
    return _launching().prepare(planned, there, their_ids, extra, as_logits=kind in _LOGITS)


@cache
def _launching() -> Any:  # noqa: ANN401 - a module
    """Import the launch module on first use, because only GPUs need the module."""
    return import_module("tokenbus_gpu_ops.cuda.launch")

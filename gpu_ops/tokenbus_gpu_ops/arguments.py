"""Validates the logits and token ids of a call before anything is computed."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_contracts.schema import COLUMN
from tokenbus_gpu_ops.plan import Index, Plan
from tokenbus_gpu_ops.tensor import Tensor

LOGIT_TYPES = ("bfloat16", "float16", "float32")
_ID_TYPES = ("int32", "int64", "uint32", "uint64", "int16", "uint16", "int8", "uint8")
GPU_ID_TYPES = ("int32", "int64")
MAX_VOCABULARY = 1 << 24
_MATRIX = 2
_HIGHEST_ID = COLUMN["token_ids"].max


def check_logits(logits: Tensor, other: Tensor | None = None) -> None:
    """Raise ContractError if either tensor is invalid, or if their shapes, types or devices differ."""
    _check_rows("logits", logits)
    if other is not None:
        _check_rows("other_logits", other)
        if (logits.shape, logits.dtype, logits.device) != (other.shape, other.dtype, other.device):
            limit = f"like logits: shape {logits.shape}, {logits.dtype}, {_place(logits)}"
            found = f"shape {other.shape}, {other.dtype}, {_place(other)}"
            raise ContractError("other_logits", limit, found, rule=Rule.TYPE)


def _place(tensor: Tensor) -> str:
    return "on the CPU" if tensor.device is None else f"on GPU {tensor.device}"


def _check_rows(name: str, logits: Tensor) -> None:
    if logits.dtype not in LOGIT_TYPES:
        raise ContractError(name, f"one of {', '.join(LOGIT_TYPES)}", logits.dtype, rule=Rule.TYPE)
    if len(logits.shape) != _MATRIX:
        raise ContractError(name, "two dimensions, rows and vocabulary", f"shape {logits.shape}", rule=Rule.TYPE)
    rows, vocabulary = logits.shape
    if vocabulary < 1 and rows:
        raise ContractError(f"{name}.vocabulary", 1, vocabulary, rule=Rule.MIN)
    if vocabulary > MAX_VOCABULARY:
        raise ContractError(f"{name}.vocabulary", MAX_VOCABULARY, vocabulary, rule=Rule.MAX)
    if rows and vocabulary > 1 and logits.strides[1] != 1:
        limit = "rows whose logits follow one another (a stride of 1)"
        raise ContractError(name, limit, f"a stride of {logits.strides[1]}", rule=Rule.TYPE)


def check_top_k(plan: Plan, vocabulary: int) -> None:
    """Raise ContractError if a token has more alternatives than the vocabulary has tokens."""
    if plan.most > vocabulary and plan.scored:
        row = int((plan.top_ks > vocabulary).argmax())
        limit = f"at most {vocabulary}, the size of the vocabulary"
        raise ContractError(f"top_k[{row}]", limit, plan.most, rule=Rule.LENGTH)


def place_ids(ids: Tensor, plan: Plan, rows: int) -> Index | None:
    """Return the index in `ids` of each token's id, or None if the ids are in the order of the tokens."""
    allowed = _ID_TYPES if ids.device is None else GPU_ID_TYPES
    if ids.dtype not in allowed:
        raise ContractError("token_ids", f"whole numbers ({', '.join(allowed)})", ids.dtype, rule=Rule.TYPE)
    if ids.device is not None and any(stride < 0 for stride in ids.strides):
        raise ContractError("token_ids", "ids in ascending places", f"strides {ids.strides}", rule=Rule.TYPE)
    if len(ids.shape) == 1:
        return _place_in_line(ids, plan, rows)
    if len(ids.shape) != _MATRIX:
        limit = "one dimension, or two: requests and tokens"
        raise ContractError("token_ids", limit, f"shape {ids.shape}", rule=Rule.TYPE)
    longest = int(plan.token_counts.max(initial=0))
    if ids.shape[0] != plan.requests or ids.shape[1] < longest:
        limit = f"at least shape ({plan.requests}, {longest}), requests and their tokens"
        raise ContractError("token_ids", limit, f"shape {ids.shape}", rule=Rule.LENGTH)
    lines, within = _lines(plan)
    return lines * ids.strides[0] + within * ids.strides[1]


def _place_in_line(ids: Tensor, plan: Plan, rows: int) -> Index | None:
    size = ids.shape[0]
    stride = ids.strides[0] if size > 1 else 1
    if size == rows:
        return None if stride == 1 and plan.top_k is not None else plan.token_rows * stride
    if size == plan.tokens:
        return np.arange(plan.tokens) * stride
    limit = f"{rows} elements, one for each row of logits, or {plan.tokens}, one for each token"
    raise ContractError("token_ids", limit, size, rule=Rule.LENGTH)


def _lines(plan: Plan) -> tuple[Index, Index]:
    """Return each token's request, and the token's index within the request."""
    counts = plan.token_counts.astype(np.intp)
    first = np.cumsum(counts) - counts
    return np.repeat(np.arange(plan.requests), counts), np.arange(plan.tokens) - np.repeat(first, counts)


def host_ids(ids: Tensor, plan: Plan, rows: int, vocabulary: int) -> npt.NDArray[np.int32]:
    """Return the ids of all tokens in order. An invalid layout or id raises ContractError."""
    place_ids(ids, plan, rows)  # raises an error for an invalid layout
    values = ids.host_view()
    if values.ndim > 1:
        values = values[_lines(plan)]
    elif values.size == rows:
        values = values[plan.token_rows]
    highest = min(vocabulary - 1, _HIGHEST_ID)
    if values.size:
        for place in (int(values.argmin()), int(values.argmax())):
            value = int(values[place])
            if value < 0:
                raise ContractError(f"token_ids[{place}]", 0, value, rule=Rule.MIN)
            if value > highest:
                raise ContractError(f"token_ids[{place}]", highest, value, rule=Rule.MAX)
    return values.astype(np.int32)


def as_ids(values: Any) -> Any:  # noqa: ANN401 - an array or a list
    """Convert a list or tuple of ids to an array, and return any other value unchanged."""
    if not isinstance(values, (list, tuple)):
        return values
    found = np.asarray(values)
    return found if found.size else np.zeros(found.shape, np.int64)

"""Queues one call on the GPU: uploads per-row arguments, launches the kernel, and copies the results."""

import ctypes
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus_contracts.errors import ContractError, Rule
from tokenbus_gpu_ops.arguments import host_ids, place_ids
from tokenbus_gpu_ops.columns import Arrival, Body, body, layout_of
from tokenbus_gpu_ops.cuda.card import Card, Kernel, card
from tokenbus_gpu_ops.cuda.driver import done, driver
from tokenbus_gpu_ops.cuda.memory import LOCK, TICKET_BYTES, Pinned, Pool
from tokenbus_gpu_ops.extras import NOTHING, Extras, Shape
from tokenbus_gpu_ops.plan import Plan
from tokenbus_gpu_ops.tensor import Tensor

# The fields of the struct Call in kernels/call.cuh, in order.
_POINTERS = Struct("<14Q")
_COLUMNS_AND_NUMBERS = Struct("<" + "IIQ" * 5 + "16I")
_CALL_BYTES = _POINTERS.size + _COLUMNS_AND_NUMBERS.size
_PLACE = np.dtype([(name, "<u4") for name in ("row", "id_at", "token", "alternatives_at", "top_k", "a", "b", "c")])
_UNSCORED = np.dtype([("id_at", "<u4"), ("token", "<u4")])
_PARTIAL_BYTES = 32
_KEY_BYTES = 8
_ID_BYTES = 4
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ID_TYPES = {"int32": 0, "int64": 1}
_FEW = 256
_ALIGNED = 256
_WORD = 1 << 64
_RECIPES_KEPT = 1024

THREADS = 256
VECTOR_BYTES = 16
VECTORS_OF_GROUPS = 20480
"""If alternatives are wanted, a part of a row has at most this many vectors: the memory for maxima is limited."""

_BLOCKS_PER_PROCESSOR = 2
_MOST_PARTS = 32
_BLOCKS_PER_PROCESSOR_WITH_ALTERNATIVES = 1
_MOST_PARTS_WITH_ALTERNATIVES = 8
"""If alternatives are wanted, a row has fewer parts, because one block merges the candidates of all parts."""


class _Shape(NamedTuple):
    """All properties of a call except its addresses."""

    tokens: int
    scored: int
    unscored: int
    alternatives: int
    top_k: int
    most: int
    vocabulary: int
    item_bytes: int
    id_type: int
    as_logits: bool
    processors: int
    extras: Shape


class _Recipe(NamedTuple):
    """The data that all calls of the same shape use."""

    grid: tuple[int, int]
    output_bytes: int
    partials_at: int
    candidates_at: int
    mask_ids_at: int
    uploads_at: int
    packed: bytes
    """The fields of the struct Call that follow the addresses."""


class _Uploads(NamedTuple):
    """The kernel's per-token arguments, packed in memory."""

    places: npt.NDArray[Any] | None
    unscored: npt.NDArray[Any] | None
    ids: npt.NDArray[np.int32] | None
    extras: npt.NDArray[Any] | None = None
    given_ids: npt.NDArray[np.uint32] | None = None

    @property
    def sizes(self) -> list[int]:
        """The size of each argument in bytes, rounded up for alignment."""
        return [0 if part is None else _aligned(part.nbytes) for part in self]

    def write(self, memory: npt.NDArray[np.uint8]) -> None:
        at = 0
        for part, size in zip(self, self.sizes, strict=True):
            if part is not None:
                memory[at : at + part.nbytes] = part.view(np.uint8)
            at += size


class Prepared(NamedTuple):
    """A call without its addresses. Calls with the same properties share one Prepared object."""

    plan: Plan
    layout: Body
    uploads: _Uploads
    sizes: list[int]
    card: Card
    kernel: Kernel
    recipe: _Recipe
    item_bytes: int
    extras: Extras | None


class Parameters:
    """The struct Call in memory, in the form that the driver expects."""

    __slots__ = ("_pointer", "_struct", "address")

    def __init__(self, struct: bytearray) -> None:
        self._struct = struct
        self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_ubyte.from_buffer(struct)))
        self.address = ctypes.addressof(self._pointer)


# All calls share one struct. A lock protects the struct until the driver has copied it during the launch.
_call = bytearray(_CALL_BYTES)
_parameters = Parameters(_call)


def prepare(plan: Plan, logits: Tensor, ids: Tensor, extras: Extras | None, *, as_logits: bool) -> Prepared:
    """Return a call without its addresses, or raise an error if the call cannot be launched."""
    if logits.device is None:
        raise ContractError("logits", "logits on a GPU", "on the CPU", rule=Rule.TYPE)
    if ids.device not in (None, logits.device):
        limit = f"on GPU {logits.device}, where the logits are, or on the CPU"
        raise ContractError("token_ids", limit, f"on GPU {ids.device}", rule=Rule.TYPE)
    rows, vocabulary = logits.shape
    uploads = _uploads(plan, ids, rows, vocabulary, extras)
    here = card(logits.device)
    item_bytes = _ITEM_BYTES[logits.dtype]
    shape = _Shape(
        plan.tokens,
        plan.scored,
        0 if uploads.unscored is None else uploads.unscored.size,
        plan.alternatives,
        plan.top_k or 0,
        plan.most,
        vocabulary,
        item_bytes,
        0 if uploads.ids is not None else _ID_TYPES[ids.dtype],
        as_logits,
        here.processors,
        NOTHING if extras is None else extras.shape,
    )
    kernel = here.kernel(logits.dtype, with_alternatives=plan.most > 0, with_extras=extras is not None)
    layout = layout_of(plan, extras)
    return Prepared(plan, layout, uploads, uploads.sizes, here, kernel, _recipe(shape), item_bytes, extras)


def queue(prepared: Prepared, logits: Tensor, ids: Tensor, stream: int, other: Tensor | None) -> Arrival:
    """Queue the call on the stream and return the future results."""
    if not prepared.plan.tokens:
        return Arrival(np.zeros(prepared.layout.size, np.uint8))
    for name, tensor in (("logits", logits), ("other_logits", other)):
        if tensor is not None and tensor.address % prepared.item_bytes:
            limit = f"an address that is a multiple of {prepared.item_bytes}, the size of a logit"
            raise ContractError(name, limit, hex(tensor.address), rule=Rule.TYPE)
    here = prepared.card
    if here.is_current():
        with LOCK:
            return _queued(prepared, logits, ids, stream, other)
    with here.entered(), LOCK:
        return _queued(prepared, logits, ids, stream, other)


def _queued(prepared: Prepared, logits: Tensor, ids: Tensor, stream: int, other: Tensor | None) -> Arrival:
    cuda = driver()
    _, _, uploads, sizes, here, kernel, recipe, item_bytes, _ = prepared
    uploaded = sum(sizes)
    piece = here.pool.take(recipe.output_bytes + uploaded)
    arrival = Arriving(here.pool, piece, logits.owner, ids.owner, None if other is None else other.owner)
    work = here.scratches.of(stream)
    work.take_turn(stream, piece)
    scratch = work.grown_to(recipe.uploads_at + uploaded, stream)
    uploads_at = scratch + recipe.uploads_at
    if uploaded:
        uploads.write(piece.array[recipe.output_bytes :])
        done(cuda.cuMemcpyHtoDAsync(uploads_at, piece.address + recipe.output_bytes, uploaded, stream))
    output = scratch + TICKET_BYTES
    _POINTERS.pack_into(
        _call,
        0,
        logits.address,
        logits.strides[0] * item_bytes % _WORD,
        ids.address if uploads.ids is None else uploads_at + sizes[0] + sizes[1],
        0 if uploads.places is None else uploads_at,
        0 if uploads.unscored is None else uploads_at + sizes[0],
        output,
        scratch + recipe.partials_at,
        scratch + recipe.candidates_at,
        scratch,
        0 if other is None else other.address,
        0 if other is None else other.strides[0] * item_bytes % _WORD,
        0 if uploads.extras is None else uploads_at + sum(sizes[:3]),
        uploads_at + sum(sizes[:4]),
        scratch + recipe.mask_ids_at,
    )
    _call[_POINTERS.size :] = recipe.packed
    across, down = recipe.grid
    done(cuda.cuLaunchKernel(kernel.handle, across, down, 1, THREADS, 1, 1, 0, stream, _parameters.address, 0))
    done(cuda.cuMemcpyDtoHAsync(piece.address, output, recipe.output_bytes, stream))
    piece.record(stream)
    return arrival


class Arriving(Arrival):
    """The future results of a call, in pinned memory that returns to its pool after the last view is deleted.

    An Arriving object keeps the inputs alive until the results are available.
    """

    __slots__ = ("_inputs", "_piece", "_pool")

    def __init__(self, pool: Pool, piece: Pinned, *inputs: object) -> None:
        self._pool = pool
        self._piece = piece
        self._inputs: tuple[object, ...] = inputs

    def __del__(self) -> None:
        self._pool.give_back(self._piece)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array interface of numpy. Arrays and their views keep the Arriving object alive."""
        return self._piece.array.__array_interface__

    def ready(self) -> bool:
        return self._piece.is_idle()

    def memory(self) -> npt.NDArray[np.uint8]:
        self._piece.wait()
        self._inputs = ()
        return np.asarray(self)


@lru_cache(_RECIPES_KEPT)
def _recipe(shape: _Shape) -> _Recipe:
    extras = shape.extras
    layout = body(shape.tokens, shape.scored, shape.alternatives, extras)
    items, vocabulary = shape.scored + extras.others, shape.vocabulary
    with_groups = shape.most > 0 or extras != NOTHING
    parts = parts_of(max(items, 1), vocabulary, shape.item_bytes, shape.processors, with_alternatives=with_groups)
    partials = items * parts if parts > 1 else 0
    partials_at = TICKET_BYTES + _aligned(layout.size)
    candidates_at = partials_at + _aligned(partials * _PARTIAL_BYTES)
    mask_ids_at = candidates_at + (_aligned(partials * _FEW * _KEY_BYTES) if shape.most else 0)
    uploads_at = mask_ids_at + _aligned(partials * extras.most_mask * _ID_BYTES)
    columns: list[int] = []
    for place in layout.places:
        columns += (place.at, len(place.prefix), int.from_bytes(place.prefix, "little"))
    packed = _COLUMNS_AND_NUMBERS.pack(
        *columns,
        vocabulary,
        shape.scored,
        shape.unscored,
        shape.top_k,
        shape.id_type,
        int(shape.as_logits),
        vectors_of_part(vocabulary, shape.item_bytes, parts),
        items,
        *(place.at for place in layout.extras),
        extras.most_mask,
        int(extras.masks_are_others),
        int(extras.sizes.other_logprobs > 0) | int(extras.sizes.entropies > 0) << 1,
    )
    grid = (parts, items + (shape.unscored > 0))
    return _Recipe(grid, layout.size, partials_at, candidates_at, mask_ids_at, uploads_at, packed)


def _uploads(plan: Plan, ids: Tensor, rows: int, vocabulary: int, extras: Extras | None) -> _Uploads:
    """Return the per-token arguments: at most the token ids if all tokens are alike and token i has row i."""
    own = host_ids(ids, plan, rows, vocabulary) if ids.device is None else None
    at = np.arange(plan.tokens) if own is not None else place_ids(ids, plan, rows)
    is_alike = plan.top_k is not None and (extras is None or extras.shape.is_alike)
    if is_alike and (own is not None or at is None):
        return _Uploads(None, None, own)
    if at is None:
        at = np.arange(plan.tokens)
    places = np.zeros(plan.scored + (0 if extras is None else extras.others.size), _PLACE)
    first = places[: plan.scored]
    first["row"] = plan.scored_rows
    first["id_at"] = at[plan.scored_tokens]
    first["token"] = plan.scored_tokens
    first["alternatives_at"] = plan.alternatives_at
    first["top_k"] = plan.scored_top_ks
    items = given = None
    if extras is not None:
        for name in ("row", "id_at"):
            places[name][plan.scored :] = first[name][extras.others]
        items, given = extras.items, extras.given_token_ids
    if plan.scored == plan.tokens:
        return _Uploads(places, None, own, items, given)
    others = np.setdiff1d(np.arange(plan.tokens), plan.scored_tokens, assume_unique=True)
    unscored = np.zeros(others.size, _UNSCORED)
    unscored["id_at"] = at[others]
    unscored["token"] = others
    return _Uploads(places, unscored, own, items, given)


def parts_of(rows: int, vocabulary: int, item_bytes: int, processors: int, *, with_alternatives: bool) -> int:
    """Return the number of parts of each row. `processors` is the card's number of multiprocessors."""
    vectors = vectors_of_part(vocabulary, item_bytes, 1)
    if with_alternatives:
        fewest = (vectors + VECTORS_OF_GROUPS - 1) // VECTORS_OF_GROUPS
        blocks, most = _BLOCKS_PER_PROCESSOR_WITH_ALTERNATIVES * processors, _MOST_PARTS_WITH_ALTERNATIVES
    else:
        fewest, blocks, most = 1, _BLOCKS_PER_PROCESSOR * processors, _MOST_PARTS
    # If a part had fewer vectors than threads, some threads would be idle.
    worth = max(1, vectors // THREADS)
    return max(fewest, min(blocks // max(rows, 1), most, worth))


def vectors_of_part(vocabulary: int, item_bytes: int, parts: int) -> int:
    """Return the number of vectors of each part of a row. The last part may have fewer vectors."""
    vectors = (vocabulary * item_bytes + VECTOR_BYTES - 1) // VECTOR_BYTES
    return (vectors + parts - 1) // parts


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

"""Converts FastDeploy's structs to the drop-in's messages, and back."""

import numpy as np

from tests.engines.fastdeploy.undefined import COLUMNS, SLOTS, SPECULATIVE_SLOTS, TOKENS, Array
from tokenbus_engines.fastdeploy.message import Kind, Message

_SLOT = np.dtype([("tokens", "i4", (TOKENS, COLUMNS)), ("scores", "f4", (TOKENS, COLUMNS)), ("ranks", "i4", (TOKENS,))])
STRUCTS = {
    # The trailing pad is C's: each struct begins with a long, so its size is a multiple of eight.
    Kind.SPECULATED_SCORED: np.dtype(
        [("mtype", "i8"), ("meta", "i4", (3 + SLOTS,)), ("slots", _SLOT, (SLOTS,)), ("pad", "V4")]
    ),
    Kind.SINGLE_SCORED: np.dtype(
        [
            ("mtype", "i8"),
            ("text", "i4", (2 + SLOTS * COLUMNS,)),
            ("scores", "f4", (SLOTS * COLUMNS,)),
            ("ranks", "i4", (SLOTS,)),
        ]
    ),
    Kind.SPECULATED: np.dtype([("mtype", "i8"), ("text", "i4", (2 + SPECULATIVE_SLOTS + SPECULATIVE_SLOTS * TOKENS,))]),
    Kind.SINGLE: np.dtype([("mtype", "i8"), ("text", "i4", (2 + SLOTS,))]),
}


def message_of(kind: Kind, struct: Array, *, packs: bool) -> Message:
    """Return what a struct says; `packs` tells whether its form packs the number of columns beside another."""
    if kind is Kind.SPECULATED_SCORED:
        first, field, slots = (int(number) for number in struct["meta"][:3])
        columns = field >> 8 if packs else COLUMNS
        counts = struct["meta"][3 : 3 + slots].copy()
        of_slots, places = _entries(counts)
        lines = struct["slots"]
        return Message(
            kind=kind,
            stop_flag=first,
            flag=field & 0xFF,
            counts=counts,
            tokens=lines["tokens"][of_slots, places, :columns],
            scores=lines["scores"][of_slots, places, :columns],
            ranks=lines["ranks"][of_slots, places],
        )
    first, field = (int(number) for number in struct["text"][:2])
    slots = field & 0xFFFF if packs else field
    text = struct["text"][2:]
    if kind is Kind.SINGLE_SCORED:
        columns = field >> 16 if packs else COLUMNS
        shape = (slots, columns)
        tokens = text[: slots * columns].reshape(shape).copy()
        scores = struct["scores"][: slots * columns].reshape(shape).copy()
        ones = np.ones(slots, np.int32)
        ranks = struct["ranks"][:slots].copy()
        return Message(kind=kind, stop_flag=first, flag=3, counts=ones, tokens=tokens, scores=scores, ranks=ranks)
    if kind is Kind.SINGLE:
        tokens = text[:slots].reshape(-1, 1).copy()
        return Message(kind=kind, stop_flag=first, flag=3, counts=np.ones(slots, np.int32), tokens=tokens)
    counts = text[:slots].copy()
    tokens = text[SPECULATIVE_SLOTS:].reshape(SPECULATIVE_SLOTS, TOKENS)[_entries(counts)].reshape(-1, 1)
    return Message(kind=kind, stop_flag=first, flag=3, counts=counts, tokens=tokens)


def struct_of(message: Message, *, packs: bool) -> Array:
    struct = np.zeros((), STRUCTS[message.kind])
    struct["mtype"] = 1
    slots, columns = message.slots, message.tokens.shape[1]
    if message.kind is Kind.SPECULATED_SCORED:
        struct["meta"][:3] = message.stop_flag, message.flag | (columns << 8 if packs else 0), slots
        struct["meta"][3 : 3 + slots] = message.counts
        of_slots, places = _entries(message.counts)
        struct["slots"]["tokens"][of_slots, places] = -1
        struct["slots"]["tokens"][of_slots, places, :columns] = message.tokens
        struct["slots"]["scores"][of_slots, places, :columns] = message.scores
        struct["slots"]["ranks"][of_slots, places] = message.ranks
        return struct
    text = struct["text"]
    text[:2] = message.stop_flag, slots | (columns << 16 if packs and message.kind is Kind.SINGLE_SCORED else 0)
    if message.kind is Kind.SINGLE_SCORED:
        stride = columns if packs else COLUMNS
        tokens, scores = np.full((slots, stride), -1, np.int32), np.zeros((slots, stride), np.float32)
        tokens[message.counts == -9] = -9
        tokens[:, :columns], scores[:, :columns] = message.tokens, message.scores
        text[2 : 2 + tokens.size] = tokens.reshape(-1)
        struct["scores"][: scores.size] = scores.reshape(-1)
        struct["ranks"][:slots] = message.ranks
    elif message.kind is Kind.SINGLE:
        text[2 : 2 + slots] = message.tokens[:, 0]
    else:
        text[2 : 2 + slots] = message.counts
        text[2 + SPECULATIVE_SLOTS :].reshape(SPECULATIVE_SLOTS, TOKENS)[_entries(message.counts)] = message.tokens[
            :, 0
        ]
    return struct


def _entries(counts: Array) -> tuple[Array, Array]:
    """Return the slot and the place of each token."""
    own = np.maximum(counts, 0).astype(np.int64)
    of_slots = np.repeat(np.arange(own.size), own)
    return of_slots, np.arange(of_slots.size) - np.repeat(np.cumsum(own) - own, own)

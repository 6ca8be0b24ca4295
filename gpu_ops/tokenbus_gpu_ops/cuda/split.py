"""How many blocks share a row: enough that few rows fill the card, few enough that putting together costs little."""

from functools import lru_cache

THREADS = 256
VECTOR_BYTES = 16
VECTORS_OF_GROUPS = 20480
"""The most vectors of a part whose alternatives are wanted: the kernel remembers the largest of so many groups."""

_BLOCKS_PER_PROCESSOR = 2
_MOST_PARTS = 32
_BLOCKS_PER_PROCESSOR_WITH_ALTERNATIVES = 1
_MOST_PARTS_WITH_ALTERNATIVES = 8
"""Every part hands on candidates, and one block goes through all of them."""
_SPLITS_KEPT = 1024


@lru_cache(_SPLITS_KEPT)
def parts_of(rows: int, vocabulary: int, item_bytes: int, processors: int, *, with_alternatives: bool) -> int:
    """Return how many parts every row is shared out in, on a card of so many multiprocessors."""
    vectors = vectors_of_part(vocabulary, item_bytes, 1)
    if with_alternatives:
        fewest = (vectors + VECTORS_OF_GROUPS - 1) // VECTORS_OF_GROUPS
        blocks, most = _BLOCKS_PER_PROCESSOR_WITH_ALTERNATIVES * processors, _MOST_PARTS_WITH_ALTERNATIVES
    else:
        fewest, blocks, most = 1, _BLOCKS_PER_PROCESSOR * processors, _MOST_PARTS
    # With fewer vectors than threads, part of a block has nothing to do.
    worth = max(1, vectors // THREADS)
    return max(fewest, min(blocks // max(rows, 1), most, worth))


def vectors_of_part(vocabulary: int, item_bytes: int, parts: int) -> int:
    """Return how many vectors each part of a row has at most; the last part has what is left."""
    vectors = (vocabulary * item_bytes + VECTOR_BYTES - 1) // VECTOR_BYTES
    return (vectors + parts - 1) // parts

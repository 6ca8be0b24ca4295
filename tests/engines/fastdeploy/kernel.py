"""The oracle: that engine's structs through the kernel's own System V queue, written from the facts of its interface.

Each save fills a struct as that engine's op does, element by element, and sends all of it; each get receives one and
copies what it counts. Where the machine allows no such queue, the struct lies in memory between the two, which changes
nothing but the carrier. Nothing of the drop-in is used here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.errors import NotRunError
from benchmarks.sysv import Queue, queue_for

SLOTS, SPECULATIVE_SLOTS, TOKENS, COLUMNS = 512, 256, 6, 21
PREEMPTED, NOTHING_READ = -9, -2
Array = np.ndarray[Any, np.dtype[Any]]
Given = Mapping[str, Any]

_SLOT = np.dtype(
    [("tokens", "i4", (TOKENS * COLUMNS,)), ("scores", "f4", (TOKENS * COLUMNS,)), ("ranks", "i4", (TOKENS,))]
)
STRUCTS = {
    # The trailing pad is C's: each struct begins with a long, so its size is a multiple of eight.
    "speculate_get_output_topk": np.dtype(
        [("mtype", "i8"), ("meta", "i4", (3 + SLOTS,)), ("mtext", _SLOT, (SLOTS,)), ("pad", "V4")]
    ),
    "get_output_topk": np.dtype(
        [
            ("mtype", "i8"),
            ("mtext", "i4", (2 + SLOTS * COLUMNS,)),
            ("scores", "f4", (SLOTS * COLUMNS,)),
            ("ranks", "i4", (SLOTS,)),
        ]
    ),
    "speculate_get_output": np.dtype(
        [("mtype", "i8"), ("mtext", "i4", (2 + SPECULATIVE_SLOTS + SPECULATIVE_SLOTS * TOKENS,))]
    ),
    "get_output": np.dtype([("mtype", "i8"), ("mtext", "i4", (2 + SLOTS,))]),
}
STRUCT_BYTES = 530_456
_MOST_WAITING = 16
"""How many structs the queue holds: beyond that a save waits, as that engine then stalls."""
GETS = {
    "speculate_save_output_topk": "speculate_get_output_topk",
    "mtp_save_first_token_with_topk": "speculate_get_output_topk",
    "save_output_topk": "get_output_topk",
    "speculate_save_output": "speculate_get_output",
    "mtp_save_first_token": "speculate_get_output",
    "save_output": "get_output",
}


class Memory:
    """What takes the kernel's place where it has no queue for us."""

    def __init__(self) -> None:
        self._sent: deque[Array] = deque()

    def send(self, struct: Array) -> None:
        """Keep a copy."""
        self._sent.append(struct.copy())

    def receive(self, struct: Array) -> None:
        """Give the oldest."""
        struct[()] = self._sent.popleft()


@contextmanager
def queue() -> Iterator["KernelQueue"]:
    """Yield a queue of the kernel's own, or one in memory that says why."""
    try:
        with queue_for(_MOST_WAITING * STRUCT_BYTES) as found:
            yield KernelQueue(found, "")
    except NotRunError as why:
        yield KernelQueue(Memory(), str(why))


class KernelQueue:
    """That engine's ops on one queue; the messages in it are counted here, as its ops would wait for ever."""

    def __init__(self, carrier: Queue | Memory, why_not: str = "") -> None:
        """Send and receive through a carrier."""
        assert STRUCTS["speculate_get_output_topk"].itemsize == STRUCT_BYTES
        self._carrier = carrier
        self.why_not = why_not
        """Why the kernel's own queue is not used; empty: it is."""
        self._waiting: deque[str] = deque()
        self._structs = {op: np.zeros((), dtype) for op, dtype in STRUCTS.items()}

    def __len__(self) -> int:
        """Return how many messages are in it."""
        return len(self._waiting)

    @property
    def next_op(self) -> str:
        """The op that gets the next message."""
        return self._waiting[0]

    def save(self, op: str, given: Given, message_id: int = 1) -> None:
        """Do what a save op does with its arguments by name."""
        rank, each = given.get("rank_id", 0), given.get("save_each_rank", False)
        if rank > 0 and not each:
            return
        struct = np.zeros((), STRUCTS[GETS[op]])
        struct["mtype"] = 1
        first = message_id if bool(flat(given["not_need_stop"])[0]) else -message_id
        _SAVES[op](struct, given, first)
        self._carrier.send(struct)
        self._waiting.append(GETS[op])

    def get(self, outputs: list[Array], k: int = 20) -> None:
        """Do what the next message's get op does with its tensors."""
        op = self._waiting.popleft()
        struct = self._structs[op]
        self._carrier.receive(struct)
        _GETS[op](struct, outputs, k)


def flat(array: Any) -> Array:  # noqa: ANN401 - an array, or a list
    """Return an array as that engine's ops read it: element by element."""
    found: Array = np.asarray(array).reshape(-1)
    return found


def _is_prefilling(given: Given, slot: int) -> bool:
    if "seq_lens_decoder" not in given:
        return False
    return bool(flat(given["seq_lens_decoder"])[slot] < flat(given["prompt_lens"])[slot])


def _is_preempted(given: Given, slot: int) -> bool:
    return "preempted_idx" in given and bool(flat(given["preempted_idx"])[slot] == 1)


def _entry(  # noqa: PLR0913, PLR0917 - a token's line, and where it goes
    struct: Array, slot: int, place: int, ids: Array, scores: Array, rank: int
) -> None:
    """Write one token's line; columns that it does not have are -1, with 0.0."""
    into = struct["mtext"][slot]
    begin = place * COLUMNS
    into["tokens"][begin : begin + COLUMNS] = -1
    into["scores"][begin : begin + COLUMNS] = 0
    into["tokens"][begin : begin + ids.size] = ids.astype(np.int32)
    into["scores"][begin : begin + scores.size] = scores
    into["ranks"][place] = np.int64(rank).astype(np.int32)


def _speculate_topk(struct: Array, given: Given, first: int) -> None:
    numbers, offsets = flat(given["token_num_per_batch"]), flat(given["cu_batch_token_offset"])
    ids, scores, ranks = (flat(given[name]) for name in ("logprob_token_ids", "logprob_scores", "logprob_ranks"))
    sampled, columns = flat(given["sampled_token_ids"]), given["logprob_token_ids"].shape[1]
    struct["meta"][:3] = first, (given["message_flag"] & 0xFF) | columns << 8, numbers.size
    for slot in range(numbers.size):
        count = 0 if _is_prefilling(given, slot) else int(numbers[slot])
        count = PREEMPTED if _is_preempted(given, slot) else count
        struct["meta"][3 + slot] = count
        for place in range(count):
            token = int(offsets[slot]) + place
            line = ids[token * columns : (token + 1) * columns].copy()
            line[0] = sampled[token]
            _entry(struct, slot, place, line, scores[token * columns : (token + 1) * columns], ranks[token])


def _first_topk(struct: Array, given: Given, first: int) -> None:
    """One entry more for each slot than it has accepted tokens; a count of -3 stays what it is."""
    numbers, offsets = flat(given["token_num_per_batch"]), flat(given["cu_batch_token_offset"])
    ids, scores, ranks = (flat(given[name]) for name in ("logprob_token_ids", "logprob_scores", "logprob_ranks"))
    sampled, columns = given["sampled_token_ids"], given["logprob_token_ids"].shape[1]
    struct["meta"][:3] = first, (given["message_flag"] & 0xFF) | columns << 8, numbers.size
    for slot in range(numbers.size):
        count = 0 if _is_prefilling(given, slot) else int(numbers[slot])
        count = PREEMPTED if _is_preempted(given, slot) else count + (count > 0)
        struct["meta"][3 + slot] = count
        for place in range(count):
            token = flat(sampled)[slot * sampled.shape[1] + place]
            if place:
                _entry(struct, slot, place, np.array([token]), np.zeros(1, np.float32), 0)
                continue
            begin = int(offsets[slot]) * columns
            line = ids[begin : begin + columns].copy()
            line[0] = token
            _entry(struct, slot, 0, line, scores[begin : begin + columns], ranks[int(offsets[slot])])


def _single_topk(struct: Array, given: Given, first: int) -> None:
    sampled, ranks = flat(given["sampled_token_ids"]), flat(given["ranks"])
    ids, scores = flat(given["logprob_token_ids"]), flat(given["logprobs"])
    columns, slots = given["logprob_token_ids"].shape[1], given["sampled_token_ids"].shape[0]
    struct["mtext"][:2] = first, slots
    for slot in range(slots):
        begin = slot * COLUMNS
        struct["mtext"][2 + begin : 2 + begin + COLUMNS] = -1
        struct["mtext"][2 + begin : 2 + begin + columns] = ids[slot * columns : (slot + 1) * columns].astype(np.int32)
        token = PREEMPTED if _is_preempted(given, slot) else sampled[slot]
        struct["mtext"][2 + begin] = np.int64(token).astype(np.int32)
        struct["scores"][begin : begin + columns] = scores[slot * columns : (slot + 1) * columns]
        struct["ranks"][slot] = ranks[slot].astype(np.int32)


def _speculate(struct: Array, given: Given, first: int) -> None:
    tokens, numbers = given["accept_tokens"], flat(given["accept_num"])
    struct["mtext"][:2] = first, tokens.shape[0]
    for slot in range(tokens.shape[0]):
        count = 0 if given["skip_chunk_prefill"] and _is_prefilling(given, slot) else int(numbers[slot])
        count = PREEMPTED if _is_preempted(given, slot) else count
        struct["mtext"][2 + slot] = count
        for place in range(count):
            token = flat(tokens)[slot * tokens.shape[1] + place].astype(np.int32)
            struct["mtext"][2 + SPECULATIVE_SLOTS + slot * TOKENS + place] = token


def _first(struct: Array, given: Given, first: int) -> None:
    tokens = given["base_model_draft_tokens"]
    struct["mtext"][:2] = first, tokens.shape[0]
    for slot, step in enumerate(flat(given["step_idx"])):
        skipped = given["skip_chunk_prefill"] and _is_prefilling(given, slot)
        count = 2 if step == 1 and not skipped else 0
        struct["mtext"][2 + slot] = count
        for place in range(count):
            token = tokens[slot, place].astype(np.int32)
            struct["mtext"][2 + SPECULATIVE_SLOTS + slot * TOKENS + place] = token


def _single(struct: Array, given: Given, first: int) -> None:
    sampled, slots = flat(given["sampled_token_ids"]), given["sampled_token_ids"].shape[0]
    struct["mtext"][:2] = first, slots
    for slot in range(slots):
        token = PREEMPTED if _is_preempted(given, slot) else sampled[slot]
        struct["mtext"][2 + slot] = np.int64(token).astype(np.int32)


def _get_speculate_topk(struct: Array, outputs: list[Array], k: int) -> None:
    tokens, scores, ranks = (flat(output) for output in outputs)
    columns, slots = min(int(struct["meta"][1]) >> 8, k + 1), int(struct["meta"][2])
    tokens[0], tokens[2] = struct["meta"][0], slots
    tokens[1] = (int(struct["meta"][1]) & 0xFF) | columns << 8
    for slot in range(slots):
        count = int(struct["meta"][3 + slot])
        tokens[3 + slot] = count
        for place in range(count):
            begin, of_slot = (slot * TOKENS + place) * COLUMNS, place * COLUMNS
            here = struct["mtext"][slot]
            tokens[3 + SLOTS + begin : 3 + SLOTS + begin + k + 1] = here["tokens"][of_slot : of_slot + k + 1]
            scores[begin : begin + k + 1] = here["scores"][of_slot : of_slot + k + 1]
            ranks[slot * TOKENS + place] = here["ranks"][place]


def _get_single_topk(struct: Array, outputs: list[Array], k: int) -> None:
    tokens, scores, ranks = (flat(output) for output in outputs)
    slots = int(struct["mtext"][1])
    tokens[:2] = struct["mtext"][:2]
    for slot in range(slots):
        begin = slot * COLUMNS
        tokens[2 + begin : 2 + begin + k + 1] = struct["mtext"][2 + begin : 2 + begin + k + 1]
        scores[begin : begin + k + 1] = struct["scores"][begin : begin + k + 1]
        ranks[slot] = struct["ranks"][slot]


def _get_speculate(struct: Array, outputs: list[Array], _k: int) -> None:
    flat(outputs[0])[:] = struct["mtext"]


def _get_single(struct: Array, outputs: list[Array], _k: int) -> None:
    slots = int(struct["mtext"][1])
    flat(outputs[0])[: 2 + slots] = struct["mtext"][: 2 + slots]


_SAVES = {
    "speculate_save_output_topk": _speculate_topk,
    "mtp_save_first_token_with_topk": _first_topk,
    "save_output_topk": _single_topk,
    "speculate_save_output": _speculate,
    "mtp_save_first_token": _first,
    "save_output": _single,
}
_GETS = {
    "speculate_get_output_topk": _get_speculate_topk,
    "get_output_topk": _get_single_topk,
    "speculate_get_output": _get_speculate,
    "get_output": _get_single,
}

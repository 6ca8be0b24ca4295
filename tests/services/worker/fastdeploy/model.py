"""What that engine's ops do with its queue, written slowly from the facts of its interface, without this bus.

Each save makes the fields of a message, each get writes a message into output arrays. Where its own ops leave whatever
was there before, or send what nobody may read, the model says what is right instead: nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SLOTS, SPECULATIVE_SLOTS, TOKENS, COLUMNS = 512, 256, 6, 21
PREEMPTED = -9
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Entry:
    """One token of a slot: its columns, and its rank."""

    ids: list[int]
    scores: list[float]
    rank: int = 0


@dataclass
class Sent:
    """One message."""

    stop_flag: int
    flag: int
    columns: int
    counts: list[int]
    entries: list[list[Entry]] = field(default_factory=list)


def stop_flag(not_need_stop: Array) -> int:
    """Return the first field of a message."""
    return 1 if bool(not_need_stop[0]) else -1


def flat(array: Array) -> list[Any]:
    """Return an array as that engine's ops read it: element by element."""
    found: list[Any] = np.asarray(array).reshape(-1).tolist()
    return found


def columns_of(token: int, line: int, ids: Array, scores: Array) -> Entry:
    """Return a token with the columns of its line; the first is the sampled token's."""
    columns = ids.shape[1]
    entry = Entry([token], [float(scores[line, 0])])
    for column in range(1, columns):
        entry.ids.append(int(ids[line, column]))
        entry.scores.append(float(scores[line, column]))
    return entry


def speculate_save_output_topk(given: dict[str, Any]) -> Sent:
    """Return what the op sends, in each of its forms."""
    numbers, offsets = flat(given["token_num_per_batch"]), flat(given["cu_batch_token_offset"])
    sent = Sent(stop_flag(given["not_need_stop"]), given["message_flag"], given["logprob_token_ids"].shape[1], [])
    sampled, ranks = flat(given["sampled_token_ids"]), flat(given["logprob_ranks"])
    for slot, number in enumerate(numbers):
        count = 0 if is_prefilling(given, slot) else number
        entries = []
        for token in range(max(count, 0)):
            place = offsets[slot] + token
            entry = columns_of(sampled[place], place, given["logprob_token_ids"], given["logprob_scores"])
            entry.rank = ranks[place]
            entries.append(entry)
        if entries and entries[0].ids[0] == -1:
            count, entries = 0, []
        if is_preempted(given, slot):
            count, entries = PREEMPTED, []
        sent.counts.append(count)
        sent.entries.append(entries)
    return sent


def mtp_save_first_token_with_topk(given: dict[str, Any]) -> Sent:
    """Return what the op sends: one entry more for each slot than it has accepted tokens."""
    numbers, offsets = flat(given["token_num_per_batch"]), flat(given["cu_batch_token_offset"])
    sent = Sent(stop_flag(given["not_need_stop"]), given["message_flag"], given["logprob_token_ids"].shape[1], [])
    sampled, ranks = given["sampled_token_ids"], flat(given["logprob_ranks"])
    for slot, number in enumerate(numbers):
        entries = []
        if number > 0 and not is_prefilling(given, slot):
            line = offsets[slot]
            first = columns_of(int(sampled[slot, 0]), line, given["logprob_token_ids"], given["logprob_scores"])
            first.rank = ranks[line]
            entries = [first, *(Entry([int(sampled[slot, place])], [0.0]) for place in range(1, number + 1))]
        count = len(entries)
        if is_preempted(given, slot):
            count, entries = PREEMPTED, []
        sent.counts.append(count)
        sent.entries.append(entries)
    return sent


def save_output_topk(given: dict[str, Any]) -> Sent:
    """Return what the op sends: one token a slot, or a magic one in its place."""
    sent = Sent(stop_flag(given["not_need_stop"]), 3, given["logprob_token_ids"].shape[1], [])
    for slot, token in enumerate(flat(given["sampled_token_ids"])):
        if is_preempted(given, slot):
            token = PREEMPTED  # noqa: PLW2901 - as the op does
        entry = Entry([token], [0.0])
        if token >= 0:
            entry = columns_of(token, slot, given["logprob_token_ids"], given["logprobs"])
            entry.rank = flat(given["ranks"])[slot]
        sent.counts.append(1)
        sent.entries.append([entry])
    return sent


def speculate_save_output(given: dict[str, Any]) -> Sent:
    """Return what the op sends."""
    sent = Sent(stop_flag(given["not_need_stop"]), 3, 1, [])
    for slot, number in enumerate(flat(given["accept_num"])):
        count = 0 if given["skip_chunk_prefill"] and is_prefilling(given, slot) else number
        tokens = given["accept_tokens"][slot].tolist()[: max(count, 0)]
        if tokens and tokens[0] == -1:
            count, tokens = 0, []
        if is_preempted(given, slot):
            count, tokens = PREEMPTED, []
        sent.counts.append(count)
        sent.entries.append([Entry([token], []) for token in tokens])
    return sent


def mtp_save_first_token(given: dict[str, Any]) -> Sent:
    """Return what the op sends: a token and a draft id for the slots at their first step."""
    sent = Sent(stop_flag(given["not_need_stop"]), 3, 1, [])
    for slot, step in enumerate(flat(given["step_idx"])):
        skipped = given["skip_chunk_prefill"] and is_prefilling(given, slot)
        tokens = given["base_model_draft_tokens"][slot].tolist()[:2] if step == 1 and not skipped else []
        sent.counts.append(len(tokens))
        sent.entries.append([Entry([token], []) for token in tokens])
    return sent


def save_output(given: dict[str, Any]) -> Sent:
    """Return what the op sends: one token a slot, or a magic one in its place."""
    sent = Sent(stop_flag(given["not_need_stop"]), 3, 1, [])
    for slot, token in enumerate(flat(given["sampled_token_ids"])):
        sent.counts.append(1)
        sent.entries.append([Entry([PREEMPTED if is_preempted(given, slot) else token], [])])
    return sent


def is_prefilling(given: dict[str, Any], slot: int) -> bool:
    """Tell whether a slot's prompt is not computed yet, where the op's form says so."""
    if "seq_lens_decoder" not in given:
        return False
    return bool(flat(given["seq_lens_decoder"])[slot] < flat(given["prompt_lens"])[slot])


def is_preempted(given: dict[str, Any], slot: int) -> bool:
    """Tell whether a slot was preempted, where the op's form says so."""
    return "preempted_idx" in given and flat(given["preempted_idx"])[slot] == 1


def speculate_get_output_topk(sent: Sent, tokens: Array, scores: Array, ranks: Array, real_k: int) -> None:
    """Write a message into the output arrays."""
    out, values = tokens.reshape(-1), scores.reshape(-1)
    columns = min(sent.columns, real_k + 1) if sent.counts else 1  # without slots there is nothing to count
    out[0], out[1], out[2] = sent.stop_flag, sent.flag + 256 * columns, len(sent.counts)
    for slot, count in enumerate(sent.counts):
        out[3 + slot] = count
        for place, entry in enumerate(sent.entries[slot]):
            begin = (slot * TOKENS + place) * COLUMNS
            for column in range(real_k + 1):
                has = column < len(entry.ids)
                out[3 + SLOTS + begin + column] = entry.ids[column] if has else -1
                values[begin + column] = entry.scores[column] if has else 0.0
            ranks.reshape(-1)[slot * TOKENS + place] = entry.rank


def speculate_get_output(sent: Sent, tokens: Array) -> None:
    """Write a message into the output array, all of it."""
    out = tokens.reshape(-1)
    out[:] = 0
    out[0], out[1] = sent.stop_flag, len(sent.counts)
    for slot, count in enumerate(sent.counts):
        out[2 + slot] = count
        for place, entry in enumerate(sent.entries[slot]):
            out[2 + SPECULATIVE_SLOTS + slot * TOKENS + place] = entry.ids[0]


def get_output_topk(sent: Sent, tokens: Array, scores: Array, ranks: Array, k: int) -> None:
    """Write a message into the output arrays."""
    out, values = tokens.reshape(-1), scores.reshape(-1)
    out[0], out[1] = sent.stop_flag, len(sent.counts)
    for slot, (entry,) in enumerate(sent.entries):
        for column in range(k + 1):
            has = column < len(entry.ids)
            out[2 + slot * COLUMNS + column] = entry.ids[column] if has else -1
            values[slot * COLUMNS + column] = entry.scores[column] if has else 0.0
        ranks.reshape(-1)[slot] = entry.rank


def get_output(sent: Sent, tokens: Array) -> None:
    """Write a message into the output array."""
    out = tokens.reshape(-1)
    out[0], out[1] = sent.stop_flag, len(sent.counts)
    for slot, (entry,) in enumerate(sent.entries):
        out[2 + slot] = entry.ids[0]

"""The engine's side of the tests: steps with random contents as its ops are given them, and tensors to get into."""

from typing import Any

import numpy as np

from tests.engines.fastdeploy.undefined import COLUMNS, SLOTS, SPECULATIVE_SLOTS, TOKENS, Array
from tokenbus.engines.fastdeploy.message import Kind, Lengths, Message

TOPK, FIRST, PLAIN = "speculate_save_output_topk", "mtp_save_first_token_with_topk", "speculate_save_output"
_VOCABULARY = 151_936
_SCORED = """sampled_token_ids logprob_token_ids logprob_scores logprob_ranks token_num_per_batch cu_batch_token_offset
    not_need_stop seq_lens_decoder prompt_lens preempted_idx message_flag rank_id save_each_rank"""
_LENGTHS = "not_need_stop seq_lens_decoder prompt_lens"
_ARGUMENTS = {
    TOPK: _SCORED,
    FIRST: _SCORED,
    "save_output_topk": "sampled_token_ids logprob_token_ids logprobs ranks not_need_stop preempted_idx rank_id",
    PLAIN: f"accept_tokens accept_num {_LENGTHS} preempted_idx rank_id save_each_rank skip_chunk_prefill",
    "mtp_save_first_token": f"base_model_draft_tokens {_LENGTHS} step_idx rank_id save_each_rank skip_chunk_prefill",
    "save_output": "sampled_token_ids not_need_stop preempted_idx rank_id save_each_rank",
}
"""Each save op's arguments in their order."""


class Tensor:
    """An array that lies elsewhere, as a framework's does: it is copied to be read, and changed by its own methods."""

    def __init__(self, array: Array) -> None:
        self._array = array.copy()

    def numpy(self) -> Array:
        return self._array.copy()

    def set_value(self, array: Array) -> None:
        assert array.shape == self._array.shape
        assert array.dtype == self._array.dtype
        self._array = array.copy()

    def __setitem__(self, place: Any, value: Any) -> None:  # noqa: ANN401 - as numpy takes them
        self._array[place] = value


def outputs(op: str) -> list[Array]:
    sizes = {
        "speculate_get_output_topk": (3 + SLOTS + SLOTS * TOKENS * COLUMNS, SLOTS * TOKENS * COLUMNS, SLOTS * TOKENS),
        "get_output_topk": (2 + SLOTS * COLUMNS, SLOTS * COLUMNS, SLOTS),
    }
    if op in sizes:
        tokens, scores, ranks = sizes[op]
        return [np.full((tokens, 1), 2, np.int64), np.zeros((scores, 1), np.float32), np.zeros(ranks, np.int64)]
    if op == "speculate_get_output":
        return [np.full(2 + SPECULATIVE_SLOTS + SPECULATIVE_SLOTS * TOKENS, 2, np.int64)]
    return [np.full((2 + SLOTS, 1), 2, np.int64)]


class Steps:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def drawn(self, op: str, slots: int, columns: int = 1) -> dict[str, Any]:
        draw = self._random
        numbers = draw.integers(0, TOKENS + (op != FIRST), slots)
        if op != FIRST:
            numbers[draw.random(slots) < 0.05] = -3
        own = np.maximum(numbers, 0)
        offsets = np.cumsum(own) - own
        scored = self.scored(int(own.sum()) if op in {TOPK, FIRST} else slots, columns)
        sampled = scored["ids"][:, :1].copy()
        if op == FIRST:
            sampled, with_token = self.ids(slots, TOKENS + int(draw.integers(3))), np.flatnonzero(numbers)
            sampled[with_token, 0] = scored["ids"][offsets[with_token], 0]
        elif op != TOPK:
            sampled = self.ids(slots, 1) if op == "save_output" else sampled
            sampled = np.where(draw.random(sampled.shape) < 0.1, draw.choice([-1, -3], sampled.shape), sampled)
        prompts = draw.integers(1, 5, (slots, 1))
        values = {
            "sampled_token_ids": sampled,
            "accept_tokens": self.ids(slots, TOKENS + int(draw.integers(3))),
            "base_model_draft_tokens": self.ids(slots, TOKENS),
            **_named(scored),
            "token_num_per_batch": numbers.astype(np.int32),
            "accept_num": numbers.astype(np.int32),
            "cu_batch_token_offset": offsets.astype(np.int32),
            "not_need_stop": np.array([draw.random() < 0.8]),
            "seq_lens_decoder": (prompts + draw.integers(-1, 6, (slots, 1))).astype(np.int32),
            "prompt_lens": prompts,
            "preempted_idx": (draw.random((slots, 1)) < 0.1).astype(np.int32),
            "step_idx": draw.integers(0, 3, (slots, 1)),
            "message_flag": 3,
            "rank_id": 0,
            "save_each_rank": False,
            "skip_chunk_prefill": bool(draw.random() < 0.5),
        }
        return {name: values[name] for name in _ARGUMENTS[op].split()}

    def any(self, op: str, slots: int, columns: int) -> dict[str, Any]:
        """Return arguments as no well-behaved step has them: whatever the struct can hold."""
        draw = self._random
        given = self.drawn(op, slots, columns)
        if op == TOPK:
            given["sampled_token_ids"] = self._laid(given, str(draw.choice(["lines", "lines", "upright", "flat"])))
            given["message_flag"] = int(draw.choice([3, 3, 3, 4, 4, 4, 0, 255]))
        if "cu_batch_token_offset" in given and draw.random() < 0.5:
            self._permute(given)
        for name in ("logprob_scores", "logprobs"):
            if name in given and draw.random() < 0.5:
                given[name] = self._odd_scores(given[name])
        for name in ("logprob_ranks", "ranks"):
            if name in given and draw.random() < 0.2:
                given[name] = draw.integers(-(2**33), 2**33, given[name].shape)
        if "logprob_token_ids" in given and columns > 1 and draw.random() < 0.2:
            padded = draw.random(given["logprob_token_ids"].shape) < 0.3
            padded[:, 0] = False
            given["logprob_token_ids"] = np.where(padded, -1, given["logprob_token_ids"])
        if "preempted_idx" in given and draw.random() < 0.2:
            given["preempted_idx"] = draw.integers(-1, 3, given["preempted_idx"].shape).astype(np.int32)
        self._odd_numbers(given)
        return given

    def _odd_numbers(self, given: dict[str, Any]) -> None:
        draw = self._random
        for name in ("token_num_per_batch", "accept_num"):
            if name in given and draw.random() < 0.2:
                magic = draw.choice([-1, -2, -3, -9, -100], given[name].shape)
                given[name] = np.where(draw.random(given[name].shape) < 0.2, magic, given[name]).astype(np.int32)
        if draw.random() < 0.1:
            name = next(name for name in given if name.endswith(("_ids", "_tokens")))
            given[name] = given[name] - 2**31 * (draw.random(given[name].shape) < 0.1)

    def _laid(self, given: dict[str, Any], how: str) -> Array:
        """Return the sampled tokens in lines, as since #5927, or one behind the other, as before it and of drafts."""
        upright: Array = given["sampled_token_ids"]
        if how != "lines":
            return upright if how == "upright" else upright[:, 0].copy()
        numbers = given["token_num_per_batch"]
        most = max(1, int(numbers.max(initial=1)))
        return self.ids(numbers.size, int(self._random.integers(max(2, most), TOKENS + 3)))

    def _permute(self, given: dict[str, Any]) -> None:
        numbers = np.maximum(given["token_num_per_batch"], 0)
        order = self._random.permutation(numbers.size)
        offsets = np.zeros(numbers.size, np.int32)
        offsets[order] = np.cumsum(numbers[order]) - numbers[order]
        given["cu_batch_token_offset"] = offsets

    def _odd_scores(self, values: Array) -> Array:
        """Return scores of which some break every rule, or all are whatever lay in memory."""
        draw = self._random
        if draw.random() < 0.3:
            garbage: Array = draw.integers(0, 2**32, values.shape, np.uint32).view(np.float32)
            return garbage
        odd = np.array([2e-5, np.nan, np.inf, -np.inf, -1e30, 3.5, -0.0], np.float32)
        found: Array = np.where(draw.random(values.shape) < 0.1, draw.choice(odd, values.shape), values)
        return found.astype(np.float32)

    def scored(self, tokens: int, columns: int) -> dict[str, Array]:
        """Return so many sampled tokens with the columns of each: its own, then the most probable ones."""
        draw = self._random
        top = columns - 1
        apart = draw.integers(1, _VOCABULARY // (columns + 1), (tokens, columns))  # no id is twice in a line
        ids = (np.cumsum(apart, axis=1) + draw.integers(0, _VOCABULARY, (tokens, 1))) % _VOCABULARY
        drops = draw.uniform(0.01, 2.0, (tokens, columns)).astype(np.float32)
        values = -np.cumsum(drops, axis=1, dtype=np.float32)
        # The line is in order of probability; the sampled token is one of the most probable, or comes behind them.
        sampled = draw.integers(0, columns, tokens)
        lines = np.arange(tokens)
        return {
            "ids": np.column_stack([ids[lines, sampled], ids[:, :top]]),
            "logprobs": np.column_stack([values[lines, sampled], values[:, :top]]).astype(np.float32),
            "ranks": np.where(sampled < top, sampled + 1, columns + draw.integers(0, 100, tokens)).astype(np.int64),
        }

    def ids(self, *shape: int) -> Array:
        return self._random.integers(0, _VOCABULARY, shape) * (self._random.random(shape) < 0.9)


def _named(scored: dict[str, Array]) -> dict[str, Array]:
    names = {
        "ids": ("logprob_token_ids",),
        "logprobs": ("logprob_scores", "logprobs"),
        "ranks": ("logprob_ranks", "ranks"),
    }
    return {name: scored[column] for column, of in names.items() for name in of}


def whole(op: str, *counts: int, columns: int = 3) -> dict[str, Any]:
    steps, slots, numbers = Steps(6), len(counts), np.array(counts, np.int32)
    given = steps.drawn(op, slots, columns)
    scored = steps.scored(sum(counts) if "token_num_per_batch" in given else slots, columns)
    changes: dict[str, Any] = {
        "sampled_token_ids": np.arange(5, 5 + 6 * slots).reshape(slots, 6) if op == FIRST else scored["ids"][:, :1],
        **_named(scored),
        "token_num_per_batch": numbers,
        "cu_batch_token_offset": (np.cumsum(numbers) - numbers).astype(np.int32),
        "accept_num": numbers,
        "not_need_stop": np.array([True]),
        "seq_lens_decoder": np.full((slots, 1), 9, np.int32),
        "prompt_lens": np.full((slots, 1), 4),
        "preempted_idx": np.zeros((slots, 1), np.int32),
        "step_idx": np.ones((slots, 1), np.int64),
        "skip_chunk_prefill": True,
    }
    return given | {name: value for name, value in changes.items() if name in given}


def message(flag: int, *counts: int, computed: int = 9, is_running: bool = True, **changes: object) -> Message:
    tokens = np.arange(sum(max(count, 0) for count in counts), dtype=np.int32).reshape(-1, 1)
    found = Message(
        kind=Kind.SPECULATED_SCORED,
        stop_flag=1 if is_running else -1,
        flag=flag,
        counts=np.array(counts, np.int32),
        tokens=tokens,
        scores=np.full(tokens.shape, -1, np.float32),
        ranks=np.ones(tokens.size, np.int32),
        lengths=Lengths(np.full(len(counts), computed), np.full(len(counts), 4)),
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found

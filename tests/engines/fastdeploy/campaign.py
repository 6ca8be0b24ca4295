"""The differential run: random calls to the drop-in and to FastDeploy's ops, and the same tensors out."""

import os
from typing import Any

import numpy as np

from tests.engines.fastdeploy import kernel
from tests.engines.fastdeploy.bus import Beside
from tests.engines.fastdeploy.engine import Steps
from tests.engines.fastdeploy.kernel import Saved
from tests.engines.fastdeploy.theirs import FLAT_FORM, FORMS, GETS, has_op, takes_preempted

ALL_FORMS = (FLAT_FORM, *FORMS)
_QUEUES = ("1", "2")
_GETS = tuple(dict.fromkeys(GETS.values()))
_SCORED_QUEUE = tuple(op for op in _GETS if op != "speculate_get_output")
_IDLE_RANKS = ("get_output", "speculate_get_output")
"""The gets that read on rank 0 alone."""
_MESSAGE_IDS = (1, 1, 1, 3, 2**31 - 1)
_MOST_WAITING = 12
_STRUCT_COLUMNS = 21


def spoken(form: str) -> str:
    """Return the drop-in's form for an oracle's: the drop-in reads flat tokens in every form."""
    return "2.4" if form == FLAT_FORM else form


def run(form: str, steps: int, seed: int, *, most_slots: int) -> None:
    draw, engine = np.random.default_rng(seed), Steps(seed)
    ops = [op for op in GETS if has_op(form, op)]
    with kernel.queue(form) as one, kernel.queue(form) as two:
        beside = {number: Beside(queue) for number, queue in zip(_QUEUES, (one, two), strict=True)}
        for _ in range(steps):
            queue, message_id = str(draw.choice(_QUEUES)), int(draw.choice(_MESSAGE_IDS))
            os.environ.update({"INFERENCE_MSG_QUEUE_ID": queue, "INFERENCE_MSG_ID": str(message_id)})
            _get_some(draw, beside[queue])
            op = str(draw.choice(ops))
            beside[queue].save(op, drawn(draw, engine, op, form, most_slots), message_id)
        for queue, both in beside.items():
            os.environ["INFERENCE_MSG_QUEUE_ID"] = queue
            both.get_all()


def _get_some(draw: np.random.Generator, both: Beside) -> None:
    """Get some of what waits, from either queue of the id, and now and then from one in which nothing does."""
    while len(both.kernel) and (len(both.kernel) >= _MOST_WAITING or draw.random() < 0.5):
        heads = both.kernel.heads
        _get(draw, both, heads[draw.integers(len(heads))])
    if draw.random() < 0.1:
        queues = both.kernel.ops.queues
        filled = {queues.of(head.op).identity for head in both.kernel.heads}
        empty = [op for op in _GETS if queues.of(op).identity not in filled]
        if empty:
            both.get_nothing(str(draw.choice(empty)))


def _get(draw: np.random.Generator, both: Beside, head: Saved) -> None:
    op, how = GETS[head.op], draw.random()
    if how < 0.05 and op in _SCORED_QUEUE:
        both.get_another_kind(head, str(draw.choice([other for other in _SCORED_QUEUE if other != op])))
    elif how < 0.1 and op in _IDLE_RANKS:
        both.get_on_idle_rank(op, int(draw.choice([1, 7])))
    elif how < 0.5 and op == "get_output":
        both.get(head, by="get_output_ep", rank=int(draw.choice([0, 1, 7])))
    else:
        both.get(head, rank=0 if op in _IDLE_RANKS else int(draw.choice([0, 0, 1])))


def drawn(draw: np.random.Generator, engine: Steps, op: str, form: str, most_slots: int) -> dict[str, Any]:
    slots = min(_slots(draw, most_slots), 256 if GETS[op] == "speculate_get_output" else 512)
    columns = int(draw.integers(1, _STRUCT_COLUMNS + 1))
    if op == "save_output_topk" and slots <= 8 and draw.random() < 0.2:
        columns = int(draw.integers(_STRUCT_COLUMNS, 2 * _STRUCT_COLUMNS))
    given = engine.any(op, slots, columns)
    if form == FLAT_FORM and op == "speculate_save_output_topk":
        given["sampled_token_ids"] = given["logprob_token_ids"][:, 0].copy()
    given["rank_id"] = int(draw.choice([0, 0, 0, 1, 3]))
    if "save_each_rank" in given:
        given["save_each_rank"] = bool(draw.random() < 0.5)
    has_older = op not in {"mtp_save_first_token_with_topk", "mtp_save_first_token"}
    if has_older and takes_preempted(form) == (draw.random() < 0.1):
        del given["preempted_idx"]
        if op == "speculate_save_output_topk" and draw.random() < 0.5:
            for name in ("seq_lens_decoder", "prompt_lens", "save_each_rank"):
                del given[name]
    return given


def _slots(draw: np.random.Generator, most: int) -> int:
    return int(draw.choice([0, 1, 2, 3, int(draw.integers(1, 33)), int(draw.integers(1, most + 1)), most]))

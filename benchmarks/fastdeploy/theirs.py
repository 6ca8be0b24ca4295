"""FastDeploy's ops in C over the kernel's queue: `theirs.c`, compiled when it is used first."""

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.errors import NotRunError
from benchmarks.sysv import Queue

_SOURCE = Path(__file__).with_name("theirs.c")
FORMS = ("2.4", "2.5", "2.6-before-7861", "2.6-before-7884", "2.6", "develop")
"""In the order of `enum form`."""
GETS = {
    "speculate_save_output_topk": "speculate_get_output_topk",
    "mtp_save_first_token_with_topk": "speculate_get_output_topk",
    "save_output_topk": "get_output_topk",
    "speculate_save_output": "speculate_get_output",
    "mtp_save_first_token": "speculate_get_output",
    "save_output": "get_output",
}
"""Which op gets what each op saves, in the order of `enum op`."""
_CODES = {op: code for code, op in enumerate(GETS)}
_TENSORS = {
    "sampled": (np.int64, ("sampled_token_ids", "accept_tokens", "base_model_draft_tokens")),
    "ids": (np.int64, ("logprob_token_ids",)),
    "scores": (np.float32, ("logprob_scores", "logprobs")),
    "ranks": (np.int64, ("logprob_ranks", "ranks")),
    "counts": (np.int32, ("token_num_per_batch", "accept_num")),
    "offsets": (np.int32, ("cu_batch_token_offset",)),
    "not_need_stop": (np.bool_, ("not_need_stop",)),
    "decoder": (np.int32, ("seq_lens_decoder",)),
    "prompt": (np.int64, ("prompt_lens",)),
    "preempted": (np.int32, ("preempted_idx",)),
    "step": (np.int64, ("step_idx",)),
}
Array = np.ndarray[Any, np.dtype[Any]]


class _Given(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in ("slots", "width", "columns")),
        *((name, ctypes.c_int32) for name in ("message_id", "flag", "rank", "each_rank", "skips_prefill", "is_flat")),
    )


class Queues(NamedTuple):
    """An id's two queues: ops without scores under speculation make the key of the other of "./"."""

    scored: Queue
    plain: Queue

    def of(self, op: str) -> Queue:
        """Return the queue of a save op, or of a get op."""
        return self.plain if GETS.get(op, op) == "speculate_get_output" else self.scored


class Theirs:
    """The ops of one release."""

    def __init__(self, form: str, queues: Queues) -> None:
        """Be of a form that `FORMS` names."""
        self.form = FORMS.index(form)
        self.queues = queues
        library, why_not = compiled()
        if library is None:
            raise NotRunError(why_not)
        self._library = library

    def save(self, op: str, given: Mapping[str, Any], *, message_id: int = 1, is_flat: bool = False) -> bool:
        """Save what an op is given, by name; return whether this rank sends it."""
        return self.save_prepared(op, *prepared(given, message_id=message_id, is_flat=is_flat))

    def save_prepared(self, op: str, structure: _Given, kept: object) -> bool:
        """Save what was prepared; `kept` has the memory that it points to."""
        del kept
        sent: int = self._library.theirs_save(_CODES[op], self.form, self.queues.of(op).identity, structure)
        if sent < 0:
            raise OSError(-sent, f"{op}: msgsnd")
        return bool(sent)

    def get(self, op: str, outputs: list[Array], k: int = 20, *, wait: bool = False) -> bool:
        """Get what a save op saved, on rank 0; return whether anything was there."""
        places = [*(output.ctypes.data for output in outputs), None, None][:3]
        queue = self.queues.of(op).identity
        return bool(self._library.theirs_get(_CODES[op], self.form, queue, wait, k, *places))


def prepared(given: Mapping[str, Any], *, message_id: int = 1, is_flat: bool = False) -> tuple[_Given, object]:
    """Return an op's arguments as the ops in C take them, and what must live as long."""
    structure, kept = _Given(), []
    for field, (dtype, names) in _TENSORS.items():
        found = next((given[name] for name in names if given.get(name) is not None), None)
        if found is None:
            continue
        array: Array = np.ascontiguousarray(found, dtype)
        kept.append(array)
        setattr(structure, field, array.ctypes.data)
        if field == "sampled":
            structure.slots, structure.width = array.shape[0], array.shape[1] if array.ndim > 1 else 1
        if field == "counts" and "cu_batch_token_offset" in given:
            structure.slots = array.shape[0]
        if field == "ids":
            structure.columns = array.shape[1]
    structure.message_id, structure.flag = message_id, given.get("message_flag", 3)
    structure.rank, structure.each_rank = given.get("rank_id", 0), given.get("save_each_rank", False)
    structure.skips_prefill, structure.is_flat = given.get("skip_chunk_prefill", True), is_flat
    return structure, kept


@cache
def compiled() -> tuple[ctypes.CDLL | None, str]:
    """Return the ops in C, or why there are none; the compiler is started by the first call alone."""
    with tempfile.TemporaryDirectory(prefix="theirs") as folder:
        library = Path(folder, "theirs.so")
        command = ["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            return None, "not run: there is no C compiler for FastDeploy's ops"
        opened = ctypes.CDLL(str(library))
    opened.theirs_save.argtypes = [ctypes.c_int] * 3 + [ctypes.POINTER(_Given)]
    opened.theirs_get.argtypes = [ctypes.c_int] * 5 + [ctypes.c_void_p] * 3
    return opened, ""

"""FastDeploy's ops in C over the kernel's queues: `theirs.c`, compiled once and kept by the hash of its text."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.errors import NotRunError
from benchmarks.sysv import Queue

_SOURCE = Path(__file__).with_name("theirs.c")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "tokenbus")
_COMPILE = ("cc", "-O3", "-fwrapv", "-fPIC", "-shared")
"""-O3 is the level at which setuptools compiles FastDeploy's ops."""
FLAT_FORM = "2.4-before-5927"
"""The form whose ops all read sampled tokens as a flat array."""
FORMS = ("2.4", "2.5", "2.6-before-7861", "2.6-before-7884", "2.6", "develop")
_FORM_CODES = {form: code for code, form in enumerate((FLAT_FORM, *FORMS))}
PACKS_FLAG = frozenset({"2.6", "develop"})
"""The forms in which the speculative ops with scores pack the number of columns."""
GETS = {
    "speculate_save_output_topk": "speculate_get_output_topk",
    "mtp_save_first_token_with_topk": "speculate_get_output_topk",
    "save_output_topk": "get_output_topk",
    "speculate_save_output": "speculate_get_output",
    "mtp_save_first_token": "speculate_get_output",
    "save_output": "get_output",
}
"""Which op gets what each op saves, in the order of `enum save_op`."""
_SAVE_CODES = {op: code for code, op in enumerate(GETS)}
_GET_CODES = {op: code for code, op in enumerate([*dict.fromkeys(GETS.values()), "get_output_ep"])}
_SINCE = {"mtp_save_first_token_with_topk": "2.6-before-7861"}
_PREEMPTED_SINCE = "2.5"
_TENSORS = {
    "tokens": (np.int64, ("sampled_token_ids", "accept_tokens", "base_model_draft_tokens")),
    "ids": (np.int64, ("logprob_token_ids",)),
    "scores": (np.float32, ("logprob_scores", "logprobs")),
    "ranks": (np.int64, ("logprob_ranks", "ranks")),
    "counts": (np.int32, ("token_num_per_batch", "accept_num")),
    "offsets": (np.int32, ("cu_batch_token_offset",)),
    "not_need_stop": (np.bool_, ("not_need_stop",)),
    "decoded": (np.int32, ("seq_lens_decoder",)),
    "prompts": (np.int64, ("prompt_lens",)),
    "preempted": (np.int32, ("preempted_idx",)),
    "steps": (np.int64, ("step_idx",)),
}
Array = np.ndarray[Any, np.dtype[Any]]


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in ("slots", "width", "columns", "token_items", "scored_items")),
        *((name, ctypes.c_int32) for name in ("message_id", "flag", "rank", "each_rank", "skips_prefill", "is_flat")),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("k", "rank", "wait", "each_rank")),
        *((name, ctypes.c_void_p) for name in ("tokens", "scores", "ranks")),
    )


class Queues(NamedTuple):
    scored: Queue
    plain: Queue

    def of(self, op: str) -> Queue:
        return self.plain if GETS.get(op, op) == "speculate_get_output" else self.scored


def has_op(form: str, op: str) -> bool:
    return _FORM_CODES[form] >= _FORM_CODES[_SINCE.get(op, FLAT_FORM)]


def takes_preempted(form: str) -> bool:
    """Tell whether a form's ops take preempted_idx, those of a first token without scores apart."""
    return _FORM_CODES[form] >= _FORM_CODES[_PREEMPTED_SINCE]


class Theirs:
    """The ops of one release over an id's queues."""

    def __init__(self, form: str, queues: Queues) -> None:
        self.form = form
        self.queues = queues
        library, why_not = compiled()
        if library is None:
            raise NotRunError(why_not)
        self._library = library

    def save(self, op: str, given: Mapping[str, Any], *, message_id: int = 1, is_flat: bool = False) -> bool:
        return self.saving(op, given, message_id=message_id, is_flat=is_flat)()

    def saving(
        self, op: str, given: Mapping[str, Any], *, message_id: int = 1, is_flat: bool = False
    ) -> Callable[[], bool]:
        """Return a function that saves the current contents of an op's arrays.

        `is_flat`: tokens of shape [n, 1] are a flat array, as those of one dimension always are.
        """
        step, arrays = _step(given, message_id=message_id, is_flat=is_flat)
        return partial(self._save, op, self.queues.of(op).identity, step, arrays)

    def _save(self, op: str, queue: int, step: _Step, arrays: list[Array], /) -> bool:
        del arrays  # only kept alive for `step`, which has their addresses
        sent: int = self._library.theirs_save(_FORM_CODES[self.form], _SAVE_CODES[op], queue, step)
        if sent < 0:
            raise OSError(-sent, f"{op}: {os.strerror(-sent)}")
        return bool(sent)

    def get(self, op: str, outputs: list[Array], k: int = 20, **how: int) -> int:
        """Do a get op; return the bytes that it read, 0 on a rank that reads none, or below 0 the kernel's error.

        `how` may have the rank, wait and each_rank. A message of another kind that is read leaves the outputs as they
        were: what FastDeploy makes of it has no meaning.
        """
        return self.getting(op, outputs, k, **how)()

    def getting(self, op: str, outputs: list[Array], k: int = 20, **how: int) -> Callable[[], int]:
        places = [output.ctypes.data for output in outputs]
        request = _Request(k=k, **how, **dict(zip(("tokens", "scores", "ranks"), places, strict=False)))
        queue = self.queues.of(op).identity
        return partial(self._get, _GET_CODES[op], queue, request, outputs)

    def _get(self, code: int, queue: int, request: _Request, outputs: list[Array], /) -> int:
        del outputs  # as in _save
        found: int = self._library.theirs_get(_FORM_CODES[self.form], code, queue, request)
        return found


def _step(given: Mapping[str, Any], *, message_id: int, is_flat: bool) -> tuple[_Step, list[Array]]:
    """Return an op's arguments as the ops in C take them, and the arrays that they point into."""
    step, arrays = _Step(), []
    for field, (dtype, names) in _TENSORS.items():
        found = next((given[name] for name in names if given.get(name) is not None), None)
        if found is None:
            continue
        array: Array = np.ascontiguousarray(found, dtype)
        arrays.append(array)
        setattr(step, field, array.ctypes.data)
        if field == "tokens":
            step.slots, step.token_items = array.shape[0], array.size
            step.width = array.shape[1] if array.ndim > 1 else 1
            step.is_flat = is_flat or array.ndim == 1
        elif field == "ids":
            step.columns, step.scored_items = array.shape[1], array.size
        elif field == "counts" and "cu_batch_token_offset" in given:
            step.slots = array.shape[0]
    step.message_id, step.flag = message_id, given.get("message_flag", 3)
    step.rank, step.each_rank = given.get("rank_id", 0), given.get("save_each_rank", False)
    step.skips_prefill = bool(given.get("skip_chunk_prefill", True))
    return step, arrays


@cache
def compiled() -> tuple[ctypes.CDLL | None, str]:
    text = _SOURCE.read_bytes() + " ".join(_COMPILE).encode()
    library = _CACHE / f"theirs-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run([*_COMPILE, "-o", str(made), str(_SOURCE)], check=True)
        except FileNotFoundError:
            return None, "not run: there is no C compiler for FastDeploy's ops"
        made.replace(library)
    opened = ctypes.CDLL(str(library))
    opened.theirs_save.argtypes = [ctypes.c_int] * 3 + [ctypes.POINTER(_Step)]
    opened.theirs_get.argtypes = [ctypes.c_int] * 3 + [ctypes.POINTER(_Request)]
    opened.theirs_get.restype = ctypes.c_ssize_t
    return opened, ""

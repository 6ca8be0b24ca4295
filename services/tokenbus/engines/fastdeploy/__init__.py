"""Save and get ops that replace FastDeploy's System V queue, as docs/fastdeploy.md describes."""

import importlib
import os

from tokenbus.engines.fastdeploy.environment import Options, is_off
from tokenbus.engines.fastdeploy.message import SLOTS
from tokenbus.engines.fastdeploy.ops import (
    get_output,
    get_output_ep,
    get_output_topk,
    mtp_save_first_token,
    mtp_save_first_token_with_topk,
    save_output,
    save_output_topk,
    speculate_get_output,
    speculate_get_output_topk,
    speculate_save_output,
    speculate_save_output_topk,
)
from tokenbus.engines.fastdeploy.process import PROCESS
from tokenbus.engines.fastdeploy_switch import SWITCH
from tokenbus_contracts import ContractError, Rule

__all__ = [
    "OPS",
    "Options",
    "assign",
    "close",
    "configure",
    "counts",
    "get_output",
    "get_output_ep",
    "get_output_topk",
    "mtp_save_first_token",
    "mtp_save_first_token_with_topk",
    "save_output",
    "save_output_topk",
    "speculate_get_output",
    "speculate_get_output_topk",
    "speculate_save_output",
    "speculate_save_output_topk",
]

OPS = tuple(name for name in __all__ if "output" in name or "first_token" in name)
_MOST_KEY = 2**64 - 1
_THEIRS = "TOKENBUS_FASTDEPLOY_OPS"


def configure(options: Options) -> None:
    """Set the options, which is allowed only before the first save or get. The environment supplies defaults."""
    PROCESS.configure(options)


def assign(slot: int, request_id: int, *, rank_id: int = 0) -> None:
    """Publish a slot's next steps under this request id. FastDeploy's own queue has no request ids."""
    if not 0 <= slot < SLOTS:
        raise ContractError("slot", f"0 to {SLOTS - 1}", slot, rule=Rule.NAMED)
    if not 1 <= request_id <= _MOST_KEY:
        raise ContractError("request_id", f"1 to {_MOST_KEY}", request_id, rule=Rule.NAMED)
    PROCESS.sender().assign(slot, request_id, rank_id)


def counts() -> dict[str, int]:
    """Return this process's counts of saved, received, waiting and published messages."""
    return PROCESS.counts()


def close() -> None:
    """Close this process's queues after passing saved messages to the kernel."""
    PROCESS.close()


def _own_op(name: str) -> object:
    """Return FastDeploy's own op, or raise ImportError with the names of the op and its module."""
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = os.environ.get(_THEIRS, "fastdeploy.model_executor.ops.gpu")
    try:
        op = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ImportError(f"cannot import name {name!r} from {module!r}, with {SWITCH}=off: {error}") from error
    if op is None:
        raise ImportError(f"cannot import name {name!r} from {module!r}, with {SWITCH}=off: its release lacks it")
    globals()[name] = op
    return op


if is_off():
    # FastDeploy is imported only when an op is used, so that this module also works without FastDeploy.
    globals().update(__getattr__=_own_op)
    for _name in OPS:
        del globals()[_name]

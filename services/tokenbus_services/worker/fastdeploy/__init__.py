"""FastDeploy's save and get ops over this bus, in the place of its System V queue: docs/fastdeploy.md says how."""

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.worker.fastdeploy.get_ops import (
    get_output,
    get_output_topk,
    speculate_get_output,
    speculate_get_output_topk,
)
from tokenbus_services.worker.fastdeploy.layout import SLOTS
from tokenbus_services.worker.fastdeploy.options import Options
from tokenbus_services.worker.fastdeploy.process import PROCESS
from tokenbus_services.worker.fastdeploy.save_plain import mtp_save_first_token, save_output, speculate_save_output
from tokenbus_services.worker.fastdeploy.save_scored import (
    mtp_save_first_token_with_topk,
    save_output_topk,
    speculate_save_output_topk,
)

__all__ = [
    "Options",
    "assign",
    "close",
    "configure",
    "get_output",
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

_MOST_KEY = 2**64 - 1


def configure(options: Options) -> None:
    """Choose how this process saves and gets, before it first does; without it, the environment and defaults say."""
    PROCESS.configure(options)


def assign(slot: int, request_key: int, *, rank_id: int = 0) -> None:
    """Say which request a slot has from its next step on; the ops alone only tell one life of a slot from the next."""
    if not 0 <= slot < SLOTS:
        raise ContractError("slot", f"0 to {SLOTS - 1}", slot, rule=Rule.NAMED)
    if not 1 <= request_key <= _MOST_KEY:
        raise ContractError("request_key", f"1 to {_MOST_KEY}", request_key, rule=Rule.NAMED)
    PROCESS.sender(rank_id).assign(slot, request_key)


def close() -> None:
    """End this process's connections; what was saved is sent first, as long as `worker.drain_timeout_ms` lasts."""
    PROCESS.close()

"""Data-parallel ranks: each is a worker of its own, and vLLM's options say how many there are and which one it is."""

from dataclasses import fields
from importlib import import_module
from typing import Any

from tokenbus.engines.kinds import MOST_RANKS

_TAKEN = ("data_parallel_size", "data_parallel_rank")


def take_rank(arguments: Any) -> int | None:  # noqa: ANN401 - vLLM's EngineArgs
    """Return an engine's rank (None: no ranks), and leave the options of one alone, as vLLM's server does."""
    size, rank = arguments.data_parallel_size, arguments.data_parallel_rank
    if rank is not None and not 0 <= rank < size:
        raise ValueError(f"--data-parallel-rank: at least 0 and below --data-parallel-size {size}, got {rank}")
    if size <= 1:
        return None
    if size > MOST_RANKS:
        raise ValueError(f"--data-parallel-size: at most {MOST_RANKS}, got {size}")
    if rank is None:
        limit = f"a worker for each --data-parallel-rank from 0 to {size - 1} (`tokenbus up` starts them all)"
        raise ValueError(f"--data-parallel-size: {limit}, got {size} without a rank")
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if field.name.startswith("data_parallel_") and field.name not in _TAKEN and value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{option}: none, where each rank is a worker with --data-parallel-rank, got {value}")
    arguments.data_parallel_size, arguments.data_parallel_rank = 1, None
    return int(rank)


def set_rank(config: Any, rank: int) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Let an engine that is alone be one of several ranks, as vLLM's own server does: its random numbers, its GPUs."""
    if config.model_config.is_moe:
        limit = "none for a mixture of experts, which --tensor-parallel-size with --enable-expert-parallel divides"
        raise ValueError(f"--data-parallel-rank: {limit}, got {rank}")
    parallel = config.parallel_config
    parallel.data_parallel_index = rank
    # A worker that sees the GPUs of several ranks takes those of its own; one that sees its own alone takes these.
    shares = import_module("torch").cuda.device_count() // parallel.world_size
    parallel.data_parallel_rank_local = rank % shares if shares else rank

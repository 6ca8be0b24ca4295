"""Data-parallel ranks: each rank is a separate worker; vLLM's options give the number of ranks and this rank."""

from dataclasses import fields
from importlib import import_module
from typing import Any

from tokenbus.engines.kinds import MOST_RANKS

_TAKEN = ("data_parallel_size", "data_parallel_rank")


def take_rank(arguments: Any) -> int | None:  # noqa: ANN401 - vLLM's EngineArgs
    """Return the rank, or None, and reset the options to those of a single engine, as vLLM's server does."""
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
            raise ValueError(f"{option}: unsupported with --data-parallel-rank, got {value}")
    arguments.data_parallel_size, arguments.data_parallel_rank = 1, None
    return int(rank)


def set_rank(config: Any, rank: int) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Configure a single engine as one of several ranks, as vLLM's server does: its random numbers and GPUs."""
    if config.model_config.is_moe:
        limit = "unsupported for a mixture of experts; use --tensor-parallel-size and --enable-expert-parallel"
        raise ValueError(f"--data-parallel-rank: {limit}, got {rank}")
    parallel = config.parallel_config
    parallel.data_parallel_index = rank
    # If the worker sees the GPUs of several ranks, it selects its rank's GPUs.
    shares = import_module("torch").cuda.device_count() // parallel.world_size
    parallel.data_parallel_rank_local = rank % shares if shares else rank

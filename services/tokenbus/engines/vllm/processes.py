"""Processes: protects vLLM's worker processes from signals, and lets our thread sleep while these processes compute.

A terminal or a service manager sends SIGTERM and SIGINT to the whole process group. vLLM's worker processes would end
at once, and the requests could not be drained. So each worker process gets a separate session. The worker processes
watch a pipe, and end when vLLM shuts down or our process ends.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_MOST_SPIN_SECONDS = 0.001
_MOST_WAIT_MS = 1
_worker_main: Callable[..., None] | None = None
"""vLLM's original `worker_main`, which this process and forked processes call."""


@contextmanager
def own_session(worker_process: Any) -> Iterator[None]:  # noqa: ANN401 - vLLM's WorkerProc
    """Make each process that vLLM starts in this block create a new session."""
    global _worker_main  # noqa: PLW0603 - forked processes need it
    _worker_main = worker_process.worker_main
    worker_process.worker_main = staticmethod(main)
    try:
        yield
    finally:
        worker_process.worker_main = staticmethod(_worker_main)


def sleep_while_they_compute(executor: Any) -> None:  # noqa: ANN401 - vLLM's Executor
    """Let the stepping thread sleep while vLLM's processes compute, instead of spinning for up to a second.

    Spinning occupies a core that other threads need. vLLM's processes do not wake a reader that has got a message
    within the last millisecond or so. So the reader spins for a millisecond, and then polls every millisecond. If a
    version of vLLM waits differently, nothing is changed.
    """
    for worker in getattr(executor, "workers", ()):
        condition = getattr(getattr(worker, "worker_response_mq", None), "_spin_condition", None)
        if condition is not None:
            condition.busy_loop_s = _MOST_SPIN_SECONDS
            condition.wait = partial(_wait_briefly, condition.wait)


def _wait_briefly(wait: Callable[[int], None], timeout_ms: int | None = None) -> None:
    wait(_MOST_WAIT_MS if timeout_ms is None else min(timeout_ms, _MOST_WAIT_MS))


def main(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as vLLM gives them
    """Run a worker process of vLLM in a separate session."""
    os.setsid()
    if _worker_main is None:  # a new interpreter still has the original function
        from vllm.v1.executor.multiproc_executor import WorkerProc

        WorkerProc.worker_main(*arguments, **named)
    else:
        _worker_main(*arguments, **named)

"""Processes: vLLM's own worker processes, kept from the signals that are sent to the group of ours, and waited for.

Where vLLM runs the model in processes of their own, those end at once at SIGTERM and SIGINT, which a terminal and a
service manager send to the whole group: the requests that we drain could not be finished. In a session of their own
they end when vLLM is told to shut down, and when our process is gone: they watch a pipe of it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_MOST_SPIN_SECONDS = 0.001
_MOST_WAIT_MS = 1
_worker_main: Callable[..., None] | None = None
"""vLLM's own function, kept in this process and in those forked from it."""


@contextmanager
def own_session(worker_process: Any) -> Iterator[None]:  # noqa: ANN401 - vLLM's WorkerProc
    """Let the processes that vLLM starts meanwhile begin with a session of their own."""
    global _worker_main  # noqa: PLW0603 - a process that was forked must find it
    _worker_main = worker_process.worker_main
    worker_process.worker_main = staticmethod(main)
    try:
        yield
    finally:
        worker_process.worker_main = staticmethod(_worker_main)


def sleep_while_they_compute(executor: Any) -> None:  # noqa: ANN401 - vLLM's Executor
    """Let the thread that steps vLLM sleep until a process has computed; vLLM's own way is to spin for up to a second.

    Spinning takes a core, which our other threads and the services beside this one need. A process of vLLM's wakes its
    reader, but not for a message that follows another within about a millisecond: so long the reader spins, and later
    it looks for itself every millisecond. A version that waits in another way is left as it is: only time is lost.
    """
    for worker in getattr(executor, "workers", ()):
        condition = getattr(getattr(worker, "worker_response_mq", None), "_spin_condition", None)
        if condition is not None:
            condition.busy_loop_s = _MOST_SPIN_SECONDS
            condition.wait = partial(_wait_briefly, condition.wait)


def _wait_briefly(wait: Callable[[int], None], timeout_ms: int | None = None) -> None:
    wait(_MOST_WAIT_MS if timeout_ms is None else min(timeout_ms, _MOST_WAIT_MS))


def main(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as vLLM gives them
    """Run one of vLLM's worker processes."""
    os.setsid()
    if _worker_main is None:  # a new interpreter, where nothing was replaced
        from vllm.v1.executor.multiproc_executor import WorkerProc

        WorkerProc.worker_main(*arguments, **named)
    else:
        _worker_main(*arguments, **named)

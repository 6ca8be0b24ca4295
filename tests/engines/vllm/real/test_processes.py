"""How the engine waits for vLLM's own processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.engines.vllm.real.hosts import Host
from tokenbus.engines.vllm.processes import sleep_while_they_compute


def test_engine_sleeps_until_a_process_has_computed(host: Host) -> None:
    host(sleeps)


def sleeps() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    writer, reader = queue()
    with mock.patch.object(shm_broadcast, "sched_yield") as spin:
        for message in ("first", "second"):
            writer.enqueue(message)
            assert reader.dequeue(timeout=60) == message
            reader._spin_condition.last_read -= 0.01  # vLLM would spin for a second
            with pytest.raises(TimeoutError):
                reader.dequeue(timeout=0.01)
    assert not spin.called


def queue() -> tuple[Any, Any]:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    sleep_while_they_compute(SimpleNamespace(workers=[SimpleNamespace(worker_response_mq=reader)]))
    return writer, reader


def test_message_without_a_wake_up_is_seen(host: Host) -> None:
    host(sees)


def sees() -> None:
    writer, reader = queue()
    is_waiting = Event()
    wait = reader._spin_condition.wait

    def said(timeout_ms: int | None = None) -> None:
        is_waiting.set()
        wait(timeout_ms=timeout_ms)

    reader._spin_condition.wait = said
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(reader.dequeue)
        is_waiting.wait()
        writer._spin_condition.notify = lambda: None
        writer.enqueue("unannounced")
        assert found.result(60) == "unannounced"

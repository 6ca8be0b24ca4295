"""How the engine waits for vLLM's own processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest

from tokenbus.engines.vllm.processes import sleep_while_they_compute


def test_engine_sleeps_until_a_process_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    spins: list[None] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: spins.append(None))
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    sleep_while_they_compute(SimpleNamespace(workers=[SimpleNamespace(worker_response_mq=reader)]))
    for message in ("first", "second"):
        writer.enqueue(message)
        assert reader.dequeue(timeout=60) == message
        reader._spin_condition.last_read -= 0.01  # vLLM would spin for a second
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.01)
    assert not spins


def test_message_without_a_wake_up_is_seen() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    sleep_while_they_compute(SimpleNamespace(workers=[SimpleNamespace(worker_response_mq=reader)]))
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


def test_engine_without_processes_waits_for_none() -> None:
    bare, workers = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace(rank=0)]
    for executor in (bare, SimpleNamespace(workers=workers)):
        sleep_while_they_compute(executor)
    assert [vars(each) for each in (bare, *workers)] == [{}, {}, {"rank": 0}]

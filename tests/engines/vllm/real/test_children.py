"""How the engine waits for vLLM's own processes."""

from types import SimpleNamespace

import pytest

from tokenbus_engines.vllm.children import sleep_while_they_compute


def test_engine_sleeps_until_a_process_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of vLLM's own queue no longer spins, also just after a message, and gets what comes."""
    from vllm.distributed.device_communicators import shm_broadcast

    spins: list[None] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: spins.append(None))
    writer = shm_broadcast.MessageQueue(1, 1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    sleep_while_they_compute(SimpleNamespace(workers=[SimpleNamespace(worker_response_mq=reader)]))
    for message in ("first", "second"):
        writer.enqueue(message)
        assert reader.dequeue(timeout=60) == message
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.01)
    assert not spins


def test_engine_without_processes_waits_for_none() -> None:
    """An executor that runs the model itself, and a worker with a queue of another kind, are left as they are."""
    for executor in (SimpleNamespace(), SimpleNamespace(workers=[SimpleNamespace(), SimpleNamespace(rank=0)])):
        sleep_while_they_compute(executor)

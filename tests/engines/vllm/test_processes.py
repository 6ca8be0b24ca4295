"""How the engine waits for processes of vLLM's; tests/engines/vllm/real/test_processes.py has vLLM's own queue."""

from types import SimpleNamespace

from tokenbus.engines.vllm.processes import sleep_while_they_compute


def test_engine_without_processes_waits_for_none() -> None:
    bare, workers = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace(rank=0)]
    for executor in (bare, SimpleNamespace(workers=workers)):
        sleep_while_they_compute(executor)
    assert [vars(each) for each in (bare, *workers)] == [{}, {}, {"rank": 0}]

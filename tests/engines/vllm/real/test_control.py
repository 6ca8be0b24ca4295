"""What operators ask of the engine while it runs, beside a vLLM that was started so."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.real.hosts import EngineHost, Host, in_its_process
from tests.engines.vllm.real.runs import LORA, Answer, Case, add, answered, reference
from tests.engines.vllm.tiny_model import make_adapter
from tokenbus.engines.vllm import VllmEngine
from tokenbus.worker import StepAssembler
from tokenbus_contracts import Limits, ValueKind
from tokenbus_contracts.generated.control_pb2 import EngineState, WeightTransferStage

_CASES = [Case([5, 6, 7, 8] * 10, {"temperature": 0.0, "ignore_end_token": True, "max_tokens": 12}, 5)]


def make_other(model: Path, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - only where vLLM is

    shutil.copytree(model, folder)
    changed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(11)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.mlp.down_proj.weight.add_(torch.randn_like(layer.mlp.down_proj.weight))
    changed.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other(host: Host, model: Path) -> Path:
    return host(make_other, model, model.parent / "other")


@pytest.fixture(scope="module")
def expected(other: Path) -> list[Answer]:
    ((_, answers),) = reference(other, LORA, _CASES)
    return answers


@pytest.fixture
def engine(engine_with_adapters: EngineHost, model: Path) -> Iterator[EngineHost]:
    """Return an engine that has its first weights again after each test."""
    yield engine_with_adapters
    engine_with_adapters(load, model, 0)


def halt(engine: VllmEngine) -> None:
    engine.pause(running=True)
    while engine.has_work:
        engine.step()


def load(engine: VllmEngine, weights: Path, version: int) -> None:
    halt(engine)
    engine.load_weights(weights)
    engine.weight_version = version
    engine.resume()


def is_same(mine: list[Answer], others: list[Answer]) -> bool:
    return [(each.tokens, each.logprobs) for each in mine] == [(each.tokens, each.logprobs) for each in others]


@in_its_process
def test_new_weights_answer_as_an_engine_that_was_started_with_them(
    engine: VllmEngine, model: Path, other: Path, expected: list[Answer]
) -> None:
    before = answered(engine, _CASES)
    assert not is_same(before, expected)
    load(engine, other, 1)
    assert is_same(answered(engine, _CASES, 7), expected), "its prompt's keys and values are those of the old weights"
    load(engine, model, 2)
    assert is_same(answered(engine, _CASES, 9), before)


@in_its_process
def test_method_of_the_processes_changes_weights(engine: VllmEngine, other: Path, expected: list[Answer]) -> None:
    answered(engine, _CASES)
    assert engine.collective_rpc("check_health", None, [], {}) == [None]
    (adapters,) = engine.collective_rpc("list_loras", 60, [], {})
    assert isinstance(adapters, str)  # of a set
    engine.collective_rpc("reload_weights", None, [], {"weights_path": str(other)})
    assert is_same(answered(engine, _CASES, 7), expected), "its prompt's keys and values are those of the old weights"
    with pytest.raises(NotImplementedError, match="nothing"):
        engine.collective_rpc("nothing", None, [], {})


@in_its_process
def test_running_request_goes_on_with_new_weights(engine: VllmEngine, other: Path) -> None:
    case, answer = Case([5, 6, 7], {"temperature": 0.0, "ignore_end_token": True, "max_tokens": 40}, 0), Answer()
    engine.admit(case.generate(3))
    assembler, versions = StepAssembler(Limits.default(), engine.vocabulary_size), []

    def step() -> None:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                versions.append(batch.header.weight_version)
                for row in batch.rows():
                    add(answer, row)

    while len(answer.tokens) < 10:
        step()
    engine.pause(running=True)
    while engine.has_work:
        step()
    done = len(answer.tokens)
    assert engine.step() == []
    assert 0 < engine.kv_cache_usage < 1
    engine.load_weights(other)
    engine.weight_version = 8
    assert len(answer.tokens) == done
    engine.resume()
    while engine.has_work:
        step()
    assert (len(answer.tokens), engine.kv_cache_usage) == (40, 0)
    assert versions == [0] * done + [8] * (40 - done)


@in_its_process
def test_running_request_computes_forgotten_prefixes_again(engine: VllmEngine) -> None:
    (expected,) = answered(engine, _CASES)
    answer, assembler = Answer(), StepAssembler(Limits.default(), engine.vocabulary_size)
    engine.admit(_CASES[0].generate(3))

    def step() -> None:
        for arrays in engine.step():
            for batch in assembler.assemble(arrays):
                for row in batch.rows():
                    add(answer, row)

    while len(answer.tokens) < 5:
        step()
    with pytest.raises(ValueError, match="running requests hold blocks of the cache"):
        engine.reset_prefix_cache()
    engine.reset_prefix_cache(also_running=True)
    while engine.has_work:
        step()
    assert is_same([answer], [expected])


@in_its_process
def test_new_requests_wait_while_those_that_run_end(engine: VllmEngine) -> None:
    long, late = (Case([5], {"temperature": 0.0, "ignore_end_token": True, "max_tokens": n}) for n in (20, 5))
    engine.admit(long.generate(3))
    engine.step()
    engine.pause(running=False)
    engine.admit(late.generate(4))
    for expected in ({3}, {4}):
        seen = set()
        while engine.has_work:
            for arrays in engine.step():
                seen |= set(arrays.request_ids.tolist())
        assert seen == expected
        engine.resume()


@in_its_process
def test_wrong_weights_change_nothing(engine: VllmEngine, model: Path, tmp_path: Path) -> None:
    before = answered(engine, _CASES)
    halt(engine)
    empty, file = tmp_path / "empty", tmp_path / "model.safetensors"
    empty.mkdir()
    for folder, change, line in (
        (Path("/nowhere"), "", r"a folder with \*.safetensors, got no folder: /nowhere$"),
        (empty, "", r"a folder with \*.safetensors, got one without: "),
        (tmp_path, "drop", r"\S+ of shape \[.*\], as in the model, got None$"),
        (tmp_path, "cut", r"\S+ of shape \[.*\], as in the model, got \["),
        (tmp_path, "add", "weights that vLLM can load, got "),
        (tmp_path, "", "safetensors, got a damaged file: model.safetensors: "),
    ):
        if change:
            _write(file, model, change)
        else:
            file.write_bytes(b"none")
        with pytest.raises(ValueError, match=f"^load_weights.folder: {line}"):
            engine.load_weights(folder)
    engine.weight_version = 1  # so that the prompt is computed again
    engine.resume()
    assert is_same(answered(engine, _CASES, 7), before)


def _write(file: Path, model: Path, change: str) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - only where vLLM is

    tensors = load_file(model / "model.safetensors")
    name = sorted(tensors)[3]
    weight = tensors.pop(name)
    if change != "drop":
        tensors[name] = weight[:-1].contiguous() if change == "cut" else weight
    if change == "add":
        tensors["model.layers.0.nothing.weight"] = weight.clone()
    save_file(tensors, file, {"format": "pt"})


@in_its_process
def test_adapters_come_and_go(engine: VllmEngine, tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path / "first", 1), make_adapter(tmp_path / "second", 2)
    case = Case([5, 6, 7], {"temperature": 0.0, "ignore_end_token": True, "max_tokens": 8}, 0, adapter=Path("tuned"))
    plain = answered(engine, [Case(case.prompt, case.sampling, 0)], 3)
    with pytest.raises(ValueError, match="one of ada, bob, got 'tuned'"):
        engine.admit(case.generate(5))
    engine.load_adapter("tuned", first, replace=False)
    by_first = answered(engine, [case], 7)
    with pytest.raises(ValueError, match=r"^load_adapter.name: 'tuned' has already been loaded$"):
        engine.load_adapter("tuned", second, replace=False)
    engine.load_adapter("tuned", second, replace=True)
    by_second = answered(engine, [case], 9)
    assert not is_same(plain, by_first)
    assert not is_same(by_first, by_second)
    assert list(engine.lora_adapters) == ["ada", "bob", "tuned"]
    engine.unload_adapter("tuned")
    assert list(engine.lora_adapters) == ["ada", "bob"]
    with pytest.raises(ValueError, match=r"^unload_adapter.name: one of ada, bob, got 'tuned'$"):
        engine.unload_adapter("tuned")
    assert is_same(answered(engine, [Case(case.prompt, case.sampling, 0)], 11), plain)


@in_its_process
def test_what_trainers_read_of_its_configuration(engine: VllmEngine) -> None:
    state = EngineState(**engine.facts)
    assert (state.dtype, ValueKind(state.value_kind)) == ("bfloat16", ValueKind.RAW_LOGPROBS)
    assert (state.max_adapters, state.max_adapter_rank, state.weight_transfer) == (4, 8, "")


@in_its_process
def test_what_this_vllm_was_not_started_with_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"^transfer_weights: vLLM must run with --weight-transfer-config"):
        engine.transfer_weights(WeightTransferStage.WEIGHT_TRANSFER_STAGE_INIT, {})
    with pytest.raises(ValueError, match=r"^sleep.level: 0 without --enable-sleep-mode, got 1$"):
        engine.sleep(1)

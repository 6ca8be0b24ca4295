"""LoRA adapters: what `--lora-modules` may say, and which folders are taken."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenbus.engines.vllm.adapters import adapters_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that looks like an adapter's."""
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
        ([f"model={folder}"], "--lora-modules: names that neither the model nor another adapter has, got 'model'"),
        ([f"a={folder}"] * 2, "--lora-modules: names that neither the model nor another adapter has, got 'a'"),
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

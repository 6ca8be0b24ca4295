"""The engines' control by vLLM's routes, on an in-process bus."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.answering import App, answering
from tests.system.serving import error_of
from tokenbus.engines.synthetic import SyntheticEngine
from tokenbus.gateway.api_keys import made, write_keys
from tokenbus_contracts import ValueKind


class _Engine(SyntheticEngine):
    def __init__(self, **facts: Any) -> None:  # noqa: ANN401 - of any type
        super().__init__()
        self.facts = facts


async def config_of(app: App) -> Any:  # noqa: ANN401 - JSON
    answer = await app.client().get("/server_info?config_format=json")
    return answer.json()["vllm_config"]


async def test_configuration_is_what_trl_reads() -> None:
    async with answering(workers=2, gateway__control=True) as app:
        assert await config_of(app) == {
            "model_config": {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs"},
            "parallel_config": {"data_parallel_size": 1, "world_size": 2},
            "weight_transfer_config": {"backend": "none"},
            "lora_config": {"max_loras": 256, "max_lora_rank": 512},
        }
        refused = await app.client().get("/server_info?config_format=yaml")
        assert error_of(refused.text)["message"] == "query.config_format: json or text, got 'yaml'"


async def test_configuration_where_engines_differ_or_do_not_say() -> None:
    """Engines of before say nothing of it; what only some have is not there, and what differs is shown."""
    raw, processed = ValueKind.RAW_LOGPROBS, ValueKind.PROCESSED_LOGPROBS
    same = {"weight_transfer": "nccl"}
    new = _Engine(dtype="bfloat16", value_kind=raw, max_adapters=4, max_adapter_rank=16, **same)
    other = _Engine(dtype="float32", value_kind=processed, max_adapters=2, max_adapter_rank=64, **same)
    async with answering(new, gateway__control=True) as app:
        await app.bus.add_worker(other)
        config = await config_of(app)
        assert config["model_config"] == {
            "dtype": "torch.bfloat16, torch.float32", "logprobs_mode": "processed_logprobs, raw_logprobs"
        }  # fmt: skip
        assert config["weight_transfer_config"] == {"backend": "nccl"}
        assert config["lora_config"] == {"max_loras": 2, "max_lora_rank": 16}
        await app.bus.add_worker(_Engine())
        await app.bus.advance(1)  # until a status is made anew
        config = await config_of(app)
        assert (config["weight_transfer_config"], config["lora_config"]) == (None, None)
    async with answering(_Engine(), gateway__control=True) as app:
        config = await config_of(app)
        assert config["model_config"] == {"dtype": "unknown", "logprobs_mode": "unknown"}


class _Called(SyntheticEngine):
    resets = 0
    """How often it was to forget prefixes while nothing runs."""

    def collective_rpc(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Sequence[Any]:
        return [None, {"method": method, "timeout": timeout, "args": args, "kwargs": kwargs}]

    def load_adapter(self, name: str, folder: Path, *, replace: bool) -> None:  # noqa: ARG002
        raise ValueError(
            {"/none": "load_adapter.folder: none", "/bad": "a bad rank"}.get(str(folder), "load_adapter.name: one")
        )

    def reset_prefix_cache(self, *, also_running: bool) -> None:
        if not also_running:
            self.resets += 1
            raise ValueError("some run")


async def test_prefixes_are_forgotten_beside_requests_that_run_where_that_is_asked() -> None:
    async with answering(_Called(), gateway__control=True) as app, app.client() as client:
        for body, success in (({}, False), ({"reset_running_requests": True}, True)):
            assert (await client.post("/reset_prefix_cache", json=body)).json()["success"] is success


@pytest.mark.parametrize(("folder", "status"), [("/loaded", 400), ("/none", 404), ("/bad", 500)])
async def test_adapter_that_no_engine_loads_has_vllms_status(folder: str, status: int) -> None:
    async with answering(_Called(), gateway__control=True) as app:
        refused = await app.client().post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": folder})
        assert (refused.status_code, error_of(refused.text)["code"]) == (status, "not_done_by_all")


async def test_adapters_are_loaded_asked_and_unloaded_as_by_sagemaker(tmp_path: Path) -> None:
    async with answering(gateway__control=True) as app, app.client() as client:

        async def models() -> dict[str, str]:
            return {each["id"]: each["root"] for each in (await client.get("/v1/models")).json()["data"]}

        loaded = await client.post("/adapters", json={"name": "ada", "src": str(tmp_path)})
        assert (loaded.status_code, await models()) == (200, {"tokenbus": "tokenbus", "ada": str(tmp_path)})
        by_header = {"X-Amzn-SageMaker-Adapter-Identifier": "ada"}
        for path, model in (("/invocations", "ada"), ("/v1/completions", "tokenbus")):
            answer = await client.post(path, json={"prompt": "a", "max_tokens": 1}, headers=by_header)
            assert answer.json()["model"] == model
        assert [(await client.delete("/adapters/ada")).status_code for _ in "ab"] == [200, 404]
        assert "ada" not in await models()
        unknown = await client.post("/invocations", json={"prompt": "a"}, headers=by_header)
        assert (unknown.status_code, error_of(unknown.text)["param"]) == (404, "model")


async def test_pause_forgets_prefixes_where_that_is_asked() -> None:
    engine = _Called()
    async with answering(engine, gateway__control=True) as app, app.client() as client:
        for query, resets in (("", 0), ("?clear_cache=false", 0), ("?clear_cache=true&mode=keep", 0)):
            assert (await client.post(f"/pause{query}")).status_code == 200
            assert engine.resets == resets
        assert (await client.post("/pause?clear_cache=true&mode=wait")).status_code == 409  # _Called refuses it
        assert engine.resets == 1


async def test_processes_are_called_as_by_vllms_route() -> None:
    body = {"method": "skyrl_start_weight_update", "args": [1], "kwargs": {"is_checkpoint_format": True}, "timeout": 2}
    async with answering(_Called(), gateway__control=True) as app, app.client() as client:
        answer = await client.post("/collective_rpc", json=body)
        assert (answer.status_code, answer.json()) == (200, {"results": [None, body]})
        for wrong, line in (
            ({"method": ""}, "method: a text, got ''"),
            ({"args": {}}, "args: a list, got {}"),
            ({"kwargs": [1]}, "kwargs: an object, got [1]"),
            ({"timeout": "soon"}, "timeout: a number of seconds, got 'soon'"),
        ):
            refused = await client.post("/collective_rpc", json=body | wrong)
            assert (refused.status_code, error_of(refused.text)["message"]) == (400, line)
    async with answering(gateway__control=True) as app:
        refused = await app.client().post("/collective_rpc", json=body)
        assert (refused.status_code, error_of(refused.text)["code"]) == (409, "not_done_by_all")
        assert "collective_rpc: none with this engine" in error_of(refused.text)["message"]


async def test_who_may(tmp_path: Path) -> None:
    async with answering(gateway__control=False) as app:
        answer = await app.client().post("/pause")
        assert answer.status_code == 403
        assert "gateway.control is false" in error_of(answer.text)["message"]
    path = tmp_path / "keys.json"
    plain, first = made("plain")
    trainer, second = made("trainer", operator=True)
    write_keys(path, [first, second])
    async with answering(gateway__control=False, gateway__keys_file=str(path)) as app:
        for key, status in (("", 401), (plain, 403), (trainer, 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await app.client().get("/is_paused", headers=headers)).status_code == status

"""The engines' control by vLLM's routes, on an in-process bus."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.answering import App, answering
from tests.system.serving import error_of
from tokenbus.client import Operator
from tokenbus.engines.synthetic import SyntheticEngine, true_tokens
from tokenbus.gateway.api_keys import made, write_keys
from tokenbus.gateway.control import ControlRoutes
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


# What every worker is asked for.


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with answering(workers=2, gateway__control=True, gateway__models="tokenbus") as app:
        for worker in app.bus.workers:
            worker.step_seconds = 0.02
        yield app


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


async def said(app: App, path: str, **body: Any) -> Any:  # noqa: ANN401 - JSON
    answer = await app.bus.until(app.client().post(path, json=body or None))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(app: App, path: str, **body: Any) -> tuple[int, str]:  # noqa: ANN401 - JSON
    answer = await app.bus.until(app.client().post(path, json=body))
    return answer.status_code, error_of(answer.text)["message"]


async def found(app: App, path: str) -> Any:  # noqa: ANN401 - JSON
    return (await app.bus.until(app.client().get(path))).json()


async def begun(app: App, **body: Any) -> asyncio.Task[httpx.Response]:  # noqa: ANN401 - JSON
    body = {"prompt": [1, 2], "max_tokens": 1_000_000, "return_token_ids": True, **body}
    asking = asyncio.create_task(app.client().post("/v1/completions", json=body))
    await app.bus.advance(1)
    assert not asking.done()
    return asking


async def test_pause_and_resume(app: App) -> None:
    assert await found(app, "/is_paused") == {"is_paused": False}
    assert await said(app, "/pause?mode=keep") == {"status": "paused"}
    assert await found(app, "/is_paused") == {"is_paused": True}
    asking = await begun(app, max_tokens=3)
    assert await said(app, "/resume") == {"status": "resumed"}
    assert (await app.bus.until(asking)).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("path", "status"), [("/pause", "paused"), ("/abort_requests", "aborted")])
async def test_aborted_answers_end_with_what_they_have(app: App, path: str, status: str) -> None:
    asking = await begun(app)
    assert await said(app, path) == {"status": status}
    answer = (await app.bus.until(asking)).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] > 0
    assert await found(app, "/is_paused") == {"is_paused": status == "paused"}


async def test_answer_lives_through_updates(app: App, weights: str) -> None:
    asking = await begun(app, max_tokens=600, stream=True)
    updated = await said(app, "/update_weights", weight_dir=weights, weight_version="41")
    assert updated["workers"] == {"worker-0": 41, "worker-1": 41}
    await app.bus.advance(1)
    await said(app, "/pause?mode=keep")
    assert await said(app, "/init_weight_transfer_engine", init_info={"rank_offset": 1})
    started = await said(app, "/start_weight_update", is_checkpoint_format=True)
    assert started == {"message": "Weight update started"}
    assert await said(app, "/update_weights", update_info={"names": []}) == {"message": "Weights updated"}
    assert await said(app, "/finish_weight_update") == {"message": "Weight update finished"}
    assert (await found(app, "/weight_info"))["weight_version"] == "42"
    await said(app, "/resume")
    lines = (await app.bus.until(asking)).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    spans = [(each["version"], each["start"], each["end"]) for each in chunks[-1]["choices"][0]["weight_versions"]]
    assert [version for version, *_ in spans] == ["0", "41", "42"]
    key = int(chunks[0]["id"].rpartition("-")[2], 16)
    assert ids == [
        token for version, begin, end in spans for token in true_tokens(key, begin, end, int(version)).ids.tolist()
    ]
    assert len(ids) == 600
    assert await said(app, "/update_weight_version", new_version="7") == {"success": True, "new_version": "7"}


async def test_adapter_can_be_named_as_soon_as_it_is_loaded(app: App, weights: str) -> None:
    """Also one that was loaded elsewhere, and where the settings name the models."""
    body = {"lora_name": "tuned", "lora_path": weights}
    assert await said(app, "/v1/load_lora_adapter", **body) == "Success: LoRA adapter 'tuned' added successfully."
    status, message = await refused(app, "/v1/load_lora_adapter", **body)
    assert (status, "'tuned' is loaded already" in message) == (400, True)
    await app.bus.until(Operator(app.bus.client).load_adapter("elsewhere", weights))
    for name in ("tuned", "elsewhere"):
        assert (await said(app, "/v1/completions", model=name, prompt=[1], max_tokens=2))["model"] == name
        assert (await found(app, f"/v1/models/{name}"))["parent"] == "tokenbus"
    assert await said(app, "/unload_lora_adapter", lora_name="tuned")
    assert "error" in await found(app, "/v1/models/tuned")


async def test_sleep_and_wake(app: App) -> None:
    assert await said(app, "/sleep?level=0") == {"status": "sleeping", "level": 0}
    assert await found(app, "/is_sleeping") == {"is_sleeping": True}
    status, message = await refused(app, "/resume")
    assert (status, "the engine must be awake, but it is asleep" in message) == (409, True)
    assert await said(app, "/wake_up?tags=scheduling") == {"status": "awake", "tags": ["scheduling"]}
    assert await found(app, "/is_paused") == {"is_paused": False}


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/pause?mode=stop", {}, "query.mode: one of abort, wait, keep, got 'stop'"),
    ("/pause?lease_s=soon", {}, "query.lease_s: a number of seconds, got 'soon'"),
    ("/sleep?level=3", {}, "query.level: 0, 1 or 2, got '3'"),
    ("/finish_weight_update", {"weight_version": "v2"}, "weight_version: a whole number up to 9223372036854775807, also as a text, got 'v2'"),  # noqa: E501
    ("/update_weight_version", {"new_version": 2**63}, "new_version: a whole number up to 9223372036854775807, also as a text, got 9223372036854775808"),  # noqa: E501
    ("/update_weight_version", {}, "new_version: a whole number from 1, also as a text, got none"),
    ("/update_weights", {}, "update_info: an object, got None"),
    ("/init_weight_transfer_engine", {"init_info": {"rank_offset": "1"}}, "arguments.rank_offset: a whole number, got '1'"),  # noqa: E501
    ("/update_weights", {"update_info": [{}]}, "arguments: an object, or as many as the workers have processes, 2, got 1"),  # noqa: E501
    ("/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path: a text, got none"),
    ("/v1/load_lora_adapter", {"lora_name": 1, "lora_path": "x"}, "lora_name: a text, got 1"),
    ("/abort_requests", {"request_ids": ["a"]}, "request_ids: ids as in the header x-request-id of an answer, got 'a'"),
    ("/abort_requests", {"request_ids": "a"}, "request_ids: a list of texts, got 'a'"),
)  # fmt: skip


async def test_wrong_wishes_are_refused(app: App) -> None:
    for path, body, line in WRONG:
        assert await refused(app, path, **body) == (400, line)


async def test_pause_is_told(app: App) -> None:
    """Requests wait as with vLLM, so the gateway stays ready, and says why they do."""
    await said(app, "/pause?lease_s=3600")
    await app.bus.advance(1)
    told = await found(app, "/readyz")
    assert (told["status"], {each["worker"] for each in told["paused"]}) == ("paused", {"worker-0", "worker-1"})
    assert all(each["since"] > 0 and each["by"] == "client: 127.0.0.1" for each in told["paused"]), told
    assert {each["paused_by"] for each in (await found(app, "/bus"))["workers"]} == {told["paused"][0]["by"]}


async def test_what_changes_state_is_posted(app: App) -> None:
    """A page elsewhere can have a browser get any address, as an image's."""
    changing = [route.path for route in ControlRoutes(app.gateway).routes() if route.methods == {"POST"}]
    assert len(changing) >= 17
    for path in [*changing, "/flush_cache"]:
        assert (await app.bus.until(app.client().get(path))).status_code in {404, 405}, path

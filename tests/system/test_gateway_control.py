"""The engines' control by vLLM's routes, as trainers use them: two gateway processes and two workers."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.waiting import until
from tests.system.serving import Served, error_of, plainly, served
from tokenbus.engines import synthetic
from tokenbus.gateway.control import ControlRoutes

pytestmark = pytest.mark.xdist_group("gateway")
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1_000_000, "stream": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def system() -> Iterator[Served]:
    with served(gateway__control="true", gateway__tokenizer="numbers") as made_:
        made_.start_worker("worker-0", "--steps-per-second", "50")
        made_.start_worker("worker-1", "--steps-per-second", "50")
        yield made_


@pytest.fixture
async def client(system: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with plainly(system.url) as made_:
        await until(lambda: _has_both(made_))
        yield made_
        for path in ("/wake_up", "/resume"):
            await made_.post(path)


async def _has_both(client: httpx.AsyncClient) -> bool:
    answer = await client.get("/get_world_size")
    return answer.status_code == 200 and answer.json() == {"world_size": 2}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


async def _said(client: httpx.AsyncClient, path: str, **body: Any) -> Any:  # noqa: ANN401 - JSON
    answer = await client.post(path, json=body or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_pause_and_resume(client: httpx.AsyncClient) -> None:
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert await _said(client, "/pause?mode=keep&clear_cache=true") == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": [1], "max_tokens": 3}))
    await until(lambda: _is_open(client))
    assert not asking.done()
    assert await _said(client, "/resume") == {"status": "resumed"}
    assert (await asking).json()["usage"]["completion_tokens"] == 3


async def _is_open(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/load")).json()["server_load"])


async def test_aborted_answers_end_with_what_they_have(client: httpx.AsyncClient) -> None:
    async with client.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        assert await _said(client, "/pause") == {"status": "paused"}
        chunks = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert await _said(client, "/resume") == {"status": "resumed"}
    asking = asyncio.create_task(client.post("/v1/completions", json={**LONG, "stream": False}))
    await until(lambda: _is_open(client))
    assert await _said(client, "/abort_requests") == {"status": "aborted"}
    assert (await asking).json()["choices"][0]["finish_reason"] == "abort"
    assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_answer_lives_through_updates(client: httpx.AsyncClient, weights: str) -> None:
    ids: list[int] = []
    versions = [int((await client.get("/weight_info")).json()["weight_version"]), 41]
    async with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 300}) as answer:
        lines = answer.aiter_lines()
        chunk = json.loads((await anext(lines))[6:])
        key = int(chunk["id"].rpartition("-")[2], 16)
        ids += chunk["choices"][0].get("token_ids", ())
        updated = await _said(client, "/update_weights", weight_dir=weights, weight_version="41")
        assert updated["workers"] == {"worker-0": 41, "worker-1": 41}
        await _said(client, "/pause?mode=keep")
        assert await _said(client, "/init_weight_transfer_engine", init_info={"rank_offset": 1})
        assert await _said(client, "/start_weight_update", is_checkpoint_format=True) == {
            "message": "Weight update started"
        }
        assert await _said(client, "/update_weights", update_info={"names": []}) == {"message": "Weights updated"}
        assert await _said(client, "/finish_weight_update") == {"message": "Weight update finished"}
        versions.append(int((await client.get("/weight_info")).json()["weight_version"]))
        assert versions[2] > 41  # one more than the highest that other tests have named
        await _said(client, "/resume")
        async for line in lines:
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                ids += choice.get("token_ids", ())
    assert len(ids) == 300
    truths = [synthetic.true_tokens(key, 0, 300, version).ids.tolist() for version in versions]
    followed = [next(n for n, truth in enumerate(truths) if truth[place] == token) for place, token in enumerate(ids)]
    assert followed == sorted(followed)
    assert {followed[0], followed[-1]} == {0, 2}
    spans = [
        (str(versions[n]), followed.index(n), followed.index(n) + followed.count(n)) for n in sorted(set(followed))
    ]
    assert [(each["version"], each["start"], each["end"]) for each in choice["weight_versions"]] == spans
    assert await _said(client, "/update_weight_version", new_version="7") == {"success": True, "new_version": "7"}


async def test_adapters(system: Served, client: httpx.AsyncClient, weights: str) -> None:
    """An adapter can be named as soon as it is loaded, at other gateways too, whose settings may name the models."""
    _, url = system.start_gateway(gateway__models="tokenbus")
    body = {"lora_name": "tuned", "lora_path": weights}
    assert await _said(client, "/v1/load_lora_adapter", **body) == "Success: LoRA adapter 'tuned' added successfully."
    again = await client.post("/v1/load_lora_adapter", json=body)
    assert (again.status_code, "'tuned' is loaded already" in error_of(again.text)["message"]) == (400, True)
    async with plainly(url) as other:
        for each in (client, other):
            answer = await _said(each, "/v1/completions", model="tuned", prompt=[1], max_tokens=2)
            assert answer["model"] == "tuned"
        assert (await other.get("/v1/models/tuned")).json()["parent"] == "tokenbus"
        assert await _said(client, "/unload_lora_adapter", lora_name="tuned")
        assert (await other.get("/v1/models/untuned")).status_code == 404


async def test_sleep_and_wake(client: httpx.AsyncClient) -> None:
    assert await _said(client, "/sleep?level=0") == {"status": "sleeping", "level": 0}
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
    refused = await client.post("/resume")
    assert (refused.status_code, "got one that sleeps" in refused.text) == (409, True)
    assert await _said(client, "/wake_up?tags=scheduling") == {"status": "awake", "tags": ["scheduling"]}
    assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert await _said(client, "/reset_prefix_cache") == {"success": True}


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/pause?mode=stop", {}, "query.mode: one of abort, wait, keep, got 'stop'"),
    ("/sleep?level=3", {}, "query.level: 0, 1 or 2, got '3'"),
    ("/finish_weight_update", {"weight_version": "v2"}, "weight_version: a whole number up to 9223372036854775807, also as a text, got 'v2'"),  # noqa: E501
    ("/update_weight_version", {"new_version": 2**63}, "new_version: a whole number up to 9223372036854775807, also as a text, got 9223372036854775808"),  # noqa: E501
    ("/update_weight_version", {}, "new_version: a whole number from 1, also as a text, got none"),
    ("/update_weights", {}, "update_info: an object, got None"),
    ("/init_weight_transfer_engine", {"init_info": {"rank_offset": "1"}}, "arguments.rank_offset: a whole number, got '1'"),  # noqa: E501
    ("/update_weights", {"update_info": [{}]}, "arguments: an object, or as many as the workers have processes, 2, got 1"),  # noqa: E501
    ("/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path: a text, got none"),
    ("/v1/load_lora_adapter", {"lora_name": 1, "lora_path": "x"}, "lora_name: a text, got 1"),
    ("/abort_requests", {"request_ids": ["a"]}, "request_ids: each as the header x-request-id of an answer has it, got 'a'"),  # noqa: E501
    ("/abort_requests", {"request_ids": "a"}, "request_ids: a list of texts, got 'a'"),
)  # fmt: skip


async def test_wrong_wishes_are_refused(client: httpx.AsyncClient) -> None:
    for path, body, line in WRONG:
        answer = await client.post(path, json=body)
        assert (answer.status_code, error_of(answer.text)["message"]) == (400, line)


async def test_pause_is_told(client: httpx.AsyncClient, system: Served) -> None:
    """Requests wait as with vLLM, so the gateway stays ready, and says why they do."""
    assert (await client.post("/pause?lease_s=soon")).status_code == 400
    await _said(client, "/pause?lease_s=3600")
    await until(lambda: _is_told(client))
    told = (await client.get("/readyz")).json()
    assert {each["worker"] for each in told["paused"]} == {"worker-0", "worker-1"}
    assert all(each["since"] > 0 and each["by"] == "client: 127.0.0.1" for each in told["paused"]), told
    assert {each["paused_by"] for each in (await client.get("/bus")).json()["workers"]} == {told["paused"][0]["by"]}
    async with plainly(f"http://{system.metrics}") as processor:
        page = (await processor.get("/metrics")).text
        assert page.count('tokenbus_worker_paused_since_seconds{client="client: 127.0.0.1"') == 2


async def _is_told(client: httpx.AsyncClient) -> bool:
    answer = await client.get("/readyz")
    return bool(answer.status_code == 200 and answer.json()["status"] == "paused")


async def test_what_changes_state_is_posted(client: httpx.AsyncClient) -> None:
    """A page elsewhere can have a browser get any address, as an image's."""
    changing = [route.path for route in ControlRoutes(Any).routes() if route.methods == {"POST"}]  # type: ignore[arg-type]
    assert len(changing) >= 17
    for path in [*changing, "/flush_cache"]:
        assert (await client.get(path)).status_code in {404, 405}, path

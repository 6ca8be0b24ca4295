"""A session that was asked for over HTTP comes back over HTTP from a durable log, for its own key only."""

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.gateway.answering import answering
from tests.recordings.durable_log import using as log
from tests.support.nats import NatsServer
from tokenbus.gateway.api_keys import made, write_keys
from tokenbus.recordings.items import StreamItem


async def test_session_is_read_from_the_log_by_its_own_key(server: NatsServer, tmp_path: Path) -> None:
    (mine, _), (other, _) = keys = made("alice"), made("bob")
    write_keys(tmp_path / "keys.json", [key for _, key in keys])
    given: dict[str, Any] = {"gateway__keys_file": str(tmp_path / "keys.json")}
    async with answering(durable_log__address=server.log_address, **given) as app, app.client() as client:
        items: list[StreamItem] = []

        async def collect() -> None:
            async with app.gateway.client.watch() as watched:
                async for item in watched:
                    items.append(item)  # noqa: PERF401 - it is cancelled

        async def asked(key: str, prompt: list[int], session: str) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 4, "logprobs": 0, "return_token_ids": True, "session_id": session}
            answer = await client.post("/v1/completions", json=body, headers=_of(key))
            return list(answer.json()["choices"][0]["token_ids"])

        collecting = asyncio.create_task(collect())
        await app.bus.settle()
        first = await asked(mine, [1, 2], "my/run")
        second = await asked(mine, [1, 2, *first, 7], "my/run")
        await asked(other, [3], "my/run")
        await asked(other, [4], "another")
        await app.bus.settle()
        collecting.cancel()
        async with log.writer_of(log.log_settings(server)) as writer:
            for item in items:
                await writer.write(item)

        found = await client.get("/sessions/my%2Frun", headers=_of(mine))
        assert found.status_code == 200, found.text
        session = found.json()
        (branch,) = session["branches"]
        assert (session["session"], session["complete"], session["missing"]) == ("my/run", True, [])
        assert [request["status"] for request in session["requests"]] == ["FINISHED_LENGTH"] * 2
        assert branch["token_ids"] == [1, 2, *first, 7, *second]
        assert branch["output_mask"] == [0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1]
        assert [value is None for value in branch["logprobs"]] == [not each for each in branch["output_mask"]]
        assert [bool(rank) for rank in branch["ranks"]] == list(map(bool, branch["output_mask"]))
        assert branch["workers"] == [{"begin": 2, "value": "worker-0"}]
        assert [span["begin"] for span in branch["weight_versions"]] == [2]
        assert branch["requests"] == [request["request_id"] for request in session["requests"]]
        assert branch["digest"] == _digest(branch)
        assert branch["divergence"] is None

        (theirs,) = (await client.get("/sessions/my/run", headers=_of(other))).json()["branches"]
        assert theirs["token_ids"][0] == 3
        refused = await client.get("/sessions/another", headers=_of(mine))
        assert (refused.status_code, _message(refused)) == (404, "there is no session 'another'")


def _of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def _digest(branch: dict[str, Any]) -> str:
    logprobs = np.array([np.nan if each is None else each for each in branch["logprobs"]], "<f4")
    return sha256(np.array(branch["token_ids"], "<u4").tobytes() + logprobs.tobytes()).hexdigest()

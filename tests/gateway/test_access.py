"""Which requests the gateway admits, by API key, Host and Origin: on an in-process bus."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.answering import App, answering
from tests.system.serving import answers, error_of
from tokenbus.cli import main
from tokenbus.gateway.api_keys import made, read_keys, write_keys

BODY: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "max_tokens": 3}
LONG = BODY | {"max_tokens": 1000, "stream": True}
INSIDE = ("/metrics", "/bus", "/openapi.json")
PROXIED = {"x-forwarded-for": "127.0.0.1"}
"""Headers that say that the peer is a proxy on this machine, and the client elsewhere."""


class Keys:
    """A file of keys, changed while a gateway reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write_keys(path, [])

    def add(self, key_id: str, **limits: object) -> dict[str, str]:
        clear, key = made(key_id, **limits)
        write_keys(self.path, [*read_keys(self.path), key])
        return {"authorization": f"Bearer {clear}"}

    def keep(self, *ids: str) -> None:
        write_keys(self.path, [key for key in read_keys(self.path) if key.id in ids])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


async def _streams(app: App, headers: dict[str, str], **fields: Any) -> asyncio.Task[httpx.Response]:  # noqa: ANN401 - JSON
    app.bus.worker.step_seconds = 1.0
    stream = asyncio.create_task(app.client().post("/v1/completions", json=LONG | fields, headers=headers))
    await app.bus.advance(2)
    assert not stream.done()
    return stream


async def test_keys_let_in_and_are_read_again(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    known = keys.add("alice")
    clear = known["authorization"].removeprefix("Bearer ")
    async with answering(gateway__keys_file=str(keys.path)) as app, app.client() as plain:
        assert (await plain.post("/v1/completions", json=BODY, headers=known)).status_code == 200
        wrong: tuple[Any, ...] = (
            {},
            {"authorization": "Bearer none"},
            {"authorization": clear},
            {"authorization": f"Basic {clear}"},
            {"authorization": f"Bearer {clear}x"},
            {"authorization": f"Bearer {keys.path.read_text()[-90:-20].split()[0]}"},
            {"authorization": b"Bearer \xe9\xff"},
            [("authorization", f"Bearer {clear}")] * 2,
            [("x-api-key", clear)] * 2,
        )
        for given in wrong:
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nothing")):
                answer = await plain.request(method, path, headers=given, content=b"{" if method == "POST" else None)
                assert answer.status_code == 401, (path, given)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert error_of(answer.text)["code"] in {"invalid_api_key", "missing_api_key"}
        assert (await plain.get(f"/v1/models?api_key={clear}")).status_code == 401
        anthropics = {"x-api-key": clear}
        assert await answers(plain, "/v1/models", headers=anthropics)
        for given in ({"x-api-key": f"{clear}x"}, anthropics | {"authorization": "Bearer none"}, {}):
            answer = await plain.post("/v1/messages", headers=given, json={})
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        second = keys.add("bob")
        app.gateway.tick()
        assert await answers(plain, "/v1/models", headers=second)
        assert app.gateway.counts.refusals["unknown_key"] > 5
    assert clear not in caplog.text
    assert second["authorization"][7:] not in caplog.text


async def test_key_that_is_revoked_after_its_limits_changed_keeps_no_stream(keys: Keys) -> None:
    """A change of a key's limits holds at once and ends nothing; that it is revoked ends all of its streams."""
    known, other = keys.add("alice", requests_per_minute=5), keys.add("bob")
    async with answering(gateway__keys_file=str(keys.path)) as app, app.client() as plain:
        stream = await _streams(app, known)
        first, second = read_keys(keys.path)
        write_keys(keys.path, [replace(first, requests_per_minute=1000), second])
        app.gateway.tick()
        answer = await plain.post("/v1/completions", json={}, headers=known)
        assert answer.headers["x-ratelimit-limit-requests"] == "1000"
        assert not stream.done()
        keys.keep("bob")
        app.gateway.tick()
        assert "the API key was revoked" in (await stream).text
        assert await answers(plain, "/v1/models", 401, known)
        assert await answers(plain, "/v1/models", 200, other)
        await app.bus.advance(2)
        assert not len(app.gateway.dispatcher)


async def test_key_is_checked_before_the_body_is_read(keys: Keys) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    async with answering(workers=0, gateway__keys_file=str(keys.path)) as app:
        assert (await app.client().post("/v1/completions", content=body())).status_code == 401


async def test_file_that_cannot_be_read_keeps_what_was_known(keys: Keys) -> None:
    known = keys.add("alice")
    async with answering(workers=0, gateway__keys_file=str(keys.path)) as app, app.client() as plain:
        good = keys.path.read_text()
        keys.path.write_text(good[:-9])
        app.gateway.tick()
        assert app.gateway.unread_files == 1
        assert await answers(plain, "/v1/models", headers=known)
        keys.path.write_text(good)
        app.gateway.tick()
        assert app.gateway.unread_files == 0
        keys.path.unlink()
        app.gateway.tick()
        assert await answers(plain, "/v1/models", 401, known)


async def test_inside_is_for_keys_and_this_machine(keys: Keys) -> None:
    """Metrics, bus, inspection and document are for keys and peers of this machine; health says no more than yes."""
    known = keys.add("alice")
    async with answering(workers=0, gateway__keys_file=str(keys.path)) as app, app.client() as plain:
        for path in INSIDE:
            statuses = [(await plain.get(path, headers=given)).status_code for given in ({}, PROXIED | known, PROXIED)]
            assert statuses == [200, 200, 401], path
            assert (await app.client("10.0.0.1").get(path)).status_code == 401
        inspected = [await plain.post("/inspect", json={}, headers=given) for given in ({}, known, PROXIED)]
        assert [each.status_code for each in inspected] == [400, 400, 401]
        assert (await plain.get("/healthz", headers=PROXIED)).json() == {"status": "ok"}
        assert (await plain.get("/readyz", headers=PROXIED)).json() == {"status": "not ready"}
        assert "connection" in (await plain.get("/healthz")).json()
        assert (await plain.get("/readyz", headers=PROXIED | known)).json()["problems"]
        assert (await plain.get("/", headers=PROXIED)).status_code == 200
    async with answering(workers=0) as app, app.client() as plain:
        for path in INSIDE:
            assert (await plain.get(path, headers=PROXIED)).status_code == 403


async def test_rate_of_a_key_is_its_own(keys: Keys) -> None:
    few, many = keys.add("few", requests_per_minute=2), keys.add("many")
    async with answering(gateway__keys_file=str(keys.path)) as app, app.client() as plain:
        paths = ("/v1/completions", "/invocations", "/v1/completions")
        told = [await plain.post(path, json=BODY, headers=few) for path in paths]
        assert [answer.status_code for answer in told] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in told] == ["1", "0", "0"]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in told} == {"2"}
        assert error_of(told[2].text)["code"] == "rate_limit_exceeded"
        assert "the key few: at most 2 a minute" in told[2].text
        assert 1 <= int(told[2].headers["retry-after"]) <= 30
        answer = await plain.post("/v1/completions", json=BODY, headers=many)
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers
        assert app.gateway.counts.refusals["rate"] == 1


async def test_open_requests_of_a_key_leave_room_for_others(keys: Keys) -> None:
    greedy, small, other = keys.add("greedy"), keys.add("small", concurrent=1), keys.add("other")
    bounds: dict[str, Any] = {"gateway__max_requests": 8, "gateway__key_share": 0.5}
    async with answering(gateway__keys_file=str(keys.path), **bounds) as app, app.client() as plain:
        stream, one = await _streams(app, greedy, n=4), await _streams(app, small)
        for headers, most in ((greedy, 4), (small, 1)):
            refused = await plain.post("/v1/completions", json=BODY, headers=headers)
            error = error_of(refused.text)
            assert (refused.status_code, error["code"]) == (429, "concurrency_limit_exceeded")
            assert f"at most {most}" in error["message"]
            assert refused.headers["retry-after"] == "1"
        assert (await plain.post("/v1/completions", json=BODY | {"n": 5}, headers=other)).status_code == 400
        asking = plain.post("/v1/completions", json=BODY | {"n": 3}, headers=other)
        assert (await app.bus.until(asking)).status_code == 200
        assert app.gateway.counts.refusals["concurrency"] == 2
        stream.cancel()
        await app.bus.advance(1)
        asking = plain.post("/v1/completions", json=BODY, headers=greedy)
        assert (await app.bus.until(asking)).status_code == 200
        one.cancel()


# Hosts and web pages.


@pytest.mark.parametrize("hosts", ["gateway.example", "*"])
async def test_other_hosts_are_refused(hosts: str) -> None:
    async with answering(workers=0, gateway__hosts=hosts) as app, app.client() as plain:
        for host in ("localhost", "localhost:80", "127.0.0.1", "[::1]:1", "GATEWAY.example:443"):
            assert await answers(plain, "/v1/models", headers={"host": host}), host
        for host in ("evil.example", "localhost.evil.example", "10.0.0.1:80"):
            answer = await plain.get("/v1/models", headers={"host": host})
            if hosts == "*":
                assert answer.status_code == 200
            else:
                assert (answer.status_code, error_of(answer.text)["code"]) == (421, "misdirected_request")
                assert host in answer.text
        assert app.gateway.counts.refusals["host"] == (0 if hosts == "*" else 3)


async def test_any_host_is_taken_with_a_key(keys: Keys) -> None:
    """A service's name needs no setting where keys are asked for; a page that was led here has none, and is foreign."""
    key = keys.add("one")
    async with answering(workers=0, gateway__keys_file=str(keys.path)) as app, app.client() as plain:
        foreign = {"host": "tokenbus.svc"}
        assert await answers(plain, "/v1/models", 200, foreign | key)
        assert await answers(plain, "/v1/models", 401, foreign)
        assert await answers(plain, "/metrics")  # from this machine, which a page's browser is on too
        assert await answers(plain, "/metrics", 401, foreign)
        assert (await plain.get("/healthz", headers=foreign)).json() == {"status": "ok"}
        led = foreign | {"origin": "http://tokenbus.svc"}
        answer = await plain.get("/v1/models", headers=led | key)
        assert (answer.status_code, error_of(answer.text)["code"]) == (403, "origin_not_allowed")


async def test_web_pages_of_others_are_refused() -> None:
    async with answering(workers=0) as app, app.client(base_url="http://localhost:80") as plain:
        own = {"host": "localhost:8000"}
        for origin in ("https://evil.example", "null", "http://localhost", "http://evil.localhost:8000"):
            for method, path in (("POST", "/inspect"), ("GET", "/bus"), ("OPTIONS", "/inspect")):
                asking = own | {"origin": origin, "access-control-request-method": "POST"}
                answer = await plain.request(method, path, headers=asking, json={} if method == "POST" else None)
                assert (answer.status_code, error_of(answer.text)["code"]) == (403, "origin_not_allowed"), origin
                assert "access-control-allow-origin" not in answer.headers
        answer = await plain.post("/inspect", json={}, headers=own | {"origin": "http://localhost:8000"})
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers
        https = app.client(base_url="https://localhost")  # a page that came without TLS is another one
        assert (await https.post("/inspect", json={}, headers={"origin": "http://localhost"})).status_code == 403


async def test_listed_web_pages_may_ask(keys: Keys) -> None:
    ours, theirs = "https://app.example", "http://localhost:3000"
    plain_key, bound = keys.add("any"), keys.add("bound", origins=(theirs,))
    given: dict[str, Any] = {
        "gateway__keys_file": str(keys.path),
        "gateway__origins": f"{ours}, https://b.example:8443",
    }
    async with answering(**given) as app, app.client() as plain:
        for origin in (ours, theirs):
            asking = {
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,x-stainless-os",
            }
            answer = await plain.options("/v1/completions", headers=asking)
            assert answer.status_code == 204
            assert answer.headers["access-control-allow-origin"] == origin
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in answer.headers
        for key, origin, status in (
            (plain_key, ours, 200),
            (bound, theirs, 200),
            (plain_key, theirs, 403),
            (bound, ours, 403),
        ):
            headers = {**key, "origin": origin}
            answer = await plain.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)
            assert answer.status_code == status, (key, origin)
            assert answer.headers["vary"] == "Origin"
        missing = await plain.post("/v1/completions", json=BODY, headers={"origin": ours})
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (401, ours)
        assert (await plain.post("/v1/completions", json=BODY, headers=bound)).status_code == 200


# The command.


def test_keys_are_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "keys.json"
    file = ["--file", str(path)]
    assert main(["api-keys", "add", "alice", *file, "--concurrent", "3", "--origin", "https://App.example"]) == 0
    clear = capsys.readouterr().out.strip()
    assert clear.startswith("tb-")
    assert len(clear) > 40
    assert clear not in path.read_text()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert main(["api-keys", "list", *file, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["id"], listed["concurrent"], listed["origins"]) == ("alice", 3, ["https://app.example"])
    assert "sha256" not in listed
    assert main(["api-keys", "list", *file]) == 0
    assert "alice" in capsys.readouterr().out
    for wrong, status in (
        (["add", "alice", *file], 1),
        (["add", "a b", *file], 2),
        (["add", *file], 2),
        (["add", "b"], 2),
        (["add", "b", *file, "--origin", "app.example"], 2),
        (["add", "b", *file, "--concurrent", "0"], 2),
        (["list", "alice", *file], 2),
        (["list", *file, "--concurrent", "1"], 2),
        (["revoke", *file], 2),
        (["revoke", "bob", *file], 1),
    ):
        assert main(["api-keys", *wrong]) == status, wrong
        assert "Traceback" not in capsys.readouterr().err
    assert main(["api-keys", "revoke", "alice", *file]) == 0
    assert read_keys(path) == ()

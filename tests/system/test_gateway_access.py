"""Which requests the gateway admits: by API key, Host and Origin."""

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from openai import AsyncOpenAI
from openai.types import Completion

from tests.support.waiting import MOST, soon, until
from tests.system.bytewise import LONG, alone, asked, connected, sent, serving
from tests.system.deployment import Deployment
from tests.system.serving import answers, error_of, is_true, plainly
from tokenbus.cli import main
from tokenbus.gateway.api_keys import made, read_keys, write_keys
from tokenbus.gateway.server import Serving, serve_gateway
from tokenbus.settings import SettingsError

pytestmark = pytest.mark.xdist_group("gateway")
BODY: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "max_tokens": 3}
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
    """Return an empty file of keys."""
    return Keys(tmp_path / "keys.json")


@asynccontextmanager
async def openai_of(served: Serving, headers: dict[str, str]) -> AsyncIterator[AsyncOpenAI]:
    clear = headers["authorization"].removeprefix("Bearer ")
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=clear, max_retries=0, timeout=MOST) as client:
        yield client


async def test_keys_let_in_and_are_read_again(
    deployment: Deployment, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    known = keys.add("alice")
    async with (
        serving(deployment, gateway__keys_file=str(keys.path)) as served,
        plainly(served.url) as plain,
        openai_of(served, known) as client,
    ):
        assert is_true(await client.completions.create(model="tokenbus", prompt="a", max_tokens=5, logprobs=0))
        clear = known["authorization"].removeprefix("Bearer ")
        wrong: tuple[dict[str, Any], ...] = (
            {},
            {"authorization": "Bearer none"},
            {"authorization": clear},
            {"authorization": f"Basic {clear}"},
            {"authorization": f"Bearer {clear}x"},
            {"authorization": f"Bearer {keys.path.read_text()[-90:-20].split()[0]}"},
            {"authorization": b"Bearer \xe9\xff"},
        )
        for given in wrong:
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nothing")):
                answer = await plain.request(method, path, headers=given, content=b"{" if method == "POST" else None)
                assert answer.status_code == 401, (path, given)
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert error_of(answer.text)["code"] in {"invalid_api_key", "missing_api_key"}
        twice = [("authorization", f"Bearer {clear}")] * 2
        assert (await plain.get("/v1/models", headers=twice)).status_code == 401
        assert (await plain.get(f"/v1/models?api_key={clear}")).status_code == 401

        anthropics = {"x-api-key": clear}
        assert await answers(plain, "/v1/models", headers=anthropics)
        for given in ({"x-api-key": f"{clear}x"}, anthropics | {"authorization": "Bearer none"}, {}):
            answer = await plain.post("/v1/messages", headers=given, json={})
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert (await plain.get("/v1/models", headers=[*anthropics.items()] * 2)).status_code == 401

        second = keys.add("bob")
        await until(lambda: answers(plain, "/v1/models", headers=second))
        stream = await client.completions.create(model="tokenbus", prompt="a", max_tokens=LONG, stream=True)
        keys.keep("bob")
        with pytest.raises(openai.APIError, match="revoked"):
            async for _ in stream:
                pass
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert await answers(plain, "/v1/models", headers=second)
        assert served.gateway.counts.refusals["unknown_key"] > 5
        await until(lambda: not len(served.gateway.feed))
    assert clear not in caplog.text
    assert second["authorization"][7:] not in caplog.text


async def test_key_that_is_revoked_after_its_limits_changed_keeps_no_stream(deployment: Deployment, keys: Keys) -> None:
    """A change of a key's limits holds at once and ends nothing; that it is revoked ends all of its streams."""
    known = keys.add("alice", requests_per_minute=5)
    async with (
        serving(deployment, gateway__keys_file=str(keys.path)) as served,
        plainly(served.url) as plain,
        openai_of(served, known) as client,
    ):
        stream = await client.completions.create(model="tokenbus", prompt="a", max_tokens=LONG, stream=True)
        (key,) = read_keys(keys.path)
        write_keys(keys.path, [replace(key, requests_per_minute=1000)])

        async def is_read() -> bool:
            answer = await plain.post("/v1/completions", json=BODY, headers=known)
            return answer.headers["x-ratelimit-limit-requests"] == "1000"

        await until(is_read)
        keys.keep()
        with pytest.raises(openai.APIError, match="revoked"):
            async for _ in stream:
                pass
        await until(lambda: not len(served.gateway.feed))


async def test_key_is_checked_before_the_body_is_read(deployment: Deployment, keys: Keys) -> None:
    async with alone(deployment, gateway__keys_file=str(keys.path), gateway__request_timeout_ms=3_600_000) as served:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\nConnection: close\r\n\r\n"
        )
        assert (await sent(served, head)).startswith(b"HTTP/1.1 401 ")


async def test_file_that_cannot_be_read_keeps_what_was_known(deployment: Deployment, keys: Keys) -> None:
    known = keys.add("alice")
    async with alone(deployment, gateway__keys_file=str(keys.path)) as served, plainly(served.url) as plain:
        good = keys.path.read_text()
        keys.path.write_text(good[:-9])
        await until(lambda: served.gateway.unread_files == 1)
        assert (await plain.get("/v1/models", headers=known)).status_code == 200
        keys.path.write_text(good)
        await until(lambda: served.gateway.unread_files == 0)
        keys.path.unlink()
        await until(lambda: answers(plain, "/v1/models", 401, known))


async def test_file_whose_reading_fails_in_an_unexpected_way_is_read_again(
    deployment: Deployment, keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect in the gateway's periodic work is logged, and that work goes on."""
    async with alone(deployment, gateway__keys_file=str(keys.path)) as served, plainly(served.url) as plain:

        def failing(_keys: object) -> None:
            raise ZeroDivisionError("a defect")

        with monkeypatch.context() as patched:
            patched.setattr(served.gateway.callers, "_take", failing)
            known = keys.add("alice")
            await until(lambda: "tick failed" in caplog.text)
        assert "a defect" in caplog.text
        await until(lambda: answers(plain, "/v1/models", headers=known))


async def test_http_server_that_failed_is_seen(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("tokenbus.gateway.acceptor.Acceptor.start", failing)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - it comes where the gateway ends
        async with alone(deployment) as served:
            await until(lambda: served.gateway.health().problems)
            assert served.gateway.health().problems == ("its HTTP server has failed: restart the gateway",)


async def test_inside_is_for_keys_and_this_machine(deployment: Deployment, keys: Keys) -> None:
    """Metrics, bus, inspection and document are for keys and peers of this machine; health says no more than yes."""
    known = keys.add("alice")
    async with alone(deployment, gateway__keys_file=str(keys.path)) as served, plainly(served.url) as plain:
        for path in INSIDE:
            statuses = [(await plain.get(path, headers=given)).status_code for given in ({}, PROXIED | known, PROXIED)]
            assert statuses == ([503, 503, 401] if path == "/bus" else [200, 200, 401]), path
        inspected = [await plain.post("/inspect", json={}, headers=given) for given in ({}, known, PROXIED)]
        assert [each.status_code for each in inspected] == [400, 400, 401]
        assert (await plain.get("/healthz", headers=PROXIED)).json() == {"status": "ok"}
        assert (await plain.get("/readyz", headers=PROXIED)).json() == {"status": "not ready"}
        assert "connection" in (await plain.get("/healthz")).json()
        assert (await plain.get("/readyz", headers=PROXIED | known)).json()["problems"]
        assert (await plain.get("/", headers=PROXIED)).status_code == 200
    async with alone(deployment) as served, plainly(served.url) as plain:
        for path in INSIDE:
            assert (await plain.get(path, headers=PROXIED)).status_code == 403


async def test_rate_of_a_key_is_its_own(deployment: Deployment, keys: Keys) -> None:
    few, many = keys.add("few", requests_per_minute=2), keys.add("many")
    async with serving(deployment, gateway__keys_file=str(keys.path)) as served, plainly(served.url) as plain:
        answers = [await plain.post("/v1/completions", json=BODY, headers=few) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"2"}
        assert error_of(answers[2].text)["code"] == "rate_limit_exceeded"
        assert "the key few: at most 2 a minute" in answers[2].text
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        answer = await plain.post("/v1/completions", json=BODY, headers=many)
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers
        assert served.gateway.counts.refusals["rate"] == 1


async def test_open_requests_of_a_key_leave_room_for_others(deployment: Deployment, keys: Keys) -> None:
    greedy, small, other = keys.add("greedy"), keys.add("small", concurrent=1), keys.add("other")
    bounds = {"gateway__keys_file": str(keys.path), "gateway__max_requests": 8, "gateway__key_share": 0.5}
    async with (
        serving(deployment, **bounds) as served,
        plainly(served.url) as plain,
        openai_of(served, greedy) as first,
        openai_of(served, small) as second,
        openai_of(served, other) as third,
    ):
        stream = await first.completions.create(model="tokenbus", prompt="a", max_tokens=LONG, n=4, stream=True)
        one = await second.completions.create(model="tokenbus", prompt="a", max_tokens=LONG, stream=True)
        for client, most in ((first, 4), (second, 1)):
            with pytest.raises(openai.RateLimitError, match=f"at most {most}") as raised:
                await client.completions.create(model="tokenbus", prompt="a")
            assert raised.value.code == "concurrency_limit_exceeded"
            assert raised.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError):
            await third.completions.create(model="tokenbus", prompt="a", n=5)
        assert is_true(await third.completions.create(model="tokenbus", prompt="a", n=3, logprobs=0, max_tokens=4))
        assert served.gateway.counts.refusals["concurrency"] >= 2
        await stream.close()

        async def has_room() -> bool:
            answer = await plain.post("/v1/completions", json=BODY, headers=greedy)
            return answer.status_code == 200

        await until(has_room)
        await one.close()


# Hosts and web pages.


async def test_other_hosts_are_refused(deployment: Deployment) -> None:
    async with alone(deployment, gateway__hosts="gateway.example") as served, plainly(served.url) as plain:
        port = served.address.rpartition(":")[2]
        for host in ("localhost", f"localhost:{port}", "127.0.0.1", "[::1]:1", "GATEWAY.example:443"):
            assert (await plain.get("/v1/models", headers={"host": host})).status_code == 200, host
        for host in ("evil.example", "localhost.evil.example", f"10.0.0.1:{port}"):
            answer = await plain.get("/v1/models", headers={"host": host})
            assert (answer.status_code, error_of(answer.text)["code"]) == (421, "misdirected_request")
            assert host in answer.text
        assert served.gateway.counts.refusals["host"] == 3


async def test_any_host_is_taken_where_that_is_said(deployment: Deployment) -> None:
    async with alone(deployment, gateway__hosts="*") as served, plainly(served.url) as plain:
        assert (await plain.get("/bus", headers={"host": "tokenbus.svc:8000"})).status_code != 421


async def test_any_host_is_taken_with_a_key(deployment: Deployment, keys: Keys) -> None:
    """A service's name needs no setting where keys are asked for; a page that was led here has none, and is foreign."""
    key = keys.add("one")
    async with alone(deployment, gateway__keys_file=str(keys.path)) as served, plainly(served.url) as plain:
        foreign = {"host": "tokenbus.svc"}
        assert (await plain.get("/v1/models", headers=foreign | key)).status_code == 200
        assert (await plain.get("/v1/models", headers=foreign)).status_code == 401
        assert (await plain.get("/metrics")).status_code == 200  # from this machine, which a page's browser is on too
        assert (await plain.get("/metrics", headers=foreign)).status_code == 401
        assert (await plain.get("/healthz", headers=foreign)).json() == {"status": "ok"}
        led = foreign | {"origin": "http://tokenbus.svc"}
        answer = await plain.get("/v1/models", headers=led | key)
        assert (answer.status_code, error_of(answer.text)["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: \r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: local host\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: user@localhost\r\n", 400),
        (b"GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost\r\n", 400),
        (b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /healthz HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\n", 200),
        (b"GET /healthz?x=http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n", 200),
    ],
)
async def test_request_names_one_host(deployment: Deployment, head: bytes, status: int) -> None:
    async with alone(deployment) as served:
        answer = await sent(served, head + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer


async def test_post_says_that_it_is_json(deployment: Deployment) -> None:
    async with alone(deployment) as served, plainly(served.url) as plain:
        for given in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
            answer = await plain.post("/v1/completions", content=json.dumps(BODY), headers=given)
            assert (answer.status_code, error_of(answer.text)["code"]) == (415, "unsupported_media_type")


async def test_web_pages_of_others_are_refused(deployment: Deployment) -> None:
    async with alone(deployment) as served, plainly(served.url) as plain:
        for origin in ("https://evil.example", "null", "http://localhost", f"http://evil.{served.address}"):
            for method, path in (("POST", "/inspect"), ("GET", "/bus"), ("OPTIONS", "/inspect")):
                asking = {"origin": origin, "access-control-request-method": "POST"}
                answer = await plain.request(method, path, headers=asking, json={} if method == "POST" else None)
                assert (answer.status_code, error_of(answer.text)["code"]) == (403, "origin_not_allowed"), origin
                assert "access-control-allow-origin" not in answer.headers
        answer = await plain.post("/inspect", json={}, headers={"origin": f"http://{served.address}"})
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers


async def test_listed_web_pages_may_ask(deployment: Deployment, keys: Keys) -> None:
    ours, theirs = "https://app.example", "http://localhost:3000"
    plain_key, bound = keys.add("any"), keys.add("bound", origins=(theirs,))
    given = {"gateway__keys_file": str(keys.path), "gateway__origins": f"{ours}, https://b.example:8443"}
    async with serving(deployment, **given) as served, plainly(served.url) as plain:
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


# What is refused at the start.


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"gateway__address": "0.0.0.0:0"}, "gateway.address: a loopback address, or gateway.keys_file"),
        ({"gateway__address": "[::]:0"}, "gateway.address: a loopback address"),
        ({"gateway__keys_file": "{folder}/broken"}, "gateway.keys_file: a file of keys: {folder}/broken: JSON, got"),
        ({"gateway__tls_key": "{folder}/broken"}, "gateway.tls_certificate: a file"),
        (
            {"gateway__tls_key": "{folder}/broken", "gateway__tls_certificate": "{folder}/broken"},
            "gateway.tls_certificate: a certificate and its key",
        ),
        ({"gateway__origins": "https://a.example/"}, "gateway.origins: the origin of a web page"),
        ({"gateway__origins": "*"}, "gateway.origins: the origin of a web page"),
        ({"gateway__hosts": "a.example:80"}, "gateway.hosts: names of hosts"),
    ],
)
async def test_start_is_refused_in_one_line(
    deployment: Deployment, tmp_path: Path, given: dict[str, str], line: str
) -> None:
    (tmp_path / "broken").write_text("{")
    overrides: dict[str, object] = {"gateway__address": "127.0.0.1:0"}
    overrides |= {name: value.format(folder=tmp_path) for name, value in given.items()}
    with pytest.raises(SettingsError) as raised:
        async with serve_gateway(deployment.settings(**overrides)):
            pass
    assert str(raised.value).startswith(line.format(folder=tmp_path))
    assert "\n" not in str(raised.value)


async def test_wider_address_is_served_where_that_is_wanted(deployment: Deployment, keys: Keys) -> None:
    for given in ({"gateway__keys_file": str(keys.path)}, {"gateway__insecure": True}):
        settings = deployment.settings(gateway__address="0.0.0.0:0", client__drain_timeout_ms=0, **given)
        async with (
            serve_gateway(settings) as served,
            plainly("http://127.0.0.1:" + served.url.rpartition(":")[2]) as plain,
        ):
            assert (await plain.get("/healthz")).status_code == 200


# TLS.


def _certified(folder: Path) -> tuple[dict[str, str], ssl.SSLContext]:
    """Make an authority and a certificate; return the settings that name its files, and a context that trusts it."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    (folder / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (folder / "cert.pem").write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return {"gateway__tls_certificate": f"{folder}/cert.pem", "gateway__tls_key": f"{folder}/key.pem"}, trusting


async def test_tls_handshakes_that_stall_make_room(deployment: Deployment, tmp_path: Path) -> None:
    files, trusting = _certified(tmp_path)
    async with serving(deployment, **files, gateway__max_connections=4, gateway__request_timeout_ms=60_000) as served:
        gateway = served.gateway
        stalled = [await connected(served.url) for _ in range(40)]
        for _, writer in stalled[::2]:
            writer.write(b"\x16\x03\x01\x02\x00")  # the beginning of a handshake
        for place in range(3):
            async with httpx.AsyncClient(verify=trusting, timeout=MOST) as client:
                assert (await client.get(f"{served.url}/healthz")).status_code == 200
            with contextlib.suppress(ConnectionError):
                assert not await soon(stalled[place][0].read())
        await until(lambda: gateway.connections <= 5)  # it counts them ten times a second
        assert gateway.counts.refused_connections >= 36
        for _, writer in stalled:
            writer.close()


async def test_tls_serves_streams_and_takes_a_new_certificate(deployment: Deployment, tmp_path: Path) -> None:
    files, trusting = _certified(tmp_path)

    def renew() -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=_certified(tmp_path)[1], timeout=MOST)

    async with httpx.AsyncClient(verify=trusting, timeout=MOST) as first, serving(deployment, **files) as served:
        assert served.url.startswith("https://")
        answer = await first.post(f"{served.url}/v1/completions", json=BODY | {"logprobs": 0, "max_tokens": 300})
        assert is_true(Completion.model_validate(answer.json()))
        stream = await first.post(f"{served.url}/v1/completions", json=BODY | {"stream": True, "max_tokens": 300})
        assert stream.text.endswith("data: [DONE]\n\n")
        origin = {"origin": served.url.replace("https", "http")}
        assert (await first.post(f"{served.url}/inspect", json={}, headers=origin)).status_code == 403
        async with renew() as second:

            async def is_renewed() -> bool:
                try:
                    return (await second.get(f"{served.url}/healthz")).status_code == 200
                except httpx.ConnectError:
                    return False

            await until(is_renewed)
            (tmp_path / "cert.pem").write_text("nonsense")
            await until(lambda: served.gateway.unread_files == 1)
            assert (await second.get(f"{served.url}/healthz")).status_code == 200
        assert await sent(served, asked()) == b""
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        async with httpx.AsyncClient(verify=old) as plain:
            with pytest.raises(httpx.ConnectError):
                await plain.get(f"{served.url}/healthz")


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

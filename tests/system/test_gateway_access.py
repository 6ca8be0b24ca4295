"""What a gateway listens at, how it is reached with TLS, and that it goes on: over real connections."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from openai.types import Completion

from tests.support.waiting import MOST, soon, until
from tests.system.bytewise import alone, asked, connected, sent, serving
from tests.system.deployment import Deployment
from tests.system.serving import is_true
from tokenbus.gateway.server import Serving, serve_gateway
from tokenbus.settings import SettingsError

pytestmark = pytest.mark.xdist_group("gateway")
BODY: dict[str, Any] = {"model": "tokenbus", "prompt": "a", "max_tokens": 3}


async def test_defect_in_the_periodic_work_is_logged_and_the_work_goes_on(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> None:
        raise ZeroDivisionError("a defect")

    async with alone(deployment) as served:
        with monkeypatch.context() as patched:
            patched.setattr(served.gateway, "tick", failing)
            await until(lambda: "tick failed" in caplog.text)
        assert "a defect" in caplog.text
        ticked = asyncio.Event()
        monkeypatch.setattr(served.gateway, "tick", ticked.set)
        await soon(ticked.wait())


async def test_http_server_that_failed_is_seen(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("tokenbus.gateway.acceptor.Acceptor.start", failing)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - it comes where the gateway ends
        async with alone(deployment) as served:
            await until(lambda: served.gateway.health().problems)
            assert served.gateway.health().problems == ("its HTTP server has failed: restart the gateway",)


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
        ({"gateway__hosts": "a.example:80"}, "gateway.hosts: host names"),
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


async def test_wider_address_is_served_where_that_is_wanted(deployment: Deployment, tmp_path: Path) -> None:
    for given in ({"gateway__keys_file": str(tmp_path / "keys.json")}, {"gateway__insecure": True}):
        settings = deployment.settings(gateway__address="0.0.0.0:0", client__drain_timeout_ms=0, **given)
        async with serve_gateway(settings) as served:
            at_loopback = Serving(served.gateway, "127.0.0.1:" + served.address.rpartition(":")[2])
            assert (await sent(at_loopback, b"GET /healthz HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


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
    async with httpx.AsyncClient(verify=trusting, timeout=MOST) as first, serving(deployment, **files) as served:
        assert served.url.startswith("https://")
        answer = await first.post(f"{served.url}/v1/completions", json=BODY | {"logprobs": 0, "max_tokens": 300})
        assert is_true(Completion.model_validate(answer.json()))
        stream = await first.post(f"{served.url}/v1/completions", json=BODY | {"stream": True, "max_tokens": 300})
        assert stream.text.endswith("data: [DONE]\n\n")
        origin = {"origin": served.url.replace("https", "http")}
        assert (await first.post(f"{served.url}/inspect", json={}, headers=origin)).status_code == 403
        async with httpx.AsyncClient(verify=_certified(tmp_path)[1], timeout=MOST) as second:

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

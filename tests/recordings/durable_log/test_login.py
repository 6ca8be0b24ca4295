"""What a process proves to a log's servers, and what they keep it from."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tests.recordings.durable_log.test_server import Start, refusal_of, start
from tests.recordings.durable_log.using import log_settings
from tests.support.nats import NatsServer
from tests.support.nkeys import Nkey, write_credentials
from tests.support.waiting import soon, until
from tokenbus.recordings.durable_log.login import Login
from tokenbus.recordings.durable_log.server import ServerConnection
from tokenbus.recordings.durable_log.stream import LogStream
from tokenbus.settings import DurableLogSettings, SettingsError

__all__ = ["start"]
pytestmark = pytest.mark.process


def proving(folder: Path, text: str) -> str:
    """Write credentials as an operator does, and return the file's path."""
    path = folder / f"credentials-{abs(hash(text))}"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


def stream_at(server: NatsServer, scheme: str = "nats", **login: object) -> LogStream:
    own = {f"durable_log__{key}": value for key, value in login.items()}
    return LogStream(log_settings(server, durable_log__address=server.address("log", scheme), **own))


@asynccontextmanager
async def connected(server: NatsServer, scheme: str = "nats", **login: object) -> AsyncIterator[ServerConnection]:
    connection = await soon(stream_at(server, scheme, **login).connect())
    await connection.client.flush()
    yield connection
    await soon(connection.close())


async def is_refused(reason: str, server: NatsServer, scheme: str = "nats", **login: object) -> None:
    assert reason in await refusal_of(stream_at(server, scheme, **login))


async def test_what_is_not_permitted_is_logged(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = {"user": "reader", "password": "secret", "permissions": {"publish": ["allowed"]}}
    server = start(f"authorization: {json.dumps({'users': [reader]})}\n")
    async with connected(server, credentials=proving(tmp_path, "reader:secret")) as connection:
        await connection.client.publish("tokenbus.log.w.1", b"x")
        await until(lambda: "not permitted by the nats server" in caplog.text)
        assert not connection.lost.is_set()


@pytest.mark.parametrize("wrong", ["gpu:wrong", "token", ""])
async def test_wrong_credentials(start: Start, tmp_path: Path, wrong: str) -> None:
    server = start("authorization: { user: gpu, password: gpu }\n")
    await is_refused("authorization violation", server, credentials=proving(tmp_path, wrong) if wrong else "")


async def test_user_and_token(start: Start, tmp_path: Path) -> None:
    for config, text in (("user: gpu, password: secret", "gpu:secret"), ("token: abracadabra", "abracadabra")):
        server = start(f"authorization: {{ {config} }}\n")
        async with connected(server, credentials=proving(tmp_path, text)) as connection:
            assert not connection.lost.is_set()


async def test_nkey(start: Start, tmp_path: Path) -> None:
    key = Nkey("user")
    server = start(f"authorization: {json.dumps({'users': [{'nkey': key.public}]})}\n")
    async with connected(server, credentials=proving(tmp_path, key.seed)) as connection:
        assert not connection.lost.is_set()
    await is_refused("authorization violation", server, credentials=proving(tmp_path, Nkey("user").seed))


async def test_jwt(start: Start, tmp_path: Path) -> None:
    operator, account, user = Nkey("operator"), Nkey("account"), Nkey("user")
    limits = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    server = start(
        f"operator: {operator.jwt(operator)}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {operator.jwt(account, limits=limits)} }}\n"
    )
    jwt = account.jwt(user, subs=-1, data=-1, payload=-1, pub={"allow": ["tokenbus.>"]}, sub={"allow": ["tokenbus.>"]})
    async with connected(server, credentials=write_credentials(tmp_path / "user.creds", jwt, user.seed)) as connection:
        assert not connection.lost.is_set()


@pytest.mark.parametrize(
    ("text", "mode", "limit"),
    [
        ("", 0o600, "a .creds file, or one line"),
        ("a\nb", 0o600, "a .creds file, or one line"),
        ("a:b", 0o644, "a file that only its owner may read"),
        ("SUXX", 0o600, "a user's NKEY seed"),
        pytest.param(Nkey("account").seed.replace("SA", "SU", 1), 0o600, "a user's NKEY seed", id="of an account"),
    ],
)
def test_credentials_that_cannot_be_used(tmp_path: Path, text: str, mode: int, limit: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=r"durable_log\.credentials") as refused:
        Login(DurableLogSettings(credentials=str(path)), is_tls=False)
    assert limit in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_file_that_is_away_keeps_from_no_connection(start: Start, tmp_path: Path) -> None:
    """A file may be away for a moment, as while it is replaced."""
    server, path = start("authorization: { user: gpu, password: gpu }\n"), proving(tmp_path, "gpu:gpu")
    stream, remove = stream_at(server, credentials=path), Path(path).unlink
    for _ in range(2):
        await soon((await soon(stream.connect())).close())
        remove(missing_ok=True)


def tls(authority: trustme.CA, folder: Path) -> str:
    issued = authority.issue_cert("127.0.0.1")
    key, certificate = folder / "server.key", folder / "server.pem"
    issued.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    return f"tls: {{ cert_file: '{certificate}', key_file: '{key}' }}\n"


def trusted(authority: trustme.CA, folder: Path, name: str = "ca") -> str:
    path = folder / f"{name}.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


async def test_tls(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server whose certificate is trusted is used; when it closes, asyncio has nothing to warn about."""
    authority = trustme.CA()
    server = start(tls(authority, tmp_path))
    await is_refused("certificate verify failed", server, "tls", ca_file=trusted(trustme.CA(), tmp_path, "other"))
    async with connected(server, "tls", ca_file=trusted(authority, tmp_path)) as connection:
        server.kill()
        await soon(connection.lost.wait())
    assert "nats server lost" in caplog.text
    assert "eof_received" not in caplog.text


def issued(authority: trustme.CA, folder: Path, name: str) -> str:
    path = folder / f"{name}.pem"
    authority.issue_cert(f"{name}@tokenbus.test").private_key_and_cert_chain_pem.write_to_path(str(path))
    path.chmod(0o600)
    return str(path)


async def test_certificates_of_clients(start: Start, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    ca = trusted(authority, tmp_path)
    config = tls(authority, tmp_path).replace("}", f", ca_file: '{ca}', verify_and_map: true }}")
    users = json.dumps({"users": [{"user": "processor@tokenbus.test"}]})
    server = start(f"{config}authorization: {users}\n")
    async with connected(server, "tls", ca_file=ca, certificate=issued(authority, tmp_path, "processor")) as connection:
        assert not connection.lost.is_set()
    for refused in ("", issued(authority, tmp_path, "other"), issued(stranger, tmp_path, "stranger")):
        await is_refused("", server, "tls", ca_file=ca, certificate=refused)


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    authority = trustme.CA()
    good = issued(authority, tmp_path, "good")
    bare, open_to_all = trusted(authority, tmp_path, "bare"), tmp_path / "open.pem"
    Path(bare).chmod(0o600)
    open_to_all.write_bytes(Path(good).read_bytes())
    open_to_all.chmod(0o644)
    for changed, key in (
        ({"certificate": bare}, "durable_log.certificate: a PEM certificate and its unencrypted key"),
        ({"certificate": str(open_to_all)}, "durable_log.certificate: a file that only its owner may read"),
        ({"certificate": str(tmp_path / "none")}, "durable_log.certificate: a file that can be read"),
    ):
        with pytest.raises(SettingsError, match=re.escape(key)):
            Login(DurableLogSettings(**changed), is_tls=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["user:secret", "secret"])
async def test_no_secret_in_the_clear(start: Start, tmp_path: Path, text: str) -> None:
    heard = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","auth_required":true,"max_payload":1048576}\r\n')
        while data := await reader.read(65_536):
            heard.extend(data)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}/log"
        settings = log_settings(start(), durable_log__address=address, durable_log__credentials=proving(tmp_path, text))
        assert "it offers no TLS" in await refusal_of(LogStream(settings))
    assert heard == b""

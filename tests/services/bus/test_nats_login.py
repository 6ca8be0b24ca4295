"""What a process proves to a NATS server, and what the server's permissions keep it from."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.services.bus.harness import introduce
from tests.services.bus.nats_ends import QUICK, Ends, Start, ends, start
from tests.support.nkeys import Nkey, write_credentials
from tests.support.waiting import soon, until
from tokenbus_services.bus import AddressError, Role
from tokenbus_services.bus.nats import NatsTransport
from tokenbus_services.settings import BusSettings, SettingsError

__all__ = ["ends", "start"]
pytestmark = pytest.mark.process
PROCESSOR = {"publish": ["tokenbus.>"], "subscribe": ["tokenbus.>"]}


def may(name: str, *, at: str = "workers", roles: str = "worker") -> dict[str, object]:
    return {"publish": [f"tokenbus.{at}.up.{roles}.{name}.*"], "subscribe": [f"tokenbus.{at}.down.{name}.*"]}


def users(**permissions: object) -> str:
    listed = [{"user": name, "password": name, "permissions": allowed} for name, allowed in permissions.items()]
    return f"authorization: {json.dumps({'users': listed})}\n"


def proving(folder: Path, text: str, **settings: str) -> BusSettings:
    path = folder / f"credentials-{abs(hash(text))}"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return replace(QUICK, nats_credentials=str(path), **settings)  # type: ignore[arg-type]


async def test_identity(start: Start, ends: Ends, tmp_path: Path) -> None:
    server = start(users(processor=PROCESSOR, gpu=may("gpu")))
    listener = await ends.listen(server.address("workers"), proving(tmp_path, "processor:processor"))
    connection = await ends.connect(listener.address, proving(tmp_path, "gpu:gpu", nats_roles="worker"))
    identity = listener.identity(await introduce(connection, listener))
    assert identity.name == "gpu"
    assert identity.roles == {Role.WORKER}
    assert identity.may(Role.WORKER, "gpu")
    assert not identity.may(Role.WORKER, "other")
    assert not identity.may(Role.OBSERVER)


@pytest.mark.parametrize(
    "claimed",
    [
        {"nats_name": "other", "nats_roles": "worker"},
        {"nats_name": "gpu", "nats_roles": "worker+observer"},
        {"nats_name": "gpu"},
    ],
)
async def test_peer_that_claims_to_be_another(
    start: Start, ends: Ends, tmp_path: Path, claimed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    server = start(users(processor=PROCESSOR, gpu=may("gpu")))
    listener = await ends.listen(server.address("workers"), proving(tmp_path, "processor:processor"))
    liar = await ends.connect(listener.address, proving(tmp_path, "gpu:gpu", **claimed))
    assert liar.send([b"a lie"])
    await until(lambda: "not permitted by the nats server" in caplog.text)
    honest = await ends.connect(listener.address, proving(tmp_path, "gpu:gpu", nats_roles="worker"))
    await introduce(honest, listener)
    assert listener.usage().unadmitted == 0


async def test_peer_that_may_not_listen(start: Start, ends: Ends, tmp_path: Path) -> None:
    """A worker cannot take the processor's name, or hear what others are told."""
    server = start(users(processor=PROCESSOR, gpu=may("gpu")))
    with pytest.raises(AddressError, match="not permitted: permissions violation for"):
        await ends.listen(server.address("workers"), proving(tmp_path, "gpu:gpu"))


@pytest.mark.parametrize("wrong", ["gpu:wrong", "token", ""])
async def test_wrong_credentials(start: Start, ends: Ends, tmp_path: Path, wrong: str) -> None:
    """Whoever proves something else, or nothing, is refused, and told so in one line."""
    server = start(users(processor=PROCESSOR))
    settings = proving(tmp_path, wrong) if wrong else QUICK
    with pytest.raises(AddressError, match=r"no server answers .*authorization violation"):
        await ends.listen(server.address("workers"), settings)


async def test_token(start: Start, ends: Ends, tmp_path: Path) -> None:
    server = start("authorization: { token: abracadabra }\n")
    settings = proving(tmp_path, "abracadabra")
    listener = await ends.listen(server.address("workers"), settings)
    peer = await introduce(await ends.connect(listener.address, settings), listener)
    assert listener.identity(peer).may(Role.WORKER, "any")


async def test_nkey(start: Start, ends: Ends, tmp_path: Path) -> None:
    processor, gpu = Nkey("user"), Nkey("user")
    allowed = [{"nkey": processor.public, "permissions": PROCESSOR}, {"nkey": gpu.public, "permissions": may("gpu")}]
    server = start(f"authorization: {json.dumps({'users': allowed})}\n")
    listener = await ends.listen(server.address("workers"), proving(tmp_path, processor.seed))
    settings = proving(tmp_path, gpu.seed, nats_name="gpu", nats_roles="worker")
    peer = await introduce(await ends.connect(listener.address, settings), listener)
    assert listener.identity(peer).name == "gpu"


async def test_jwt(start: Start, ends: Ends, tmp_path: Path) -> None:
    operator, account, user = Nkey("operator"), Nkey("account"), Nkey("user")
    limits = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    server = start(
        f"operator: {operator.jwt(operator)}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {operator.jwt(account, limits=limits)} }}\n"
    )
    jwt = account.jwt(user, subs=-1, data=-1, payload=-1, pub={"allow": ["tokenbus.>"]}, sub={"allow": ["tokenbus.>"]})
    path = write_credentials(tmp_path / "user.creds", jwt, user.seed)
    settings = replace(QUICK, nats_credentials=path)
    listener = await ends.listen(server.address("workers"), settings)
    await introduce(await ends.connect(listener.address, settings), listener)


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
async def test_credentials_that_cannot_be_used(tmp_path: Path, text: str, mode: int, limit: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=r"bus\.nats_credentials") as refused:
        await NatsTransport(replace(QUICK, nats_credentials=str(path))).connect("nats://127.0.0.1:1/workers")
    assert limit in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_missing_files(tmp_path: Path) -> None:
    for key in ("nats_credentials", "nats_ca_file"):
        settings = replace(QUICK, **{key: str(tmp_path / "none")})  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match=f"bus.{key}.*no such file"):
            await NatsTransport(settings).connect("nats://127.0.0.1:1/workers")


async def test_credentials_are_read_once(start: Start, ends: Ends, tmp_path: Path) -> None:
    """A file that is away, as while it is replaced, keeps a process from no further connection."""
    server = start(users(processor=PROCESSOR, gpu=may("gpu")))
    listener = await ends.listen(server.address("workers"), proving(tmp_path, "processor:processor"))
    settings = proving(tmp_path, "gpu:gpu", nats_roles="worker")
    transport, remove = NatsTransport(settings), Path(settings.nats_credentials).unlink
    for _ in range(2):
        connection = await transport.connect(listener.address)
        ends.cleanup.push_async_callback(connection.close)
        await introduce(connection, listener)
        remove(missing_ok=True)


@pytest.mark.parametrize("address", ["nats://192.0.2.1:4222/workers", "tls://192.0.2.1:4222/workers"])
async def test_beyond_loopback(address: str) -> None:
    """Beyond loopback TLS and credentials are needed, unless the settings say otherwise."""
    with pytest.raises(AddressError, match=r"beyond loopback it needs tls:// and bus\.nats_credentials"):
        await NatsTransport(QUICK).connect(address)


def tls(authority: trustme.CA, folder: Path) -> str:
    issued = authority.issue_cert("127.0.0.1")
    key, certificate = folder / "server.key", folder / "server.pem"
    issued.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    return f"tls: {{ cert_file: '{certificate}', key_file: '{key}' }}\n"


async def test_tls(start: Start, ends: Ends, tmp_path: Path) -> None:
    authority = trustme.CA()
    server = start(tls(authority, tmp_path))
    trusted, other = tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.cert_pem.write_to_path(str(trusted))
    trustme.CA().cert_pem.write_to_path(str(other))
    settings = replace(QUICK, nats_ca_file=str(trusted))
    listener = await ends.listen(server.address("workers", "tls"), settings)
    await introduce(await ends.connect(listener.address, settings), listener)
    with pytest.raises(AddressError, match="certificate verify failed"):
        await ends.listen(server.address("others", "tls"), replace(QUICK, nats_ca_file=str(other)))


async def test_tls_ends_without_a_word_of_asyncio(
    start: Start, ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server over TLS that closes a connection is lost in our own words: asyncio has nothing to warn about."""
    authority = trustme.CA()
    server = start(tls(authority, tmp_path))
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    listener = await ends.listen(server.address("workers", "tls"), replace(QUICK, nats_ca_file=str(trusted)))
    server.kill()
    await until(lambda: not listener.is_reachable())
    assert "nats server lost" in caplog.text
    assert "eof_received" not in caplog.text


def issued(authority: trustme.CA, folder: Path, name: str) -> Path:
    path = folder / f"{name}.pem"
    authority.issue_cert(f"{name}@tokenbus.test").private_key_and_cert_chain_pem.write_to_path(str(path))
    path.chmod(0o600)
    return path


async def test_certificates_of_clients(start: Start, ends: Ends, tmp_path: Path) -> None:
    """A server that verifies its clients takes those with a certificate of its authority, each as the user it names."""
    authority, stranger = trustme.CA(), trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    verified = f"ca_file: '{ca}', verify_and_map: true }}"
    users = [
        {"user": f"{name}@tokenbus.test", "permissions": allowed}
        for name, allowed in (("processor", PROCESSOR), ("gpu", may("gpu")))
    ]
    config = tls(authority, tmp_path).replace("}", f", {verified}")
    server = start(f"{config}authorization: {json.dumps({'users': users})}\n")
    trusting = replace(QUICK, nats_ca_file=str(ca))
    processor, gpu = (
        replace(trusting, nats_certificate=str(issued(authority, tmp_path, name)), nats_name=name)
        for name in ("processor", "gpu")
    )
    listener = await ends.listen(server.address("workers", "tls"), processor)
    connection = await ends.connect(listener.address, replace(gpu, nats_roles="worker"))
    assert listener.identity(await introduce(connection, listener)).name == "gpu"
    with pytest.raises(AddressError, match="not permitted"):
        await ends.listen(server.address("others", "tls"), gpu)
    unknown = replace(trusting, nats_certificate=str(issued(stranger, tmp_path, "stranger")))
    for refused in (trusting, unknown):
        with pytest.raises(AddressError, match="no server answers"):
            await ends.listen(server.address("others", "tls"), refused)


async def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    authority = trustme.CA()
    good = issued(authority, tmp_path, "good")
    bare, open_to_all = tmp_path / "bare.pem", tmp_path / "open.pem"
    authority.cert_pem.write_to_path(str(bare))
    bare.chmod(0o600)
    open_to_all.write_bytes(good.read_bytes())
    open_to_all.chmod(0o644)
    for changed, key in (
        ({"nats_certificate": str(bare)}, "bus.nats_certificate: a certificate in PEM and its key"),
        ({"nats_certificate": str(open_to_all)}, "bus.nats_certificate: a file that only its owner may read"),
        ({"nats_certificate": str(tmp_path / "none")}, "bus.nats_certificate: a file that can be read"),
        (
            {"nats_certificate": str(bare), "nats_certificate_key": str(open_to_all)},
            "bus.nats_certificate_key: a file that only its owner may read",
        ),
    ):
        with pytest.raises(SettingsError, match=re.escape(key)):
            await NatsTransport(replace(QUICK, **changed)).connect("tls://127.0.0.1:1/workers")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"bus\.nats_certificate_key: .*only beside bus\.nats_certificate"):
        replace(QUICK, nats_certificate_key=str(good))


@pytest.mark.parametrize("text", ["user:secret", "secret"])
async def test_no_secret_in_the_clear(tmp_path: Path, text: str) -> None:
    heard = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","auth_required":true,"max_payload":1048576}\r\n')
        while data := await reader.read(65_536):
            heard.extend(data)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}/workers"
        with pytest.raises(AddressError, match="it offers no TLS"):
            await soon(NatsTransport(proving(tmp_path, text)).listen(address))
    assert heard == b""

"""ZeroMQ over tcp with keys: a peer with an allowed key is let in as its owner, and each other peer is refused."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.bus.harness import SETTINGS, Bus, introduce
from tests.bus.keyed import QUICK, Keyring
from tests.support.waiting import soon, until
from tokenbus.bus import ANONYMOUS, AddressError, Connection, Listener, Role, ZeroMQTransport, zeromq
from tokenbus.bus.sockets import LoopSocket
from tokenbus.bus.zap import KEYS_DOMAIN, OPEN_DOMAIN, Authenticator
from tokenbus.bus.zeromq import ZeroMQListener
from tokenbus.settings import BusSettings, SettingsError

Make = Callable[..., Bus]


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


class Meeting:
    """A listener that asks for keys, beside a peer that it lets in and that must notice nothing."""

    def __init__(self, keyring: Keyring, make: Make) -> None:
        self.keyring = keyring
        self.make = make
        self.reasons: list[str] = []
        self.listener: Listener

    async def begin(self) -> None:
        self.keyring.make("witness")
        self.keyring.allow(self.keyring.entry("witness"))
        self.listener = await self.make("zeromq-tcp", self.keyring.listening()).listen(refused=self.reasons.append)
        self.witness = await self.joined("witness")
        self.peer = await introduce(self.witness, self.listener)

    async def joined(self, name: str, **settings: object) -> Connection:
        chosen = replace(self.keyring.connecting(name), **settings)  # type: ignore[arg-type]
        return await self.make("zeromq-tcp", chosen).connect(self.listener.address)

    async def refuses(self, reason: str) -> None:
        receiving = asyncio.ensure_future(self.listener.receive())
        await until(lambda: any(reason in line for line in self.reasons))
        assert self.witness.send([b"still here"])
        assert await soon(receiving) == (self.peer, [b"still here"])


@pytest.fixture
async def meeting(keyring: Keyring, make: Make, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """Return a meeting whose listener checks the keys of its peers all the time, and not once a second."""
    monkeypatch.setattr(zeromq, "_KEYS_SECONDS", 0.01)
    met = Meeting(keyring, make)
    await met.begin()
    return met


@pytest.mark.parametrize("role", list(Role))
async def test_allowed_key_is_its_owner(meeting: Meeting, role: Role) -> None:
    """A peer with an allowed key is known by its name, with its roles and no others, under its names alone."""
    keyring = meeting.keyring
    keyring.make("w0")
    keyring.allow(keyring.entry("witness"), keyring.entry("w0", role, names=("w0", "w0-*")))
    connection = await meeting.joined("w0")
    identity = meeting.listener.identity(await introduce(connection, meeting.listener))
    assert identity.name == "w0"
    assert [other for other in Role if identity.may(other)] == [role]
    assert [name for name in ("w0", "w0-1", "w1", "") if identity.may(role, name)] == ["w0", "w0-1"]
    assert meeting.listener.identity(meeting.peer).name == "witness"
    assert meeting.reasons == []


async def test_key_that_is_not_allowed_is_refused(
    meeting: Meeting, keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    public = keyring.make("other")
    connection = await meeting.joined("other")
    connection.send([b"let me in"])
    await meeting.refuses("its key is not allowed")
    await until(lambda: len([line for line in meeting.reasons if "not allowed" in line]) > 2)  # it tries again
    lines = [record.message for record in caplog.records]
    (line,) = [line for line in lines if line.startswith("key not allowed")]
    assert public in line
    assert len([line for line in lines if line.startswith("handshake failed")]) == 1


async def test_key_for_another_listener_and_no_key_are_refused(meeting: Meeting, keyring: Keyring, make: Make) -> None:
    for connection, reason in (
        (await meeting.joined("witness", server_key=keyring.make("other")), "another key than this listener's"),
        (await make("zeromq-tcp", QUICK).connect(meeting.listener.address), "uses another mechanism"),
    ):
        connection.send([b"let me in"])
        await meeting.refuses(reason)


async def test_key_where_none_is_asked_for_is_refused(keyring: Keyring, make: Make) -> None:
    keyring.make("w0")
    reasons: list[str] = []
    listener = await make("zeromq-tcp").listen(refused=reasons.append)
    connection = await make("zeromq-tcp", keyring.connecting("w0")).connect(listener.address)
    connection.send([b"let me in"])
    await until(lambda: any("uses another mechanism" in reason for reason in reasons))


@asynccontextmanager
async def gate_of(keyring: Keyring) -> AsyncIterator[Callable[..., Awaitable[bytes]]]:
    transport = ZeroMQTransport(keyring.listening())
    listener = await transport.listen("tcp://127.0.0.1:0")
    context = transport._listening._context
    assert context is not None
    asking = LoopSocket(context.socket(zmq.REQ), "asking")
    asking._socket.connect("inproc://zeromq.zap.01")

    async def ask(domain: bytes, mechanism: bytes, *credentials: bytes) -> bytes:
        asking.send([b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, *credentials])
        return (await soon(asking.receive()))[2]

    try:
        yield ask
    finally:
        asking.close()
        await listener.close()


async def test_only_what_a_domain_asks_for_passes_its_gate(keyring: Keyring) -> None:
    public = keyring.make("w0")
    keyring.allow(keyring.entry("w0"))
    key, other = zmq.utils.z85.decode(public), zmq.utils.z85.decode(keyring.make("other"))
    cases = {
        (KEYS_DOMAIN, b"CURVE", key): b"200",
        (KEYS_DOMAIN, b"CURVE", other): b"400",
        (KEYS_DOMAIN, b"CURVE"): b"400",
        (KEYS_DOMAIN, b"CURVE", b""): b"400",
        (KEYS_DOMAIN, b"CURVE", key[:-1]): b"400",
        (KEYS_DOMAIN, b"CURVE", key, key): b"400",
        (KEYS_DOMAIN, b"NULL"): b"400",
        (KEYS_DOMAIN, b"PLAIN", b"w0", b""): b"400",
        (OPEN_DOMAIN, b"NULL"): b"200",
        (OPEN_DOMAIN, b"CURVE", key): b"400",
        (OPEN_DOMAIN, b"PLAIN", b"w0", b""): b"400",
        (b"another", b"CURVE", key): b"400",
        (b"another", b"NULL"): b"400",
        (b"", b"NULL"): b"400",
    }
    async with gate_of(keyring) as ask:
        assert {case: await ask(*case) for case in cases} == cases


async def test_gate_without_an_allow_list_lets_no_key_in() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Authenticator(context)
    assert gate._user(KEYS_DOMAIN, b"CURVE", [bytes(32)], b"") is None
    await gate.close()
    context.term()


async def test_revoked_key_is_cut_off_and_stays_out(meeting: Meeting, keyring: Keyring) -> None:
    keyring.make("w0")
    keyring.allow(keyring.entry("witness"), keyring.entry("w0"))
    connection = await meeting.joined("w0")
    peer = await introduce(connection, meeting.listener)
    keyring.allow(keyring.entry("witness"))
    await meeting.refuses("its key was revoked")
    assert not any(meeting.listener.identity(peer).may(role) for role in Role)
    await until(lambda: any("its key is not allowed" in line for line in meeting.reasons))
    connection.send([b"let me in"])
    await meeting.refuses("its key is not allowed")


async def test_what_a_revoked_key_sends_is_dropped(meeting: Meeting, keyring: Keyring) -> None:
    """A peer that was silent from its handshake until its key was revoked is cut off by its first message."""
    keyring.make("w0")
    keyring.allow(keyring.entry("witness"), keyring.entry("w0"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        keyring.prove(socket, "w0")
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            socket.connect(meeting.listener.address)
            await until(lambda: bool(monitor.poll(0)))
            keyring.allow(keyring.entry("witness"))
            assert isinstance(meeting.listener, ZeroMQListener)
            allowed = meeting.listener._monitor.allowed
            assert allowed is not None
            await until(lambda: allowed.version > 1)  # the listener has read it again
            assert not any("revoked" in line for line in meeting.reasons)
            socket.send(b"let me in")
            await meeting.refuses("its key was revoked")
            socket.disable_monitor()


async def test_rights_that_change_hold_for_connections_that_are_there(meeting: Meeting, keyring: Keyring) -> None:
    keyring.make("w0")
    keyring.allow(keyring.entry("witness"), keyring.entry("w0", Role.WORKER, Role.OBSERVER))
    connection = await meeting.joined("w0")
    peer = await introduce(connection, meeting.listener)
    assert meeting.listener.identity(peer).may(Role.OBSERVER)
    keyring.allow(keyring.entry("witness"), keyring.entry("w0", Role.WORKER))
    await until(lambda: not meeting.listener.identity(peer).may(Role.OBSERVER))
    assert meeting.listener.identity(peer).may(Role.WORKER)
    assert await introduce(connection, meeting.listener) == peer


async def test_broken_allow_list_leaves_the_last_good_one(
    meeting: Meeting, keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    keyring.make("w0")
    keyring.file.write_text("[[key]]\nname = 'w0'\n")
    connection = await meeting.joined("w0")
    connection.send([b"let me in"])
    await meeting.refuses("its key is not allowed")
    again = await meeting.joined("witness")
    await introduce(again, meeting.listener)
    (line,) = [record.message for record in caplog.records if record.message.startswith("allowed keys cannot be read")]
    assert f"{keyring.file}: key 1: public: a public key of 40 characters, got None" in line
    keyring.file.unlink()
    await introduce(await meeting.joined("witness"), meeting.listener)
    keyring.allow(keyring.entry("witness"), keyring.entry("w0"))
    receiving = asyncio.create_task(meeting.listener.receive())

    def has_come() -> bool:
        connection.send([b"hello"])
        return receiving.done()

    await until(has_come)
    peer, _ = await receiving
    assert meeting.listener.identity(peer).name == "w0"


async def test_peers_are_forgotten_when_they_leave(meeting: Meeting) -> None:
    listener, peers = meeting.listener, []
    for _ in range(20):
        connection = await meeting.joined("witness")
        peers.append(await introduce(connection, listener))
        await connection.close()
    await until(lambda: listener.usage().admitted + listener.usage().unadmitted == 1)
    assert not any(listener.identity(peer).name or listener.is_connected(peer) for peer in peers)


@pytest.mark.parametrize("kind", ["zeromq-ipc", "memory"])
async def test_keys_are_for_tcp_alone(keyring: Keyring, make: Make, kind: str) -> None:
    """Over paths and within a process nothing is asked for, whatever keys there are: their peers are anonymous."""
    bus = make(kind, keyring.listening())
    listener, _, peer = await bus.pair()
    assert listener.identity(peer) is ANONYMOUS


# What is refused at the start.

BEYOND = ["tcp://0.0.0.0:5570", "tcp://*:5570", "tcp://[::]:5570", "tcp://192.0.2.1:5570", "tcp://host.invalid:5570"]


@pytest.mark.parametrize("address", BEYOND)
async def test_address_beyond_loopback_needs_keys(make: Make, address: str) -> None:
    bus = make("zeromq-tcp")
    uses = [bus.transport.listen] + ([] if "*" in address else [bus.transport.connect])
    for use in uses:
        with pytest.raises(AddressError) as refused:
            await soon(use(address))
        assert "beyond loopback" in str(refused.value)
        assert {"(bus.key_file),", "bus.insecure"} <= set(str(refused.value).split())


async def test_address_beyond_loopback_with_keys_or_insecure(
    keyring: Keyring, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await make("zeromq-tcp", keyring.listening()).listen("tcp://0.0.0.0:0")
    assert caplog.records == []
    insecure = make("zeromq-tcp", replace(SETTINGS, insecure=True))
    for _ in range(2):
        await insecure.listen("tcp://0.0.0.0:0")
    (record,) = caplog.records
    assert record.message.startswith("bus without keys beyond loopback")


async def _listened(settings: BusSettings) -> None:
    listener = await ZeroMQTransport(settings).listen("tcp://127.0.0.1:0")
    await listener.close()


async def _connected(settings: BusSettings) -> None:
    connection = await ZeroMQTransport(settings).connect("tcp://127.0.0.1:5570")
    await connection.close()


async def test_keys_that_are_half_set_are_refused(keyring: Keyring) -> None:
    keyring.make("w0")
    connecting = keyring.connecting("w0")
    for use, settings, key in (
        (_listened, replace(keyring.listening(), allowed_keys=""), "bus.allowed_keys"),
        (_connected, replace(connecting, server_key=""), "bus.server_key"),
        (_connected, replace(connecting, key_file=""), "bus.key_file"),
    ):
        with pytest.raises(SettingsError) as refused:
            await use(settings)
        assert refused.value.key == key


async def test_files_that_cannot_be_used_are_refused(keyring: Keyring, folder: Path) -> None:
    keyring.make("w0")
    secret = keyring.folder / "w0.key_secret"
    text = secret.read_text().split('secret-key = "')[1].split('"')[0]
    empty = folder / "empty"
    empty.write_text("")
    empty.chmod(0o600)
    good = keyring.connecting("w0")
    wrong = [
        (replace(good, key_file=str(folder / "none")), "bus.key_file: a file that can be read: no such file"),
        (replace(good, key_file=str(empty)), "bus.key_file: a key file that can be read: no public key"),
        (replace(good, key_file=str(keyring.folder / "w0.key")), "bus.key_file: a file that only its owner may read"),
        (replace(good, server_key="nonsense"), "bus.server_key: a public key of 40 characters"),
        (replace(good, server_key=str(empty)), "bus.server_key: a public certificate that can be read"),
        (replace(good, server_key="~" * 40), "bus.server_key: a public key of 40 characters"),
    ]
    for mode in (0o640, 0o604, 0o620, 0o777):
        copy = folder / f"copy-{mode:o}"
        copy.write_text(secret.read_text())
        copy.chmod(mode)
        wrong.append((replace(good, key_file=str(copy)), f"{copy} of mode {mode:04o}"))
    public = folder / "public"
    public.write_text((keyring.folder / "w0.key").read_text())
    public.chmod(0o600)
    wrong.append((replace(good, key_file=str(public)), "bus.key_file: a file with a secret key"))
    for settings, line in wrong:
        with pytest.raises(SettingsError) as refused:
            await _connected(settings)
        assert line in str(refused.value)
        assert text not in str(refused.value)


async def test_secret_is_in_no_settings(keyring: Keyring) -> None:
    keyring.make("w0")
    secret = (keyring.folder / "w0.key_secret").read_text().split('secret-key = "')[1].split('"')[0]
    transport = ZeroMQTransport(keyring.connecting("w0"))
    connection = await transport.connect("tcp://127.0.0.1:5570")
    own = transport._keys._own
    assert own is not None
    assert own.secret.decode() == secret
    assert secret not in repr(own) + repr(transport._settings)
    assert keyring.folder.stat().st_mode & 0o777 == 0o700
    await connection.close()

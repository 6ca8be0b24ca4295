"""Peers with a valid key whose message never ends: each is cut off in time, and costs nobody else anything."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bus.keyed import Keyring
from tests.support.ports import free_ports
from tests.support.waiting import soon
from tests.system.asking import Witness
from tests.system.curve_peer import CurvePeer
from tests.system.deployment import Deployment
from tests.system.test_keys import keys_of, listening
from tokenbus.client import Client
from tokenbus_contracts.generated.client_pb2 import ClientFrame, ClientHello, ServerFrame
from tokenbus_contracts.generated.stream_pb2 import Hello, ProcessorFrame, StreamLimits, WorkerFrame, WorkerRole

_MIB = 1 << 20
_MORE_MIB = 256
"""What the processor may take above what it had."""
_SENT_MIB = 1024


def worker_hello() -> bytes:
    limits = StreamLimits(max_message_bytes=65536, max_rows=8, max_tokens_per_row=4)
    role = WorkerRole.WORKER_ROLE_MIXED
    hello = Hello(schema_major=1, worker_id="stranger", role=role, limits=limits, first_sequence=1, next_sequence=1)
    return WorkerFrame(epoch=7, hello=hello).SerializeToString()


def client_hello() -> bytes:
    hello = ClientHello(schema_major=1, name="stranger", window_frames=8, window_bytes=65536, session=7)
    return ClientFrame(hello=hello).SerializeToString()


ATTACKS = (("workers", "parts"), ("clients", "parts"), ("clients", "one part"))
HELLOS: dict[str, Callable[[], bytes]] = {"workers": worker_hello, "clients": client_hello}


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // 1024


def _admitted(peer: CurvePeer, at: str) -> None:
    peer.part(HELLOS[at]())
    frame = (ProcessorFrame if at == "workers" else ServerFrame).FromString(peer.receive())
    assert frame.HasField("welcome"), frame


def _attack(address: str, at: str, keyring: Keyring, kind: str) -> int:
    """Say hello, send a message without end, and return after how many MiB of it this peer was cut off."""
    with CurvePeer(address, keyring, "attacker") as peer:
        _admitted(peer, at)
        for sent in range(_SENT_MIB):
            try:
                if kind == "parts":
                    peer.part(bytes(_MIB), more=True)
                elif sent:
                    peer.socket.sendall(bytes(_MIB))
                else:
                    peer.begin_part(1 << 40)
            except ConnectionError:
                return sent
    raise AssertionError(f"not cut off after {_SENT_MIB} MiB")


async def test_messages_without_end_of_admitted_peers(deployment: Deployment, tmp_path: Path) -> None:
    """Parts without end, or one that is never finished, from a peer with a key that was welcomed: it is cut off.

    The processor's memory stays in bounds, and a worker and a client beside it lose no token.
    """
    keyring = Keyring(tmp_path)
    names = ("worker-0", "client", "attacker")
    for name in names:
        keyring.make(name)
    keyring.allow(*map(keyring.entry, names))
    addresses: dict[str, Any] = {
        f"bus__{name}_address": f"tcp://127.0.0.1:{port}" for name, port in zip(HELLOS, free_ports(2), strict=True)
    }
    processor = deployment.start_processor(**addresses, **listening(keyring))
    deployment.start_worker(**addresses, **keys_of(keyring, "worker-0"))
    chosen = deployment.settings(**addresses, **keys_of(keyring, "client"), client__drain_timeout_ms=0)
    async with Client(chosen) as client:
        witness = Witness(client)
        before = peak_mib(processor.pid)
        for at, kind in ATTACKS:
            await soon(asyncio.to_thread(_attack, addresses[f"bus__{at}_address"], at, keyring, kind))
        await asyncio.to_thread(processor.wait_for, "cut off: ")
        await witness.noticed_nothing()
    assert peak_mib(processor.pid) - before < _MORE_MIB
    assert processor.is_running

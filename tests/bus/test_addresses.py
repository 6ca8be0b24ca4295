"""ZeroMQ: which addresses may be had, and what becomes of the files that sockets leave."""

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bus.harness import SETTINGS, Bus, introduce
from tests.support.waiting import soon
from tokenbus.bus import AddressError

Make = Callable[..., Bus]
INSECURE = replace(SETTINGS, insecure=True)


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def path_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))


async def test_stale_socket_file(ipc: Bus) -> None:
    address = ipc.address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path_of(address)))
        dead.listen()
    assert path_of(address).is_socket()
    listener = await ipc.listen(address)
    await introduce(await ipc.connect(address), listener)


async def test_socket_of_a_stranger(ipc: Bus) -> None:
    address = ipc.address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path_of(address)))
        other.listen()
        with pytest.raises(AddressError, match="taken: something listens there already"):
            await ipc.transport.listen(address)
        assert path_of(address).is_socket()


async def test_file_that_is_no_socket(ipc: Bus) -> None:
    for make in (Path.touch, Path.mkdir):
        address = ipc.address()
        make(path_of(address))
        with pytest.raises(AddressError, match="a file that is not a socket"):
            await ipc.transport.listen(address)
        assert path_of(address).exists()


async def test_files_of_a_closed_listener(ipc: Bus, tmp_path: Path) -> None:
    listener = await ipc.listen()
    with pytest.raises(AddressError):
        await ipc.transport.listen(listener.address)
    await soon(listener.close())
    with pytest.raises(AddressError):
        await ipc.transport.listen(f"ipc://{tmp_path}/missing/more/x")
    assert not files_in(tmp_path)


async def test_files_are_this_users_alone(ipc: Bus, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        await ipc.listen(f"ipc://{tmp_path}/made/x")
    finally:
        os.umask(umask)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "made", *(tmp_path / "made").iterdir())
    }
    assert modes == {"made": 0o700, "x": 0o600, "x.lock": 0o600}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
async def test_folder_that_others_can_write_to(ipc: Bus, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(AddressError, match=f"a folder that others cannot write to, got mode {mode:04o}$"):
        await ipc.transport.listen(f"ipc://{folder}/x")
    assert not files_in(folder)
    folder.chmod(mode | stat.S_ISVTX)
    await ipc.listen(f"ipc://{folder}/x")


async def test_lock_that_is_a_link(ipc: Bus, tmp_path: Path) -> None:
    address = ipc.address()
    path_of(f"{address}.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(AddressError):
        await ipc.transport.listen(address)
    assert not (tmp_path / "victim").exists()


async def test_file_that_is_removed_or_replaced(make: Callable[..., Bus]) -> None:
    """A listener knows when connections cannot find it any more; one at a port always can be found."""
    bus = make("zeromq-ipc")
    listener = await bus.listen()
    assert listener.is_reachable()
    path_of(listener.address).unlink()
    assert not listener.is_reachable()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path_of(listener.address)))
        assert not listener.is_reachable()
    assert (await make("zeromq-tcp").listen()).is_reachable()


async def test_files_that_are_another_s_by_now(ipc: Bus) -> None:
    address = ipc.address()
    first = await ipc.listen(address)
    path_of(address).unlink()
    path_of(f"{address}.lock").unlink()
    second = await ipc.listen(address)
    await soon(first.close())
    connection = await ipc.connect(address)
    await introduce(connection, second)
    with pytest.raises(AddressError, match="taken"):
        await ipc.transport.listen(address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "a port of at most 65535, got 65536"),
        ("tcp://:5570", "expected tcp://HOST:PORT"),
        ("tcp://a b:5570", "expected tcp://HOST:PORT"),
        ("tcp://lo;127.0.0.1:5570", "expected tcp://HOST:PORT"),
        ("ipc://", "expected ipc://PATH"),
        ("ipc://*", "expected ipc://PATH"),
        ("ipc://@abstract", "expected ipc://PATH"),
        ("ipc:///tmp/\0", "expected ipc://PATH"),
        ("ipc:///tmp/" + "x" * 103, "a path of at most 107 bytes, got 108"),
    ],
)
async def test_address_that_is_none(tcp: Bus, address: str, reason: str) -> None:
    for use in (tcp.transport.listen, tcp.transport.connect):
        with pytest.raises(AddressError) as refused:
            await use(address)
        assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://192.0.2.1:0", "no address of this machine"),  # a network that is kept for examples
        ("tcp://host.invalid:0", "no such host here: "),
        ("ipc:///proc/nonexistent/x", "no such directory"),
        ("ipc:///dev/null/x", "no such directory"),
    ],
)
async def test_address_that_is_elsewhere(make: Make, address: str, reason: str) -> None:
    tcp = make("zeromq-tcp", INSECURE)
    with pytest.raises(AddressError) as refused:
        await soon(tcp.transport.listen(address))
    assert refused.value.reason.startswith(reason)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://localhost:0", "tcp://*:0"])
async def test_port_that_is_left_open(make: Make, address: str) -> None:
    """A listener knows which port it was given, and hosts may be names; connecting to an open port is an error."""
    tcp = make("zeromq-tcp", INSECURE)
    listener = await tcp.listen(address)
    port = int(listener.address.rpartition(":")[2])
    assert port > 0
    await introduce(await tcp.connect(f"tcp://localhost:{port}"), listener)
    with pytest.raises(AddressError):
        await tcp.transport.connect(address if "*:" in address else "tcp://127.0.0.1:0")

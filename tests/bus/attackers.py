"""Peers that speak ZMTP by hand, and so send what no library would; and a process that listens, to be attacked."""

import asyncio
import json
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.support.waiting import MOST, soon
from tokenbus.backports import timeout
from tokenbus.settings import BusSettings

T = TypeVar("T")
_Peer = TypeVar("_Peer", bound="RawPeer")
MIB = 1_048_576
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0")
_MORE, _LARGE = 1, 2
_MUCH = 2**32


def metadata(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


class RawPeer:
    """A DEALER in name, on a plain socket; what it sends goes out as it is."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        scheme, _, where = address.partition("://")
        if scheme == "ipc":
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(MOST)
            self.socket.connect(where)
        else:
            host, _, port = where.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), MOST)
        try:
            self._shake_hands(identity)
        except BaseException:
            self.socket.close()
            raise

    def _shake_hands(self, identity: bytes) -> None:
        self.socket.sendall(_GREETING)
        self._read(64)
        ready = b"\5READY" + metadata(b"Socket-Type", b"DEALER") + metadata(b"Identity", identity)
        self.socket.sendall(struct.pack(">BQ", 6, len(ready)) + ready)
        assert self._read(2)[0] == 4, "no short command followed the greeting"

    def __enter__(self: _Peer) -> _Peer:  # noqa: PYI019 - Python 3.10 has no Self
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise ConnectionResetError("the other side has ended it")
            data += chunk
        return data

    def part(self, body: bytes, *, more: bool = False) -> None:
        self.socket.sendall(struct.pack(">BQ", _LARGE | (_MORE if more else 0), len(body)) + body)

    def wait_for_end(self) -> None:
        try:
            while self.socket.recv(MIB):
                pass
        except ConnectionError:
            pass


def send_without_end(address: str, part: bytes = bytes(MIB), *, hello: bool = False, pause: float = 0) -> int:
    sent = 0
    try:
        with RawPeer(address) as peer:
            if hello:
                peer.part(b"hello")
            while sent < _MUCH:
                peer.part(part, more=True)
                sent += len(part)
                time.sleep(pause)
    except ConnectionError:
        pass
    return sent


async def in_thread(what: Callable[..., T], *arguments: object, **options: object) -> T:
    with ThreadPoolExecutor(1) as one:  # the loop's own executor has a few threads, and they would take turns
        return await asyncio.get_running_loop().run_in_executor(one, partial(what, *arguments, **options))


_VICTIM = """
import asyncio, gc, json, os, resource, sys
from tokenbus.bus import ZeroMQTransport
from tokenbus.settings import BusSettings

async def main():
    address, files = sys.argv[1], int(sys.argv[3])
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    settings = BusSettings(**json.loads(sys.argv[2]))
    transport = ZeroMQTransport(settings)
    listener = await transport.listen(address, lambda reason: print(reason, flush=True))
    print(listener.address, flush=True)
    files = []
    def open_files():
        try:
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            print("files are open", flush=True)
    def close_files():
        while files:
            os.close(files.pop())
        print("files are closed", flush=True)
    def command():
        {b"open": open_files, b"close": close_files}[os.read(0, 100).split()[0]]()
    asyncio.get_running_loop().add_reader(0, command)
    while True:
        peer, parts = await listener.receive()
        if parts == [b"hello"]:
            listener.admit(peer)
        if parts == [b"leave"]:
            listener.disconnect(peer)
        listener.send(peer, parts)

asyncio.run(main())
"""


class Victim:
    """A process that listens, admits each peer that says hello, sends everything back, and prints whom it refused."""

    def __init__(self, settings: BusSettings, address: str = "tcp://127.0.0.1:0", open_files: int = 0) -> None:
        self._arguments = [address, json.dumps(asdict(settings)), str(open_files)]
        self.address = ""
        self.refusals: list[str] = []

    async def __aenter__(self) -> "Victim":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _VICTIM, *self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.address = (await soon(self._process.stdout.readline())).decode().strip()
        self._base = self._status("VmRSS")
        self._refused = asyncio.Event()
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        async for line in stdout:
            self.refusals.append(line.decode().strip())
            self._refused.set()

    def tell(self, command: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command)

    async def refused(self, pattern: str) -> str:
        async with timeout(MOST):
            while True:
                for line in self.refusals:
                    if re.search(pattern, line):
                        return line
                self._refused.clear()
                await self._refused.wait()

    @property
    def growth(self) -> int:
        return self._status("VmHWM") - self._base

    @property
    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self._process.pid}/fd").iterdir())

    def _status(self, key: str) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"{key}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

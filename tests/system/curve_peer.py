"""A peer that speaks CurveZMQ by hand, and so sends under an allowed key what no library would.

libzmq sends nothing of a message before its last part is there. RFC 26 has the commands.
"""

import ctypes
import secrets
import struct
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from tests.bus.attackers import RawPeer, metadata
from tests.bus.keyed import LISTENER, Keyring

_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE".ljust(64, b"\0")
_COMMAND, _MORE, _LARGE = 4, 1, 2
_MAC = 16


def _sodium() -> ctypes.CDLL:
    zmq.Context.instance()
    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return ctypes.CDLL(next(path for path in mapped if "libsodium" in path))


class _Box:
    """NaCl's box between two keys; both sides use the same shared key."""

    def __init__(self, public: bytes, secret: bytes) -> None:
        self._sodium = _sodium()
        self._key = ctypes.create_string_buffer(32)
        assert not self._sodium.crypto_box_beforenm(self._key, public, secret)

    def seal(self, plain: bytes, nonce: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(plain) + _MAC)
        assert not self._sodium.crypto_box_easy_afternm(out, plain, ctypes.c_ulonglong(len(plain)), nonce, self._key)
        return out.raw

    def open(self, sealed: bytes, nonce: bytes) -> bytes:
        out = ctypes.create_string_buffer(len(sealed) - _MAC)
        size = ctypes.c_ulonglong(len(sealed))
        assert not self._sodium.crypto_box_open_easy_afternm(out, sealed, size, nonce, self._key), "a forged box"
        return out.raw


class CurvePeer(RawPeer):
    """A DEALER in name that proves one of a keyring's keys, on a plain socket."""

    def __init__(self, address: str, keyring: Keyring, name: str) -> None:
        public, secret = zmq.auth.load_certificate(keyring.folder / f"{name}.key_secret")
        assert secret is not None
        self._public, self._secret = z85.decode(public), z85.decode(secret)
        self._server = z85.decode(keyring.public(LISTENER).encode())
        self._nonce = 0
        super().__init__(address)

    def _shake_hands(self, identity: bytes) -> None:
        own = [z85.decode(key) for key in zmq.curve_keypair()]  # of this connection alone
        self.socket.sendall(_GREETING)
        self._read(64)
        hello = self._short_nonce()
        signature = _Box(self._server, own[1]).seal(bytes(64), b"CurveZMQHELLO---" + hello)
        self._frame(b"\5HELLO\1\0" + bytes(72) + own[0] + hello + signature, _COMMAND)
        welcome = self._body()
        assert welcome.startswith(b"\7WELCOME"), welcome
        opened = _Box(self._server, own[1]).open(welcome[24:], b"WELCOME-" + welcome[8:24])
        there, cookie = opened[:32], opened[32:]
        self._box = _Box(there, own[1])
        proof, initiate = secrets.token_bytes(16), self._short_nonce()
        vouch = _Box(there, self._secret).seal(own[0] + self._server, b"VOUCH---" + proof)
        said = metadata(b"Socket-Type", b"DEALER") + metadata(b"Identity", identity)
        sealed = self._box.seal(self._public + proof + vouch + said, b"CurveZMQINITIATE" + initiate)
        self._frame(b"\x08INITIATE" + cookie + initiate + sealed, _COMMAND)
        assert self._body().startswith(b"\5READY")

    def part(self, body: bytes, *, more: bool = False) -> None:
        nonce = self._short_nonce()
        sealed = self._box.seal(bytes([_MORE if more else 0]) + body, b"CurveZMQMESSAGEC" + nonce)
        self._frame(b"\7MESSAGE" + nonce + sealed, 0)

    def begin_part(self, size: int) -> None:
        self.socket.sendall(struct.pack(">BQ", _LARGE, size))

    def receive(self) -> bytes:
        body = self._body()
        assert body.startswith(b"\7MESSAGE"), body
        return self._box.open(body[16:], b"CurveZMQMESSAGES" + body[8:16])[1:]

    def _short_nonce(self) -> bytes:
        self._nonce += 1
        return self._nonce.to_bytes(8, "big")

    def _frame(self, body: bytes, flags: int) -> None:
        self.socket.sendall(struct.pack(">BQ", flags | _LARGE, len(body)) + body)

    def _body(self) -> bytes:
        kind = ">Q" if self._read(1)[0] & _LARGE else ">B"
        (size,) = struct.unpack(kind, self._read(struct.calcsize(kind)))
        return self._read(size)

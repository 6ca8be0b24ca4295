"""NKEYs and the JWTs that are signed with them, as NATS's own tools make them."""

import base64
import binascii
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PREFIXES = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED = 18 << 3


class Nkey:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._key = Ed25519PrivateKey.generate()
        prefix = _PREFIXES[kind]
        self.seed = _encoded(bytes([_SEED | prefix >> 5, (prefix & 31) << 3]) + self._key.private_bytes_raw())
        self.public = _encoded(bytes([prefix]) + self._key.public_key().public_bytes_raw())

    def jwt(self, subject: "Nkey", **claims: object) -> str:
        body = {
            "jti": subject.public,
            "iat": 1,
            "iss": self.public,
            "name": subject.kind,
            "sub": subject.public,
            "nats": {"type": subject.kind, "version": 2, **claims},
        }
        text = ".".join(_text(part) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        signature = base64.urlsafe_b64encode(self._key.sign(text.encode())).decode().rstrip("=")
        return f"{text}.{signature}"


def write_credentials(path: Path, jwt: str, seed: str) -> str:
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\nKeep it secret.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    path.chmod(0o600)
    return str(path)


def _encoded(data: bytes) -> str:
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")


def _text(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")

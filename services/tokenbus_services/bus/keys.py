"""CURVE keys: a process's own, in the files that pyzmq reads and writes, and the public keys of others."""

import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq.auth
from zmq.utils import z85

from tokenbus_services.settings import SettingsError

KEY_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a key may be called; files are named after it."""
_Z85_LENGTH = 40
_FOLDER_MODE, _SECRET_MODE, _PUBLIC_MODE = 0o700, 0o600, 0o644
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process's own key; both halves in Z85, as ZeroMQ writes them."""

    public: bytes
    secret: bytes = field(repr=False)


def load_key(path: str) -> KeyPair:
    """Return the key in a file that no other user may read, or raise a SettingsError for `bus.key_file`."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError("bus.key_file", f"a key file that can be read: {_reason(error)}", path) from None
    if mode & _OTHERS:
        limit = f"a file that only its owner may read (chmod 600), mode {_SECRET_MODE:04o}"
        raise SettingsError("bus.key_file", limit, f"{path} of mode {mode:04o}")
    if secret is None or not (is_key(public) and is_key(secret)):
        raise SettingsError("bus.key_file", "a file with a secret key, as `tokenbus keygen` writes it", path)
    return KeyPair(public, secret)


def public_key(given: str) -> bytes:
    """Return a public key in Z85 from its text or from the path of a certificate; a ValueError says what is wrong."""
    path = Path(given)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # too long for a path, or none
        is_file = False
    if is_file:
        try:
            public, _ = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"a public certificate that can be read: {_reason(error)}") from None
    else:
        public = given.encode()
    if not is_key(public):
        raise ValueError(f"a public key of {_Z85_LENGTH} characters, or the path of a public certificate")
    return public


def create_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new key's two files, NAME.key and NAME.key_secret, and return their paths; an OSError says why not.

    A folder that is not there is made, for its owner alone. Neither file replaces another.
    """
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    # Written apart, so that the secret is never in a file that others may open.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as apart:
        made = [Path(path) for path in zmq.auth.create_certificates(apart, name, {"name": name})]
        made[0].chmod(_PUBLIC_MODE)
        made[1].chmod(_SECRET_MODE)
        os.link(made[1], secret)
        try:
            os.link(made[0], public)
        except OSError:
            secret.unlink()
            raise
    return public, secret


def is_key(text: bytes) -> bool:
    """Return whether a text is a key in Z85."""
    try:
        return len(text) == _Z85_LENGTH and len(z85.decode(text)) == KEY_BYTES
    except (ValueError, KeyError):
        return False


def _reason(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return "no such file" if "Invalid certificate file" in reason else reason.lower()

"""Login: the credentials of this process for a NATS server."""

import base64
import binascii
import ssl
from pathlib import Path
from typing import Any

from tokenbus.bus.keys import check_private
from tokenbus.bus.watched_files import WatchedFiles
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.printable import reason_of
from tokenbus.settings import DurableLogSettings, SettingsError

_log = logger("log")
_KEY = "durable_log.credentials"
_FORMS = "a .creds file, or one line: USER:PASSWORD, a token, or an NKEY's seed"
_MOST_BYTES = 65_536
_JWT, _SEED = "-----BEGIN NATS USER JWT-----", "-----BEGIN USER NKEY SEED-----"
_USER_SEED, _USER = b"\x95\x00", b"\xa0"
"""First bytes of an NKEY user seed, and first byte of its public key.

Only the upper five bits of the seed's second byte are fixed.
"""
_SEED_BYTES = 36


class Login:
    """Credentials and TLS settings from files, which are reloaded when they change."""

    def __init__(self, settings: DurableLogSettings, *, is_tls: bool) -> None:
        """Read the files; raises SettingsError for an invalid file."""
        self.is_tls = is_tls
        self._settings = settings
        names = settings.credentials, settings.ca_file, settings.certificate
        self._files = WatchedFiles([Path(name) for name in names if name])
        self._repeated_log = DeduplicatedLog()
        self.options: dict[str, Any] = {}
        """Arguments for `connect` of nats-py."""
        self.public_nkey: str | None = None
        if settings.credentials:
            self._take(settings.credentials, _read(settings.credentials))
        if is_tls or settings.ca_file:
            try:
                self.options["tls"] = ssl.create_default_context(cafile=settings.ca_file or None)
            except OSError as error:
                limit = f"a readable file of certificates: {reason_of(error)}"
                raise SettingsError("durable_log.ca_file", limit, settings.ca_file) from None
            if settings.certificate:
                self._load_certificate(settings)

    def refresh(self) -> None:
        """Reload changed files; if a file is invalid, the previous credentials stay in use."""
        try:
            self._files.refresh(self._read_again)
        except SettingsError as error:
            reason = str(error)
            self._repeated_log.begin(
                reason, _log.warning, "nats credentials cannot be read: the last good ones stay", reason=reason
            )

    def _read_again(self) -> None:
        found = Login(self._settings, is_tls=self.is_tls)
        self.options, self.public_nkey = found.options, found.public_nkey

    def _load_certificate(self, settings: DurableLogSettings) -> None:
        check_private("durable_log.certificate", settings.certificate)
        try:
            # Without a password callback, Python would prompt for a password on the terminal.
            self.options["tls"].load_cert_chain(settings.certificate, password=lambda: b"")
        except OSError as error:  # ssl.SSLError is a subclass of OSError
            reason = str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")
            limit = f"a PEM certificate and its unencrypted key: {reason}"
            raise SettingsError("durable_log.certificate", limit, settings.certificate) from None

    def _take(self, path: str, text: str) -> None:
        lines = text.split("\n")
        if _JWT in lines and _SEED in lines:
            jwt, seed = (lines[lines.index(mark) + 1 : lines.index(mark) + 2] for mark in (_JWT, _SEED))
            self.options["user_jwt_cb"] = lambda: bytearray("".join(jwt).encode())
            self._sign_with(path, "".join(seed))
        elif len(lines) > 1 or not text or not text.isprintable():
            raise SettingsError(_KEY, _FORMS, path)
        elif ":" in text:
            self.options["user"], _, self.options["password"] = text.partition(":")
        elif text.startswith("SU"):
            self.public_nkey = self._sign_with(path, text)
        else:
            self.options["token"] = text

    def _sign_with(self, path: str, seed: str) -> str:
        """Sign the server's challenges with a seed, and return the public key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415 - only for NKEYs

        try:
            raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
        except ValueError:
            raw = b""
        is_intact = raw[-2:] == binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little")
        if len(raw) != _SEED_BYTES or not is_intact or (raw[0], raw[1] & 0xF8) != tuple(_USER_SEED):
            raise SettingsError(_KEY, "a user's NKEY seed, which begins with SU", path)
        key = Ed25519PrivateKey.from_private_bytes(raw[2:-2])
        self.options["signature_cb"] = lambda nonce: base64.b64encode(key.sign(nonce.encode()))
        public = _USER + key.public_key().public_bytes_raw()
        return base64.b32encode(public + binascii.crc_hqx(public, 0).to_bytes(2, "little")).decode().rstrip("=")


def _read(path: str) -> str:
    check_private(_KEY, path)
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_BYTES).decode().strip().replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise SettingsError(_KEY, f"a readable file: {reason}", path) from None

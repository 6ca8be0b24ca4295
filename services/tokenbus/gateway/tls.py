"""TLS: the server's certificate, which may be renewed while the gateway runs."""

import ssl
from pathlib import Path

from tokenbus.bus.watched_files import WatchedFiles
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import GatewaySettings, SettingsError
from tokenbus.settings.errors import Shown

_log = logger("gateway")


class Certificate:
    """A certificate and its key in files. Open connections keep the certificate with which they began."""

    def __init__(self, settings: GatewaySettings, repeated_log: DeduplicatedLog) -> None:
        self._settings = settings
        self.files = WatchedFiles([Path(settings.tls_certificate), Path(settings.tls_key)])
        self._repeated_log = repeated_log
        self.context = _context()
        try:
            self._load()
        except OSError as error:  # OSError includes ssl.SSLError
            reason = f"{settings.tls_certificate} and {settings.tls_key}: {_reason(error)}"
            raise SettingsError("gateway.tls_certificate", f"a certificate and its key: {reason}", Shown("")) from None

    def refresh(self) -> None:
        try:
            if self.files.refresh(self._load):
                _log.info("certificate read", file=self._settings.tls_certificate)
        except OSError as error:
            reason = _reason(error)
            self._repeated_log.begin(reason, _log.error, "the certificate cannot be read", reason=reason)

    def _load(self) -> None:
        files = self._settings.tls_certificate, self._settings.tls_key
        # Try the files in a new context first, because a failure would leave a context useless.
        for context in (_context(), self.context):
            context.load_cert_chain(*files, password=lambda: "")  # else OpenSSL prompts for a password


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _reason(error: OSError) -> str:
    return (getattr(error, "reason", None) or error.strerror or str(error)).lower().replace("_", " ")

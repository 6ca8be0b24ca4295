"""The transport over NATS core: a listener and its connections meet at subjects, and each connection has its own.

A connection draws a random id, and says hello with it at `tokenbus.NAME.up.ROLES.PEER.hello`. Then it speaks at
`tokenbus.NAME.up.ROLES.PEER.ID`, and its listener answers at `tokenbus.NAME.down.PEER.ID`. So the server's permissions
say who may speak as which peer, with which roles. A listener holds its NAME at `tokenbus.NAME.listener`. One whose name
is `GROUP.MEMBER` announces itself at `tokenbus.GROUP.MEMBER.here`, so that those who look for any of its group find it.
"""

from collections.abc import Callable

from tokenbus_services.bus.addresses import NatsEndpoint, TcpEndpoint, parse_nats
from tokenbus_services.bus.errors import AddressError
from tokenbus_services.bus.nats_connection import NatsConnection
from tokenbus_services.bus.nats_directory import NatsDirectory
from tokenbus_services.bus.nats_listener import NatsListener
from tokenbus_services.bus.nats_login import Login
from tokenbus_services.bus.nats_peers import PeerBounds
from tokenbus_services.bus.nats_server import Servers
from tokenbus_services.bus.transport import ignore, ignore_loss
from tokenbus_services.settings import BusSettings


class NatsTransport:
    """Listens and connects at `nats://HOST:PORT/NAME` and `tls://HOST:PORT/NAME`."""

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._bounds = PeerBounds(settings)
        self._logins: dict[bool, Login] = {}
        """What this process proves, by whether it wants TLS: a file that is away later ends nothing."""
        self._failed: dict[TcpEndpoint, float] = {}

    async def listen(self, address: str, refused: Callable[[str], None] = ignore) -> NatsListener:
        """Listen under a name; raises AddressError where it is taken, or no server answers."""
        servers = self._servers(self._one(address))
        listener = NatsListener(address, servers, self._settings, self._bounds, refused)
        try:
            await listener.claim()
        except BaseException:
            await listener.close()
            raise
        return listener

    async def connect(
        self, address: str, server_key: bytes | None = None, lost: Callable[[], None] = ignore_loss
    ) -> NatsConnection:
        """Connect to a name; the key is ignored: what is proved is proved to the server."""
        del server_key
        return NatsConnection(address, self._servers(self._one(address)), self._settings, lost)

    def directory(self, address: str, changed: Callable[[], None]) -> NatsDirectory:
        """Return the listeners that announce themselves in the group of an address, which ends with `.*`."""
        return NatsDirectory(address, self._servers(self.endpoint(address)), self._settings, changed)

    def _servers(self, endpoint: NatsEndpoint) -> Servers:
        login = self._logins.get(endpoint.is_tls)
        if login is None:
            login = self._logins[endpoint.is_tls] = Login(endpoint, self._settings)
        return Servers(endpoint, self._settings, login, self._failed)

    def _one(self, address: str) -> NatsEndpoint:
        endpoint = self.endpoint(address)
        if endpoint.is_group:
            raise AddressError(address, "it names no listener, but any whose name begins so")
        return endpoint

    def endpoint(self, address: str) -> NatsEndpoint:
        """Return an address's endpoint; raises AddressError for one that is not safe enough to be used."""
        endpoint = parse_nats(address)
        is_near = all(server.is_loopback for server in endpoint.servers)
        is_safe = endpoint.is_tls and (self._settings.nats_credentials or self._settings.nats_certificate)
        if not (is_near or is_safe or self._settings.insecure):
            reason = (
                "beyond loopback it needs tls:// and bus.nats_credentials or bus.nats_certificate, "
                "unless bus.insecure is true"
            )
            raise AddressError(address, reason)
        return endpoint

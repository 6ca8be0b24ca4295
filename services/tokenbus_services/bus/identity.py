"""Who is at the other end of a connection, as far as its transport has proved it."""

from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase


class Role(StrEnum):
    """What a peer may be allowed to do."""

    WORKER = "worker"
    """Publish streams under the worker ids that it may use."""
    CLIENT = "client"
    """Ask for requests, under the client names that it may use."""
    OBSERVER = "observer"
    """Watch workers' streams."""
    HANDOFF = "handoff"
    """Hand requests off to decode workers."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A key's owner: its name in the allow-list, its roles, and the worker ids or client names that it may use."""

    name: str
    roles: frozenset[Role]
    names: tuple[str, ...] = field(default=("*",))
    """Patterns as a shell has them: `worker-*`."""

    def may(self, role: Role, name: str | None = None) -> bool:
        """Tell whether it has a role, and may use a name in it."""
        return role in self.roles and (name is None or any(fnmatchcase(name, pattern) for pattern in self.names))


ANONYMOUS = Identity("", frozenset(Role))
"""A peer of a transport that proves nothing: on loopback, in a folder of ours, or in this process. It may do anything
that is not another peer's."""

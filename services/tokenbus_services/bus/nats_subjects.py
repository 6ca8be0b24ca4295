"""The NATS subjects of the bus.

NAME is a listener's name, and GROUP.MEMBER is the name of one that belongs to a group. A peer is ROLES.PEER.ID: what it
may do, its NATS user or `-`, and an id that it draws at random.

| subject | what is published there |
|---|---|
| `tokenbus.NAME.up.ROLES.PEER.hello` | a peer's first frame, OPEN, with its id |
| `tokenbus.NAME.up.ROLES.PEER.ID` | the peer's further frames |
| `tokenbus.NAME.down.PEER.ID` | the listener's frames to that peer |
| `tokenbus.NAME.listener` | the question of a listener that claims the name: does another one have it? |
| `tokenbus.NAME.listener.ID` | the answer to the listener with that id |
| `tokenbus.GROUP.who` | the question which listeners of a group are there |
| `tokenbus.GROUP.MEMBER.here` | the answer of one of them: how many peers it has, or nothing when it leaves |
"""

import re

ANYBODY, ALL_ROLES = "-", "all"
"""The name of a peer that has none, and the roles of one that did not choose."""
_HELLO = "hello"
_HERE = re.compile(r"tokenbus\.[A-Za-z0-9_-]+\.(?P<member>[A-Za-z0-9][A-Za-z0-9_-]{0,63})\.here")


class Subjects:
    """The subjects of a listener, by its name, and of its group; a group of no name: it belongs to none."""

    def __init__(self, name: str, group: str) -> None:
        self._base, self._group = f"tokenbus.{name}", f"tokenbus.{group}"
        self._up = f"{self._base}.up."
        self.claim = f"{self._base}.listener"
        self.here = f"{self._base}.here"
        self.who = f"{self._group}.who"
        self.any_here = f"{self._group}.*.here"

    def answer_to(self, listener: str) -> str:
        """Return where a listener hears that another one has its name."""
        return f"{self.claim}.{listener}"

    def up(self, peer: str) -> str:
        """Return where a peer's frames are heard."""
        return self._up + peer

    def down(self, peer: str) -> str:
        """Return where a peer hears frames: its roles are not in that subject."""
        return f"{self._base}.down.{peer.partition('.')[2]}"

    def hello(self, roles: str = "*", name: str = "*") -> str:
        """Return where peers with these roles and this name say hello."""
        return f"{self._up}{roles}.{name}.{_HELLO}"

    def peer_in(self, subject: str) -> str:
        """Return the peer in a subject where peers speak; of a hello, all but its id, which the frame has."""
        return subject[len(self._up) :].removesuffix(_HELLO)


def member_in(subject: str) -> str | None:
    """Return the member of a group that says that it is here."""
    found = _HERE.fullmatch(subject)
    return None if found is None else found["member"]

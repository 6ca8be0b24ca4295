"""How many connections the operating system lets this process have: each is an open file."""

import resource

from tokenbus_services.logs import logger

_log = logger("gateway")
_OTHERS = 128
"""What is open beside connections: the bus, the metrics, files."""


def room_for(connections: int) -> int:
    """Raise the process's own limit as far as it must and may be; return for how many of the connections there is room.

    Without room a connection cannot even be refused: it waits, and all that is accepted fails, thousands a second.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if _is_below(soft, wanted):
        soft = min(wanted, hard) if _is_below(hard, wanted) else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not _is_below(soft, wanted):
        return connections
    room = max(1, soft - _OTHERS)
    _log.warning("fewer connections than gateway.max_connections", room=room, wanted=connections, open_files=soft)
    return room


def _is_below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted

"""How many files the operating system lets this process have open: each connection is one."""

import resource
from collections.abc import Callable
from functools import partial

from tokenbus_services.logs import logger
from tokenbus_services.settings import Settings

_log = logger("service")
_OTHERS = 128
"""What is open beside connections: the metrics, logs, dead letters, weights."""


def open_files_for(settings: Settings) -> Callable[[], None]:
    """Raise the process's own limit to what a service may need by its settings, as far as it may.

    What is returned logs the limit: a service calls it once it runs, so that one that cannot says only why.
    """
    # A connection of the bus takes two: libzmq's, and the one by which it is looked at.
    wanted = 2 * settings.bus.max_connections + settings.gateway.max_connections + _OTHERS
    soft = _raised_to(wanted)
    return partial(_log.info, "open files", limit=soft, wanted=wanted)


def room_for(connections: int) -> int:
    """Raise the process's own limit as far as it must and may be; return for how many of the connections there is room.

    Without room a connection cannot even be refused: it waits, and all that is accepted fails, thousands a second.
    """
    wanted = connections + _OTHERS
    soft = _raised_to(wanted)
    if not _is_below(soft, wanted):
        return connections
    room = max(1, soft - _OTHERS)
    _log.warning("fewer connections than gateway.max_connections", room=room, wanted=connections, open_files=soft)
    return room


def _raised_to(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, wanted):
        soft = min(wanted, hard) if _is_below(hard, wanted) else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _is_below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted

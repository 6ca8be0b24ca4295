"""Raises the limit of open files (ulimit) at the start of a service."""

import resource
from collections.abc import Callable
from functools import partial

from tokenbus.logs import logger
from tokenbus.settings import Settings

_log = logger("service")
_OTHERS = 128
"""Files other than connections: metrics, logs, weights."""


def open_files_for(settings: Settings) -> Callable[[], None]:
    """Raise the limit for the settings, as far as the system allows; return a function that logs the result.

    A service calls that function once it is running, so that a failed start logs only the reason.
    """
    # A connection of the bus needs two descriptors: libzmq's, and the duplicate through which the bus limits it.
    wanted = 2 * settings.most_connections + settings.gateway.most_connections + _OTHERS
    soft = _raised_to(wanted)
    return partial(_log.info, "open files", limit=soft, wanted=wanted)


def room_for(connections: int) -> int:
    """Raise the limit, as far as the system allows; return the number of connections that it is enough for.

    Beyond that number a connection cannot even be refused, and `accept` fails thousands of times a second.
    """
    wanted = connections + _OTHERS
    soft = _raised_to(wanted)
    if not _is_below(soft, wanted):
        return connections
    room = max(1, soft - _OTHERS)
    _log.warning("fewer connections than the gateway allows", room=room, wanted=connections, open_files=soft)
    return room


def _raised_to(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, wanted):
        soft = min(wanted, hard) if _is_below(hard, wanted) else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _is_below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted

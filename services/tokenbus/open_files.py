"""Raises the limit on open files (ulimit) when a service starts."""

import resource
from collections.abc import Callable
from functools import partial

from tokenbus.logs import logger
from tokenbus.settings import Settings

_log = logger("service")
_OTHERS = 128
"""Number of open files that are not connections, such as logs and weights."""


def open_files_for(settings: Settings) -> Callable[[], None]:
    """Raise the limit as far as the settings need and the system allows. Return a function that logs the result.

    A service calls the returned function when it has started, so that a failed start logs only the reason.
    """
    # A bus connection needs two file descriptors: one of libzmq, and a duplicate through which the bus sets limits.
    wanted = 2 * settings.most_connections + settings.gateway.most_connections + _OTHERS
    soft = _raised_to(wanted)
    return partial(_log.info, "open files", limit=soft, wanted=wanted)


def room_for(connections: int) -> int:
    """Raise the limit as far as `connections` need and the system allows. Return the number of possible connections.

    Further connections could not even be refused, and `accept` would fail thousands of times a second.
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

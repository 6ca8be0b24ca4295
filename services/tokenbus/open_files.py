"""The limit of open files (ulimit), which a service raises at its start for its connections."""

import resource
from collections.abc import Callable
from functools import partial

from tokenbus.logs import logger
from tokenbus.settings import Settings

_log = logger("service")
_OTHERS = 128
"""Files beside connections: metrics, logs, weights."""


def open_files_for(settings: Settings) -> Callable[[], None]:
    """Raise this process's limit as far as its settings need and the system allows; return a function that logs it.

    A service calls that function once it runs, so that one that cannot start logs only the reason.
    """
    # A connection of the bus takes two: libzmq's, and the duplicate by which it is bounded.
    wanted = 2 * settings.most_connections + settings.gateway.most_connections + _OTHERS
    soft = _raised_to(wanted)
    return partial(_log.info, "open files", limit=soft, wanted=wanted)


def room_for(connections: int) -> int:
    """Raise this process's limit for so many connections, as far as the system allows; return how many have room.

    One more could not even be refused: it would wait, while accepting fails thousands of times a second.
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

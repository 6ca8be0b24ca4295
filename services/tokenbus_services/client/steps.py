"""What `Client.steps` iterates over: the rows of each step as columns, and the ends of requests."""

from typing import NamedTuple

from tokenbus_contracts import LogprobBatch, RowStatus
from tokenbus_services.delivery import RequestFailedError


class StepRows(NamedTuple):
    """A client's rows of one step, as columns: an item of `Client.steps`.

    Each row and each token comes once, in the order in which its request had it. Compare `isinstance(item, StepRows)`,
    or match as in the example of `Client.steps`.

    Example:
        assert tokenbus.StepRows._fields == ("target", "draft")
    """

    target: LogprobBatch
    """The tokens that were accepted."""
    draft: LogprobBatch | None
    """What the draft model proposed for the same step, where a request asked for that; else None."""


class RequestEnd(NamedTuple):
    """How one request ended: an item of `Client.steps`, after the request's last rows.

    Example:
        end = tokenbus.RequestEnd(request_id=7, status=tokenbus.RowStatus.FINISHED_STOP, error=None)
        assert end.error is None
    """

    request_id: int
    """The request."""
    status: RowStatus | None
    """The status of its last row; None: it ended with an error."""
    error: RequestFailedError | None
    """The error that it ended with, and how many tokens came before; None: it has a status."""
    stop: int | str | None = None
    """The stop token or the stop text that ended it, as `Generation.stop`."""

"""How a worker that was told to stop ends: its requests go on as long as there is time, and no new one is taken."""

from collections.abc import Callable

from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_services.logs import logger
from tokenbus_services.worker.engine import Engine
from tokenbus_services.worker.errors import NotRunningError, RetentionFullError
from tokenbus_services.worker.publisher import Publisher
from tokenbus_services.worker.service import compute

_log = logger("worker")


def finish(publisher: Publisher, engine: Engine, seconds: float, now: Callable[[], float]) -> None:
    """Compute and publish steps until the engine has nothing left, for at most so many seconds.

    Requests that come now end with an error that says why; what the engine has not finished in time ends when the
    publisher leaves.
    """
    deadline = now() + seconds
    try:
        _refuse_new(publisher, engine)
        while engine.has_work and now() < deadline:
            compute(publisher, engine)
            _refuse_new(publisher, engine)
    except NotRunningError:
        return


def _refuse_new(publisher: Publisher, engine: Engine) -> None:
    for request in publisher.take_requests():
        if not isinstance(request, Generate):
            engine.abort(request.request_key)
            continue
        try:
            publisher.failed_request(request.request_key, ErrorCode.ERROR_CODE_OVERLOADED, "the worker is stopping")
        except RetentionFullError:
            # The request is named in the gap that this left, so it ends all the same.
            _log.error("requests ended: no room", requests_ended=1)

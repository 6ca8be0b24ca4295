"""The worker service: an engine's loop around a publisher."""

import threading
from collections.abc import Callable

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import ErrorCode, Generate
from tokenbus_services.logs import logger
from tokenbus_services.worker.engine import Engine
from tokenbus_services.worker.errors import NotRunningError, RetentionFullError
from tokenbus_services.worker.publisher import Publisher

_log = logger("worker")
_IDLE_SECONDS = 0.1


def serve(publisher: Publisher, engine: Engine, stop: threading.Event, pace: Callable[[], None] | None = None) -> None:
    """Take requests, compute steps and publish them, until told to stop; `pace` is called before each step."""
    while not stop.is_set():
        for request in publisher.take_requests(0 if engine.has_work else _IDLE_SECONDS):
            if isinstance(request, Generate):
                _admit(publisher, engine, request)
            else:
                engine.abort(request.request_key)
        if not engine.has_work:
            continue
        if pace is not None:
            pace()
        try:
            for batch in engine.step():
                publisher.publish(batch)
        except RetentionFullError as full:
            _log.error("requests ended: no room", requests_ended=len(full.request_keys))
            for key in full.request_keys:
                engine.abort(key)
        except NotRunningError:
            return


def _admit(publisher: Publisher, engine: Engine, generate: Generate) -> None:
    key = generate.request_key
    try:
        prompt_tokens = engine.admit(generate)
    except (ValueError, ContractError) as error:
        publisher.failed_request(key, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error))
        return
    publisher.admitted(key, prompt_tokens)

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
        try:
            for request in publisher.take_requests(0 if engine.has_work else _IDLE_SECONDS):
                if isinstance(request, Generate):
                    _admit(publisher, engine, request)
                else:
                    engine.abort(request.request_key)
            if not engine.has_work:
                continue
            if pace is not None:
                pace()
            compute(publisher, engine)
        except NotRunningError:
            return


def compute(publisher: Publisher, engine: Engine) -> None:
    """Compute one step and publish all of it; what cannot be published ends its own requests and no others."""
    for batch in engine.step():
        try:
            publisher.publish(batch)
        except RetentionFullError as full:
            _end(engine, full)
        except ContractError as error:
            _log.error("requests ended: their batch breaks the contract", reason=str(error))
            for key in filter(None, batch.request_keys.tolist()):
                _fail(publisher, engine, key, ErrorCode.ERROR_CODE_ENGINE, f"its batch breaks the contract: {error}")
                engine.abort(key)


def _admit(publisher: Publisher, engine: Engine, generate: Generate) -> None:
    key = generate.request_key
    try:
        prompt_tokens = engine.admit(generate)
    except ValueError as error:
        _fail(publisher, engine, key, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error))
        return
    try:
        publisher.admitted(key, prompt_tokens)
    except RetentionFullError as full:
        _end(engine, full)


def _fail(publisher: Publisher, engine: Engine, key: int, code: ErrorCode, message: str) -> None:
    try:
        publisher.failed_request(key, code, message)
    except RetentionFullError as full:
        _end(engine, full)


def _end(engine: Engine, full: RetentionFullError) -> None:
    """End what the gap names that was left in the stream: the processor learns of it there."""
    _log.error("requests ended: no room", requests_ended=len(full.request_keys))
    for key in full.request_keys:
        engine.abort(key)

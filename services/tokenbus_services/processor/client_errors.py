"""What clients are answered where there are no tokens for them."""

from google.protobuf.message import DecodeError

from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError
from tokenbus_services.delivery.errors import brief


def error_of(key: int, code: ErrorCode, message: str, emitted_tokens: int = 0) -> RequestError:
    """Return why a request ended, or was not taken, in a text that fits."""
    return RequestError(request_key=key, code=code, message=brief(message, code), emitted_tokens=emitted_tokens)


def closing_error(key: int) -> RequestError:
    """Return the answer to who asks for something new from a processor that closes."""
    return error_of(key, ErrorCode.ERROR_CODE_OVERLOADED, "the processor is closing")


def ended_error(key: int, tokens: int) -> RequestError:
    """Return the answer to who asks once more for what a request had."""
    message = "it has ended, and what it had was taken before"
    return error_of(key, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST, message, tokens)


def refusal_of(parts: list[bytes], error: ContractError) -> RequestError:
    """Return the answer to a frame that was refused, for the request that it was about if that can be said."""
    key = 0
    try:
        frame = ClientFrame.FromString(parts[0])
        body = frame.WhichOneof("body")
        key = getattr(getattr(frame, body), "request_key", 0) if body else 0
    except (DecodeError, IndexError):
        pass
    return error_of(key, ErrorCode.ERROR_CODE_INVALID_REQUEST, str(error))

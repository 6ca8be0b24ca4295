"""How a request ends when it does not end well."""

from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

_PREFIX = len("ERROR_CODE_")
_LONGEST = 1000
"""In bytes; what the schema allows, and some room."""


class RequestFailedError(Exception):
    """A request ended with an error: which, why, and how many of its tokens came in order before.

    `emitted_tokens` counts those that came to this consumer, with those before the position from which it resumed.
    `generated_tokens` is how many its processor had seen. Where that is more, the rest was lost with the error, as when
    a client resumes a request from further back than what an earlier life of it had acknowledged.
    """

    def __init__(self, error: RequestError, generated_tokens: int = 0) -> None:
        """Keep what the error says."""
        self.request_key = error.request_key
        self.code = error.code
        self.emitted_tokens = error.emitted_tokens
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.retry_after_ms = error.retry_after_ms
        self.reason = error.message
        lacking = f"; {self.generated_tokens} were generated" if self.generated_tokens > self.emitted_tokens else ""
        super().__init__(
            f"request {error.request_key:016x}: {code_name(error.code)}: {error.message} "
            f"(after {error.emitted_tokens} tokens{lacking})"
        )


def code_name(code: int) -> str:
    """Return an error code's name in small letters; a newer minor's code is its number."""
    return ErrorCode.Name(code)[_PREFIX:].lower() if code in ErrorCode.values() else str(code)


def request_error(
    request_id: int, code: ErrorCode, message: str, *, emitted_tokens: int = 0, retry_after_ms: int = 0
) -> RequestError:
    """Return why a request ended, or was not taken, in a text that fits."""
    return RequestError(
        request_key=request_id,
        code=code,
        message=brief(message, code),
        emitted_tokens=emitted_tokens,
        retry_after_ms=retry_after_ms,
    )


def brief(message: str, code: int) -> str:
    """Return a text that fits into an error: what is too long is cut off, and none at all becomes the code's name."""
    return message.encode(errors="replace")[:_LONGEST].decode(errors="ignore") or code_name(code)

"""The error that ends a request, and the names of error codes."""

from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

NOT_HERE = frozenset({ErrorCode.ERROR_CODE_WORKER_LOST, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST})
"""Error codes that show that no worker has the request."""
NOT_TAKEN = frozenset({ErrorCode.ERROR_CODE_OVERLOADED, ErrorCode.ERROR_CODE_NO_WORKER})
"""Error codes of a refusal after which a retry may succeed, at another processor or later at the same one."""
RETRY_MS = 1000
"""Suggested delay before a refused request is retried, in milliseconds."""
CODE_NAMES = {code: name.removeprefix("ERROR_CODE_").lower() for name, code in ErrorCode.items()}
"""Names of the error codes in logs, metrics and errors."""
_LONGEST = 1000
"""Maximum length of an error message in bytes, below the bound in the schema."""


class RequestFailedError(Exception):
    """A request ended with an error.

    `emitted_tokens` counts the tokens that this consumer received in order, including tokens before a resumed position;
    `Client.resume` continues after them. `generated_tokens` counts the tokens that the processor received. If
    `generated_tokens` exceeds `emitted_tokens`, the difference was lost.

    Example:
        async with tokenbus.connect(address) as client:
            try:
                async for token in client.generate([1, 2, 3], model="no such model"):
                    print(token.id)
            except tokenbus.RequestFailedError as error:
                print(error.request_id, error.code_name, error.reason, error.emitted_tokens, error.retry_after_ms)
    """

    def __init__(self, error: RequestError, generated_tokens: int = 0) -> None:
        self.request_id = error.request_id
        self.code = error.code
        """Number of the error in the schema's ErrorCode."""
        self.emitted_tokens = error.emitted_tokens
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.retry_after_ms = error.retry_after_ms
        """Delay in milliseconds after which a retry makes sense, or 0 if unknown."""
        self.reason = error.message
        lacking = f"; {self.generated_tokens} were generated" if self.generated_tokens > self.emitted_tokens else ""
        super().__init__(
            f"request {error.request_id:016x}: {code_name(error.code)}: {error.message} "
            f"(after {error.emitted_tokens} tokens{lacking})"
        )

    @property
    def code_name(self) -> str:
        """Name of the error, such as `worker_lost`, `overloaded` or `invalid_request`."""
        return code_name(self.code)


def code_name(code: int) -> str:
    """Return the name of an error code, or the number of a code from a newer minor version."""
    return CODE_NAMES.get(code, str(code))


def request_error(
    request_id: int, code: ErrorCode, message: str, *, emitted_tokens: int = 0, retry_after_ms: int = 0
) -> RequestError:
    """Return the error for a request, with the message cut to the maximum length."""
    return RequestError(
        request_id=request_id,
        code=code,
        message=brief(message, code),
        emitted_tokens=emitted_tokens,
        retry_after_ms=retry_after_ms,
    )


def brief(message: str, code: int) -> str:
    """Return a message cut to the maximum length, or the name of the code for an empty message."""
    return message.encode(errors="replace")[:_LONGEST].decode(errors="ignore") or code_name(code)

"""The error that ends a request, and the names of its codes."""

from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

NOT_HERE = frozenset({ErrorCode.ERROR_CODE_WORKER_LOST, ErrorCode.ERROR_CODE_UNKNOWN_REQUEST})
"""The errors of a turn that no worker has any more."""
NOT_TAKEN = frozenset({ErrorCode.ERROR_CODE_OVERLOADED, ErrorCode.ERROR_CODE_NO_WORKER})
"""What a processor says of a new request that another one may take, or this one in a moment."""
RETRY_MS = 1000
"""After how long another try makes sense where a request was not taken; a processor that closes says no such time."""
CODE_NAMES = {code: name.removeprefix("ERROR_CODE_").lower() for name, code in ErrorCode.items()}
"""What each error code is called in logs, metrics and errors, in small letters."""
_LONGEST = 1000
"""In bytes: below what the schema allows."""


class RequestFailedError(Exception):
    """A request ended with an error: which one, why, and how many of its tokens came in order before.

    `emitted_tokens` counts the tokens that came to this consumer, with those before the position from which it resumed:
    where `Client.resume` goes on. `generated_tokens` counts what the processor had seen; where that is more, the rest
    was lost with the error.

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
        """The error's number, as the schema's ErrorCode has it."""
        self.emitted_tokens = error.emitted_tokens
        self.generated_tokens = max(generated_tokens, error.emitted_tokens)
        self.retry_after_ms = error.retry_after_ms
        """After how many milliseconds another try makes sense; 0: none is known to."""
        self.reason = error.message
        lacking = f"; {self.generated_tokens} were generated" if self.generated_tokens > self.emitted_tokens else ""
        super().__init__(
            f"request {error.request_id:016x}: {code_name(error.code)}: {error.message} "
            f"(after {error.emitted_tokens} tokens{lacking})"
        )

    @property
    def code_name(self) -> str:
        """The error's name in small letters, as `worker_lost`, `overloaded` or `invalid_request`."""
        return code_name(self.code)


def code_name(code: int) -> str:
    """Return an error code's name in small letters; a newer minor's code is its number."""
    return CODE_NAMES.get(code, str(code))


def request_error(
    request_id: int, code: ErrorCode, message: str, *, emitted_tokens: int = 0, retry_after_ms: int = 0
) -> RequestError:
    """Return why a request ended, or was not taken, in a text that fits."""
    return RequestError(
        request_id=request_id,
        code=code,
        message=brief(message, code),
        emitted_tokens=emitted_tokens,
        retry_after_ms=retry_after_ms,
    )


def brief(message: str, code: int) -> str:
    """Return a message cut to the length that an error may have; an empty one becomes the code's name."""
    return message.encode(errors="replace")[:_LONGEST].decode(errors="ignore") or code_name(code)

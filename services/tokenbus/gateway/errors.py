"""ApiError: an error in OpenAI's format with its HTTP status."""

import re
from collections.abc import Mapping

from tokenbus.delivery import RequestFailedError
from tokenbus.delivery.errors import code_name
from tokenbus_contracts.generated.request_pb2 import ErrorCode

MODEL_NOT_FOUND = "model_not_found"
_KINDS = {429: "overloaded_error", 503: "overloaded_error"}
"""OpenAI's error types by status. Other statuses have the type `server_error` or `invalid_request_error`."""
_SERVER_ERROR = 500
_RATE_LIMITED = ("rate_limit_exceeded", "concurrency_limit_exceeded")
_STATUSES: dict[int, int] = {
    ErrorCode.ERROR_CODE_INVALID_REQUEST: 400,
    ErrorCode.ERROR_CODE_DUPLICATE_REQUEST: 409,
    ErrorCode.ERROR_CODE_UNKNOWN_REQUEST: 502,  # the worker is gone
    ErrorCode.ERROR_CODE_OVERLOADED: 429,
    ErrorCode.ERROR_CODE_NO_WORKER: 503,
    ErrorCode.ERROR_CODE_WORKER_LOST: 502,
    ErrorCode.ERROR_CODE_GAP: 502,
    ErrorCode.ERROR_CODE_ENGINE: 500,
    ErrorCode.ERROR_CODE_UNRECOVERABLE: 502,
    ErrorCode.ERROR_CODE_ABORTED: 503,
    ErrorCode.ERROR_CODE_DEADLINE: 504,
    ErrorCode.ERROR_CODE_SLOW_CLIENT: 503,
    ErrorCode.ERROR_CODE_INTERNAL: 500,
    ErrorCode.ERROR_CODE_TAKEN_UP: 409,
}
SAMPLING_NAMES = {"ignore_eos": "ignore_end_token", "include_stop_str_in_output": "include_stop_string"}
TOKEN_SCORING = {
    "return_other_logprobs": "other_logprobs",
    "return_entropies": "entropies",
    "return_logprobs_of": "token_ids",
    "return_mask": "mask_bound",
}
"""Maps the API's name of a field to the contract's name of the same field in `sampling` or `token_scoring`."""
_FIELDS = {
    **{f"sampling.{ours}": name for name, ours in SAMPLING_NAMES.items()},
    "sampling.include_special_tokens": "skip_special_tokens",
    "sampling.structured_output": "response_format",
    "sampling.engine_arguments": "vllm_xargs",
    "tokens.token_ids": "prompt",
    "prompt_scoring": "prompt_logprobs",
    **{f"token_scoring.{ours}": name for name, ours in TOKEN_SCORING.items()},
}
"""Maps a field of the contract to the API's name, unless the names differ only by the prefix `sampling.`."""
_TOO_LONG = re.compile(r" at most (\d+) tokens, got (\d+)")
"""The end of a worker's error message about a prompt that is too long for any answer."""
_FIELD = re.compile(r"((?:sampling\.|tokens\.|token_scoring\.)?[a-z_]+)((?:\.[a-z_]+|\[\d+\])*)")
"""The path of a field at the beginning of an error message, split after the first name of the path."""


class ApiError(Exception):
    """An HTTP error: the status, the message, the name of the wrong field, and a code for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_ms = retry_after_ms

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Replace the field's name, or the beginning of its path, according to `names`. Return this error."""
        param = self.param or ""
        for name in sorted(names, key=len, reverse=True):
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                self.param, self.message = (names[name] + each.removeprefix(name) for each in (param, self.message))
                break
        return self

    @property
    def body(self) -> dict[str, object]:
        if self.code in _RATE_LIMITED:
            kind = "rate_limit_error"
        else:
            kind = _KINDS.get(self.status, "server_error" if self.status >= _SERVER_ERROR else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that the status needs, and `connection: close` if the gateway is stopping."""
        if self.status == 401:  # noqa: PLR2004 - a status speaks for itself
            return {"www-authenticate": 'Bearer realm="tokenbus"'}
        headers = {"connection": "close"} if self.code == "stopping" else {}
        if self.status in _KINDS and self.retry_after_ms:
            headers["retry-after"] = str(max(1, -(-self.retry_after_ms // 1000)))
            headers["retry-after-ms"] = str(self.retry_after_ms)
        return headers


def too_long(field: str, context: int, tokens: int) -> ApiError:
    """Return the error for a prompt that leaves no room for an answer, in the wording that clients search for."""
    message = f"{field}: this model's maximum context length is {context} tokens, one of them for the answer"
    return ApiError(400, f"{message}; got {tokens} tokens", param=field, code="context_length_exceeded")


def body_field(name: str) -> str:
    """Return the API's name for a field of the contract."""
    return _FIELDS.get(name, name.removeprefix("sampling."))


def of_request(error: RequestFailedError, retry_after_ms: int) -> ApiError:
    status = _STATUSES.get(error.code, 500)
    after = f" (after {error.emitted_tokens} tokens)" if error.emitted_tokens else ""
    reason, field = error.reason, None
    named, _, what = reason.partition(":")
    found = _FIELD.fullmatch(named)
    if status == 400 and what and found is not None:  # noqa: PLR2004 - a status speaks for itself
        field = body_field(found[1]) + found[2]
        reason = f"{field}:{what}"
    too_many = _TOO_LONG.fullmatch(what) if field == "prompt" else None
    if too_many is not None:  # the gateway did not know the model's context size
        return too_long("prompt", int(too_many[1]) + 1, int(too_many[2]))
    retry_after_ms = error.retry_after_ms or retry_after_ms
    return ApiError(status, reason + after, param=field, code=code_name(error.code), retry_after_ms=retry_after_ms)

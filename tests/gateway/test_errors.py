"""Errors over HTTP: each code of the bus has its status, in OpenAI's shape."""

from typing import Any

import pytest

from tests.in_process.builders import settings
from tokenbus.delivery import RequestFailedError
from tokenbus.gateway.answer import WholeAnswer
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import Reader
from tokenbus.gateway.errors import ApiError, of_request
from tokenbus.gateway.openai_format import Envelope
from tokenbus.gateway.vocabulary import vocabulary_of
from tokenbus_contracts.generated.request_pb2 import ErrorCode, RequestError

STATUSES = {
    "INVALID_REQUEST": 400, "DUPLICATE_REQUEST": 409, "UNKNOWN_REQUEST": 502, "OVERLOADED": 429, "NO_WORKER": 503,
    "WORKER_LOST": 502, "GAP": 502, "ENGINE": 500, "UNRECOVERABLE": 502, "ABORTED": 503,
    "DEADLINE": 504, "SLOW_CLIENT": 503, "INTERNAL": 500, "TAKEN_UP": 409,
}  # fmt: skip


def refused(reason: str) -> ApiError:
    failed = RequestFailedError(RequestError(request_id=1, code="ERROR_CODE_INVALID_REQUEST", message=reason))
    return of_request(failed, 0)


def test_every_code_has_a_status() -> None:
    assert {f"ERROR_CODE_{name}" for name in STATUSES} == set(ErrorCode.keys()) - {"ERROR_CODE_UNSPECIFIED"}


@pytest.mark.parametrize("name", STATUSES)
def test_error_is_told_in_openais_shape(name: str) -> None:
    code = f"ERROR_CODE_{name}"
    failed = RequestFailedError(RequestError(request_id=1, code=code, message="why: so", emitted_tokens=7))
    error = of_request(failed, 1500)
    assert error.status == STATUSES[name]
    told = error.body["error"]
    assert isinstance(told, dict)
    assert told["message"] == "why: so (after 7 tokens)"
    assert told["code"] == name.lower()
    assert told["param"] == ("why" if error.status == 400 else None)
    assert told["type"] == {429: "overloaded_error", 503: "overloaded_error"}.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    again = {"retry-after": "2", "retry-after-ms": "1500"} if error.status in (429, 503) else {}
    assert error.headers == again


TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
FORCED = CHAT | {"tools": [TOOL], "tool_choice": "required"}
ANY = {"type": "any"}
MESSAGES = CHAT | {"max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}]}


@pytest.mark.parametrize(
    ("reason", "route", "body", "message"),
    [
        ("sampling.min_p: only 0", "completion", {"prompt": "a"}, "min_p: only 0"),
        ("sampling.include_stop_string: only False", "chat", CHAT, "include_stop_str_in_output: only False"),
        ("sampling.structured_output: none", "completion", {"prompt": "a"}, "response_format: none"),
        ("top_logprobs: at most 20, got 21", "chat", CHAT, "top_logprobs: at most 20, got 21"),
        ("tokens.token_ids: at most 7", "completion", {"prompt": "a"}, "prompt: at most 7"),
        ("tokens.token_ids: at most 7", "chat", CHAT, "messages: at most 7"),
        ("tokens.token_ids[3]: below 7", "chat", CHAT, "messages[3]: below 7"),
        ("tokens.token_ids: at most 7", "messages", MESSAGES, "messages: at most 7"),
        ("tokens.token_ids: at most 7", "responses", {"input": "a"}, "input: at most 7"),
        ("sampling.structured_output: none", "chat", FORCED, "tool_choice: none"),
        ("sampling.structured_output: none", "messages", MESSAGES | {"tool_choice": ANY}, "tool_choice: none"),
        ("sampling.structured_output: none", "messages", MESSAGES, "output_config.format: none"),
        ("sampling.structured_output: none", "responses", {"input": "a"}, "text.format: none"),
        ("sampling.structured_output.regex: none", "completion", {"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex: none"),  # noqa: E501
        ("sampling.stop[1]: too long", "messages", MESSAGES, "stop_sequences[1]: too long"),
        ("sampling.max_tokens: at most 7", "responses", {"input": "a"}, "max_output_tokens: at most 7"),
    ],
)  # fmt: skip
async def test_answer_names_the_field_of_its_own_body(
    reason: str, route: str, body: dict[str, Any], message: str
) -> None:
    asked = getattr(Reader(settings(), vocabulary_of("bytes")), route)(body)
    answer = WholeAnswer(asked, Envelope(asked, 1), settings().gateway, Buffers(2**30))
    answer.begin(lambda: None)
    answer.end(refused(reason))
    assert answer.error is not None
    assert (answer.error.message, answer.error.param) == (message, message.partition(":")[0])


def test_reason_that_names_no_field_is_told_as_it_is() -> None:
    reason = "Grammar error: at 1(8): invalid regex"
    assert (refused(reason).message, refused(reason).param) == (reason, None)


def test_code_of_a_newer_minor_is_a_server_error() -> None:
    failed = RequestFailedError(RequestError(request_id=1, code=99, message="new"))  # type: ignore[arg-type]
    assert (of_request(failed, 0).status, of_request(failed, 0).code) == (500, "99")


def test_prompt_that_a_worker_finds_too_long_has_the_code_that_clients_know() -> None:
    error = refused("tokens.token_ids: at most 2047 tokens, got 2050")
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    most = "this model's maximum context length is 2048 tokens, one of them for the answer"
    assert error.message == f"prompt: {most}; got 2050 tokens"


def test_gateway_that_stops_closes_the_connection() -> None:
    """The client's next request makes a new connection, which another gateway at the port may take."""
    headers = ApiError(503, "the gateway is stopping", code="stopping", retry_after_ms=1000).headers
    assert headers == {"connection": "close", "retry-after": "1", "retry-after-ms": "1000"}

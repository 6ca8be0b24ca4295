"""The OpenAPI document: routes by hand, request bodies from the types that check them."""

from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tokenbus.gateway.request_body import RequestTypes

_SCHEMAS = "#/components/schemas/"
_ERRORS = {
    400: "A field is wrong: `param` names it.",
    401: "No API key, or an unknown one.",
    403: "A web page of another origin, or a remote client where the gateway has no keys.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The content type is not JSON.",
    421: "The header Host names another server.",
    429: "A rate or concurrency limit, or no capacity: Retry-After says when to try again.",
    500: "The engine failed, or a defect.",
    502: "The worker or some of its tokens were lost.",
    503: "No worker serves the model, or the gateway is stopping.",
    504: "The request's deadline passed.",
}
_TEXT = {"type": "string"}
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
_Count = Annotated[int, Meta(ge=0)]
_Object = dict[str, Any]


class ErrorMembers(Struct, forbid_unknown_fields=True):
    """What is wrong, with the field it is about and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """An answer that is an error."""

    error: ErrorMembers


class Model(Struct):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: _Count | None
    permission: list[_Object]


class Models(Struct):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class Usage(Struct):
    """Token counts of an answer."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: dict[str, _Count | None] | None
    completion_tokens_details: None


class Choice(Struct, kw_only=True, forbid_unknown_fields=True):
    """One choice of an answer."""

    index: _Count
    finish_reason: Literal["stop", "length", "abort", "tool_calls"]
    stop_reason: int | str | None
    weight_versions: list[_Object] | UnsetType = UNSET
    logprobs: _Object | None
    draft_logprobs: _Object | UnsetType | None = UNSET
    token_ids: list[_Count] | None
    columns: _Object | UnsetType = UNSET
    draft_columns: _Object | UnsetType | None = UNSET


class TextChoice(Choice, kw_only=True):
    """A choice of a completion."""

    text: str
    prompt_token_ids: list[_Count] | None
    prompt_logprobs: list[_Object | None] | None
    token_extras: list[_Object | None] | UnsetType = UNSET


class MessageChoice(Choice, kw_only=True):
    """A choice of a chat."""

    message: _Object
    token_extras: list[_Object | None] | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """An answer of /v1/completions that is not streamed."""

    id: str
    object: str
    created: _Count
    model: str
    usage: Usage
    choices: Annotated[list[TextChoice], Meta(min_length=1)]


class ChatAnswer(CompletionAnswer, kw_only=True):
    """An answer of /v1/chat/completions that is not streamed."""

    choices: Annotated[list[MessageChoice], Meta(min_length=1)]  # type: ignore[assignment]
    prompt_token_ids: list[_Count] | None
    prompt_logprobs: list[_Object | None] | None


class MessagesUsage(Struct, forbid_unknown_fields=True):
    """Token counts of a message."""

    input_tokens: _Count
    output_tokens: _Count
    cache_read_input_tokens: _Count | UnsetType = UNSET


class MessagesAnswer(Struct, forbid_unknown_fields=True):
    """An answer of /v1/messages that is not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[_Object]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCountAnswer(Struct, forbid_unknown_fields=True):
    """An answer of /v1/messages/count_tokens."""

    input_tokens: _Count


class MessagesErrorMembers(Struct, forbid_unknown_fields=True):
    """What is wrong."""

    type: str
    message: str


class MessagesError(Struct, forbid_unknown_fields=True):
    """An answer of /v1/messages that is an error."""

    type: Literal["error"]
    error: MessagesErrorMembers


class ResponsesUsage(Struct, forbid_unknown_fields=True):
    """Token counts of a response."""

    input_tokens: _Count
    input_tokens_details: dict[str, _Count]
    output_tokens: _Count
    output_tokens_details: dict[str, _Count]
    total_tokens: _Count


class ResponsesAnswer(Struct):
    """An answer of /v1/responses that is not streamed."""

    id: str
    object: Literal["response"]
    created_at: _Count
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: _Object | None
    output: list[_Object]
    usage: ResponsesUsage


class GenerateChoice(Choice, kw_only=True):
    """A choice of token ids."""

    text: str | UnsetType = UNSET


class GenerateAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer of /inference/v1/generate that is not streamed."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    created: _Count
    model: str
    usage: Usage
    choices: Annotated[list[GenerateChoice], Meta(min_length=1)]
    prompt_token_ids: list[_Count] | None
    prompt_logprobs: list[_Object | None] | None
    metrics: None
    kv_transfer_params: None
    ec_transfer_params: None


class TokenizationAnswer(Struct):
    """An answer of /tokenize."""

    count: _Count
    max_model_len: _Count | None
    tokens: list[_Count]
    token_strs: list[str] | None


class DetokenizationAnswer(Struct):
    """An answer of /detokenize."""

    prompt: str


def document(types: RequestTypes) -> dict[str, Any]:
    """Return the document, for OpenAPI 3.1."""
    answers = (
        *(Error, Models, CompletionAnswer, ChatAnswer, TokenizationAnswer, DetokenizationAnswer),
        *(MessagesAnswer, TokenCountAnswer, MessagesError, ResponsesAnswer, GenerateAnswer),
    )
    shown = (*types.bounded.values(), *answers)
    _, schemas = msgspec.json.schema_components(shown, ref_template=_SCHEMAS + "{name}")
    schemas["Tokenization"]["oneOf"] = [
        {"required": [name], "properties": {name: {"type": kind}}}
        for name, kind in (("prompt", "string"), ("messages", "array"))
    ]
    schemas["InputMessage"]["required"].remove("type")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenbus gateway",
            "version": version("tokenbus"),
            "description": "Tokens with their logprobs, as OpenAI's API has them; docs/gateway.md says the rest.",
        },
        "paths": {
            "/v1/completions": _post("Continue a text.", "Completion", "CompletionAnswer"),
            "/v1/chat/completions": _post("Continue a chat.", "Chat", "ChatAnswer"),
            "/v1/chat/completions/batch": _post(
                "Continue several chats.", "ChatBatch", "ChatAnswer", is_streamed=False
            ),
            "/v1/messages": _post("Continue a chat.", "Messages", "MessagesAnswer", error="MessagesError"),
            "/v1/messages/count_tokens": _post(
                "Count a chat's tokens.", "TokenCount", "TokenCountAnswer", is_streamed=False, error="MessagesError"
            ),
            "/v1/responses": _post("Continue a conversation.", "Responses", "ResponsesAnswer"),
            "/inference/v1/generate": _post("Continue token ids.", "Generate", "GenerateAnswer"),
            "/v1/completions/render": _post(
                "Turn a body into those of /inference/v1/generate, one a prompt.", "Completion", None, is_streamed=False
            ),
            "/v1/chat/completions/render": _post(
                "Turn a body into one of /inference/v1/generate.", "Chat", "Generate", is_streamed=False
            ),
            "/v1/messages/render": _post(
                "Do the same.", "Messages", "Generate", is_streamed=False, error="MessagesError"
            ),
            "/v1/responses/render": _post("Do the same.", "Responses", "Generate", is_streamed=False),
            "/inspect": _post("Stream tokens with everything known of each.", "Inspection", None),
            "/tokenize": _post("Encode a text or a chat.", "Tokenization", "TokenizationAnswer", is_streamed=False),
            "/detokenize": _post("Decode token ids.", "Detokenization", "DetokenizationAnswer", is_streamed=False),
            "/tokenizer_info": _get("Describe the model's tokenizer.", {"type": "object"}),
            "/v1/models": _get("List the models.", {"$ref": f"{_SCHEMAS}Models"}),
            "/healthz": _get("Report whether the gateway is healthy.", {"type": "object"}, 503),
            "/readyz": _get("Report whether a worker would take requests.", {"type": "object"}, 503),
            "/bus": _get("Report the workers and the processor.", {"type": "object"}, 503),
            "/health": _get("Report by the status alone whether a worker would take requests.", None, 503),
            "/ping": _get("Do the same.", None, 503),
            "/version": _get("Name the gateway's version.", {"type": "object"}),
            "/load": _get("Count the open requests.", {"type": "object"}),
        },
        "components": {"schemas": schemas},
    }


def _post(
    summary: str, body: str, answer: str | None, *, is_streamed: bool = True, error: str = "Error"
) -> dict[str, Any]:
    content: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}} if is_streamed else {}
    if answer is not None:
        content["application/json"] = {"schema": {"$ref": _SCHEMAS + answer}}
    responses = {"200": {"description": "The answer.", "content": content}}
    errors = {"application/json": {"schema": {"$ref": _SCHEMAS + error}}}
    for status, meaning in _ERRORS.items():
        responses[str(status)] = {"description": meaning, "content": errors}
    body_schema = {"application/json": {"schema": {"$ref": _SCHEMAS + body}}}
    return {
        "post": {"summary": summary, "requestBody": {"required": True, "content": body_schema}, "responses": responses}
    }


def _get(summary: str, schema: dict[str, Any] | None, *others: int) -> dict[str, Any]:
    content = {} if schema is None else {"content": {"application/json": {"schema": schema}}}
    responses = {str(status): {"description": "The answer.", **content} for status in (200, *others)}
    return {"get": {"summary": summary, "responses": responses}}

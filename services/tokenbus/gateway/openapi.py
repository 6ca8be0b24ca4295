"""The OpenAPI document. Types that check request bodies also describe them. This module describes everything else."""

from importlib.metadata import version
from typing import Any

import msgspec

from tokenbus.gateway.request_body import RequestTypes
from tokenbus.gateway.validation import MOST_SESSION_BYTES

_Schema = dict[str, Any]
_SCHEMAS = "#/components/schemas/"
_ERRORS = {
    400: "A field is wrong: `param` names it.",
    401: "No API key, or an unknown one.",
    403: "A web page of another origin, or a remote client although the gateway has no keys.",
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
_STREAMED = {
    "/v1/completions": ("Continue a text.", "Completion", "CompletionAnswer"),
    "/v1/chat/completions": ("Continue a chat.", "Chat", "ChatAnswer"),
    "/v1/messages": ("Continue a chat.", "Messages", "MessagesAnswer"),
    "/v1/responses": ("Continue a conversation.", "Responses", "ResponsesAnswer"),
    "/inference/v1/generate": ("Continue token ids.", "Generate", "GenerateAnswer"),
    "/inspect": ("Stream tokens with all their facts.", "Inspection", None),
}
"""Routes whose answers may be streamed, with a summary and the types of the body and of the whole answer."""
_WHOLE = {
    "/v1/chat/completions/batch": ("Continue several chats.", "ChatBatch", "ChatAnswer"),
    "/v1/messages/count_tokens": ("Count a chat's tokens.", "TokenCount", "TokenCountAnswer"),
    "/v1/completions/render": ("Return one body of /inference/v1/generate for each prompt.", "Completion", None),
    "/v1/chat/completions/render": ("Return the same chat as a body of /inference/v1/generate.", "Chat", "Generate"),
    "/v1/messages/render": ("Return the same chat as a body of /inference/v1/generate.", "Messages", "Generate"),
    "/v1/responses/render": ("Return the same chat as a body of /inference/v1/generate.", "Responses", "Generate"),
    "/tokenize": ("Encode a text or a chat.", "Tokenization", "TokenizationAnswer"),
    "/detokenize": ("Decode token ids.", "Detokenization", "DetokenizationAnswer"),
}
_MAKES_TOKENS = frozenset((*_STREAMED, "/v1/chat/completions/batch"))
_SESSION = {
    "name": "X-Session-Id",
    "in": "header",
    "description": "The label of the session that the request belongs to, as session_id in the body.",
    "schema": {"type": "string", "maxLength": MOST_SESSION_BYTES},
}
_TEXT, _OBJECT, _NULL = {"type": "string"}, {"type": "object"}, {"type": "null"}
_COUNT = {"type": "integer", "minimum": 0}
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}


def document(types: RequestTypes) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(types.bounded.values(), ref_template=_SCHEMAS + "{name}")
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
            **{path: _post(path, *route, is_streamed=True) for path, route in _STREAMED.items()},
            **{path: _post(path, *route, is_streamed=False) for path, route in _WHOLE.items()},
            "/tokenizer_info": _get("Describe the model's tokenizer.", _OBJECT),
            "/v1/models": _get("List the models.", {"$ref": f"{_SCHEMAS}Models"}),
            "/healthz": _get("Report whether the gateway is healthy.", _OBJECT, 503),
            "/readyz": _get("Report whether a worker would take requests.", _OBJECT, 503),
            "/sessions/{session_id}": _session(),
            "/bus": _get("Report the workers and the processor.", _OBJECT, 503),
            "/health": _get("Report whether a worker would take requests, only by the status.", None, 503),
            "/ping": _get("Do the same.", None, 503),
            "/version": _get("Name the gateway's version.", _OBJECT),
            "/load": _get("Count the open requests.", _OBJECT),
        },
        "components": {"schemas": schemas | _answers()},
    }


def _session() -> dict[str, Any]:
    route = _get("Read the exact tokens of a session from the durable log.", _OBJECT, 400, 401, 403, 404, 429, 503)
    label = {"name": "session_id", "in": "path", "required": True, "schema": _TEXT}
    return {"get": route["get"] | {"parameters": [label]}}


def _answers() -> dict[str, _Schema]:
    ids, objects, maybe_object = _or_null(_list(_COUNT)), _list(_OBJECT), _or_null(_OBJECT)
    usage = _open(
        {
            **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
            "prompt_tokens_details": _or_null({"type": "object", "additionalProperties": _or_null(_COUNT)}),
            "completion_tokens_details": _NULL,
        }
    )
    choice = {
        "index": _COUNT,
        "finish_reason": {"enum": ["stop", "length", "abort", "tool_calls"]},
        "stop_reason": _or_null({"type": "integer"}, _TEXT),
        "logprobs": maybe_object,
        "token_ids": ids,
    }
    maybe = {"weight_versions": objects, "turns": objects, "columns": _OBJECT}
    maybe |= {"draft_logprobs": maybe_object, "draft_columns": maybe_object, "token_extras": _list(maybe_object)}
    prompt = {"prompt_token_ids": ids, "prompt_logprobs": _or_null(_list(maybe_object))}
    completion = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT, "usage": usage}
    model = {"object": {"enum": ["model"]}, "created": _COUNT, "permission": objects}
    model |= {"parent": _or_null(_TEXT), "max_model_len": _or_null(_COUNT)}
    message = {
        "type": {"enum": ["message"]},
        "role": {"enum": ["assistant"]},
        "content": objects,
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _or_null(_TEXT),
        "usage": _closed({"input_tokens": _COUNT, "output_tokens": _COUNT}, {"cache_read_input_tokens": _COUNT}),
    }
    details = {"type": "object", "additionalProperties": _COUNT}
    response = {
        "object": {"enum": ["response"]},
        "created_at": _COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "error": _NULL,
        "incomplete_details": maybe_object,
        "output": objects,
        "usage": _closed(
            dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _COUNT)
            | dict.fromkeys(("input_tokens_details", "output_tokens_details"), details)
        ),
    }
    generated = {
        "request_id": _TEXT,
        "output_mode": {"enum": ["tokens", "text"]},
        "created": _COUNT,
        "model": _TEXT,
        "usage": usage,
        "choices": _choices(choice, {"text": _TEXT, **maybe}),
        **prompt,
        **dict.fromkeys(("metrics", "kv_transfer_params", "ec_transfer_params"), _NULL),
    }
    texts, named = {"message": _TEXT, "type": _TEXT}, {"id": _TEXT, "model": _TEXT}
    return {
        "Error": _open({"error": _closed({**texts, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})}),
        "Models": _open(
            {
                "object": {"enum": ["list"]},
                "data": _list(_open(dict.fromkeys(("id", "owned_by", "root"), _TEXT) | model)),
            }
        ),
        "CompletionAnswer": _open({**completion, "choices": _choices({**choice, "text": _TEXT, **prompt}, maybe)}),
        "ChatAnswer": _open({**completion, "choices": _choices({**choice, "message": _OBJECT}, maybe), **prompt}),
        "MessagesAnswer": _closed(named | message),
        "MessagesError": _closed({"type": {"enum": ["error"]}, "error": _closed(texts)}),
        "TokenCountAnswer": _closed({"input_tokens": _COUNT}),
        "ResponsesAnswer": _open(named | response),
        "GenerateAnswer": _closed(generated),
        "TokenizationAnswer": _open(
            {"count": _COUNT, "max_model_len": _or_null(_COUNT), "tokens": _list(_COUNT)}
            | {"token_strs": _or_null(_list(_TEXT))}
        ),
        "DetokenizationAnswer": _open({"prompt": _TEXT}),
    }


def _open(members: _Schema) -> _Schema:
    return {"type": "object", "properties": members, "required": list(members)}


def _closed(members: _Schema, optional: _Schema | None = None) -> _Schema:
    return _open(members) | {"properties": members | (optional or {}), "additionalProperties": False}


def _list(items: _Schema) -> _Schema:
    return {"type": "array", "items": items}


def _choices(members: _Schema, optional: _Schema) -> _Schema:
    return _list(_closed(members, optional)) | {"minItems": 1}


def _or_null(*schemas: _Schema) -> _Schema:
    return {"anyOf": [*schemas, _NULL]}


def _post(path: str, summary: str, body: str, answer: str | None, *, is_streamed: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}} if is_streamed else {}
    if answer is not None:
        content["application/json"] = {"schema": {"$ref": _SCHEMAS + answer}}
    responses = {"200": {"description": "The answer.", "content": content}}
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    errors = {"application/json": {"schema": {"$ref": _SCHEMAS + error}}}
    for status, meaning in _ERRORS.items():
        responses[str(status)] = {"description": meaning, "content": errors}
    body_schema = {"application/json": {"schema": {"$ref": _SCHEMAS + body}}}
    return {
        "post": {
            "summary": summary,
            **({"parameters": [_SESSION]} if path in _MAKES_TOKENS else {}),
            "requestBody": {"required": True, "content": body_schema},
            "responses": responses,
        }
    }


def _get(summary: str, schema: _Schema | None, *others: int) -> dict[str, Any]:
    content = {} if schema is None else {"content": {"application/json": {"schema": schema}}}
    responses = {str(status): {"description": "The answer.", **content} for status in (200, *others)}
    return {"get": {"summary": summary, "responses": responses}}

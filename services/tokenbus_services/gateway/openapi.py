"""The OpenAPI document: routes by hand, bodies from the same tables that check them."""

from importlib.metadata import version
from typing import Any

from tokenbus_services.gateway.tables import Tables

_ERROR = {"$ref": "#/components/schemas/Error"}
_ERRORS = {
    400: "A field is wrong: `param` names it.",
    401: "No API key, or one that is not known.",
    403: "A web page of another origin, or a client elsewhere where no key is asked for.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is no JSON by its content type.",
    421: "The header Host names another server.",
    429: "There is no room for it now; Retry-After says when to try again.",
    500: "A defect, or the engine failed.",
    502: "The worker was lost, or tokens were.",
    503: "No worker serves it, or the gateway is stopping.",
    504: "It took longer than it may.",
}
_TEXT = {"type": "string"}
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["data"]}
_LOGPROBS = {"type": ["object", "null"]}


def document(tables: Tables) -> dict[str, Any]:
    """Return the document, for OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenbus gateway",
            "version": version("tokenbus"),
            "description": "Tokens with their logprobs, as OpenAI's API has them; docs/gateway.md says the rest.",
        },
        "paths": {
            "/v1/completions": _post("Go on with a text.", "Completion", "CompletionAnswer"),
            "/v1/chat/completions": _post("Go on with a chat.", "Chat", "ChatAnswer"),
            "/inspect": _post("Look at each token as it comes.", "Inspection", None),
            "/v1/models": _get("The models that may be asked for.", {"$ref": "#/components/schemas/Models"}),
            "/healthz": _get("Whether the gateway does what it is there for.", {"type": "object"}, 503),
            "/readyz": _get("Whether requests would find a worker.", {"type": "object"}, 503),
            "/bus": _get("The workers and the processor.", {"type": "object"}, 503),
        },
        "components": {
            "schemas": {
                "Completion": tables.completion.schema(),
                "Chat": tables.chat.schema(),
                "Inspection": tables.inspection.schema(),
                "Error": _error(),
                "Models": _models(),
                "CompletionAnswer": _answer({"text": {"type": "string"}}),
                "ChatAnswer": _answer({"message": {"type": "object"}}),
            }
        },
    }


def _post(summary: str, body: str, answer: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}
    if answer is not None:
        content["application/json"] = {"schema": {"$ref": f"#/components/schemas/{answer}"}}
    responses = {"200": {"description": "The answer.", "content": content}}
    for status, meaning in _ERRORS.items():
        responses[str(status)] = {"description": meaning, "content": {"application/json": {"schema": _ERROR}}}
    body_schema = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": body_schema},
            "responses": responses,
        }
    }


def _get(summary: str, schema: dict[str, Any], *others: int) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    responses = {str(status): {"description": "The answer.", "content": content} for status in (200, *others)}
    return {"get": {"summary": summary, "responses": responses}}


def _error() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    members = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    error = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _models() -> dict[str, Any]:
    model = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
        },
        "required": ["id", "object", "created", "owned_by"],
    }
    members = {"object": {"const": "list"}, "data": {"type": "array", "items": model}}
    return {"type": "object", "properties": members, "required": list(members)}


def _answer(said: dict[str, Any]) -> dict[str, Any]:
    whole = {"type": "integer", "minimum": 0}
    ids = {"type": "array", "items": whole}
    choice = {
        "type": "object",
        "properties": {
            "index": whole,
            **said,
            "finish_reason": {"enum": ["stop", "length"]},
            "logprobs": _LOGPROBS,
            "draft_logprobs": _LOGPROBS,
            "token_ids": ids,
            "prompt_token_ids": ids,
            "columns": {"type": "object"},
            "draft_columns": {"type": ["object", "null"]},
        },
        "required": ["index", *said, "finish_reason", "logprobs"],
        "additionalProperties": False,
    }
    usage_members = ["prompt_tokens", "completion_tokens", "total_tokens"]
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": whole,
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice, "minItems": 1},
            "usage": {"type": "object", "properties": dict.fromkeys(usage_members, whole), "required": usage_members},
        },
        "required": ["id", "object", "created", "model", "choices", "usage"],
    }

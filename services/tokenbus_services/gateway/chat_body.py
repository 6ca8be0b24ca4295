"""A chat's own fields: its messages, the functions that the model may call, and what its template reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenbus_services.gateway.body_fields import (
    MAX_CHARACTERS,
    MAX_NAME_CHARACTERS,
    array,
    invalid,
    json_text,
    one_of,
    optional,
    required,
    string,
    struct,
)
from tokenbus_services.gateway.output_form import MAX_FORM_BYTES, MAX_FORM_CHARACTERS
from tokenbus_services.gateway.tool_calls import ANY_PARAMETERS, ForcedCall, schema_of_calls
from tokenbus_services.gateway.vocabulary import Template
from tokenbus_services.settings.errors import shown

_MAX_MESSAGES = 1024
_MAX_PARTS = 64
_MAX_CALLS = 128
_MAX_TOOLS = 128
_MAX_DOCUMENTS = 256
_MAX_VARIABLES_BYTES = 65_536
_RESERVED = frozenset({
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "tokenize"),
})  # fmt: skip
"""What `chat_template_kwargs` may not set: these have a field of their own, or are no variable."""


def messages_type() -> Any:  # noqa: ANN401 - a type
    """Return the type of a chat's messages."""
    text, name = string(0, MAX_CHARACTERS), string(0, MAX_NAME_CHARACTERS)
    part = struct(
        "ContentPart",
        required("type", one_of("messages.content.type"), "The kind of part."),
        required("text", text, "The text."),
    )
    called = struct(
        "CalledFunction",
        required("name", name, "Its name."),
        optional("arguments", text, "Its arguments, as the text of a JSON object."),
    )
    call = struct(
        "ToolCall",
        optional("id", name, "What the message with the result names as its tool_call_id."),
        optional("type", one_of("messages.tool_calls.type"), "What is called."),
        required("function", called, "The function."),
    )
    message = struct(
        "Message",
        required("role", one_of("messages.role"), "Who wrote the message."),
        optional("content", text | array(part, 1, _MAX_PARTS), "The text, or its parts; an assistant's may be absent."),
        optional("name", name, "The writer's name, for templates that show it."),
        optional("tool_calls", array(call, 0, _MAX_CALLS), "The functions that the assistant called."),
        optional("tool_call_id", name, "Which call a tool's message answers."),
        *(
            optional(each, text, "What the assistant thought, for templates that show it.")
            for each in ("reasoning", "reasoning_content")
        ),
        # OpenAI's own client sends an answer back with these fields, all null.
        *(
            optional(each, None, "Not offered: only null is accepted.")
            for each in ("refusal", "annotations", "audio", "function_call")
        ),
    )
    return array(message, 1, _MAX_MESSAGES)


def tool_type() -> Any:  # noqa: ANN401 - a type
    """Return the type of a function that the model may call."""
    function = struct(
        "Function",
        required("name", string(1, MAX_NAME_CHARACTERS), "Its name."),
        optional("description", string(0, MAX_FORM_CHARACTERS), "What it does."),
        optional("parameters", dict[str, Any], "The JSON Schema of its arguments."),
        optional("strict", bool, "For the template: where a call is forced, the schema always holds."),
    )
    return struct(
        "Tool",
        optional("type", one_of("tools.type"), "The kind of tool."),
        required("function", function, "The function."),
    )


def template_fields(tool: Any, *, adds_special: bool | None) -> list[Any]:  # noqa: ANN401 - a type
    """Return the fields of what a chat's template reads; `adds_special` is the default of `add_special_tokens`."""
    begins = "Whether the chat ends where the assistant begins."
    special = "Whether the tokens that the model wants around a text are added: to a chat, beside its template's."
    variables = "Variables of the template."
    return [
        optional("tools", array(tool, 1, _MAX_TOOLS), "The functions that the model may call."),
        optional("add_generation_prompt", bool, begins, default=True),
        optional("continue_final_message", bool, "Whether the answer continues the last message.", default=False),
        optional("add_special_tokens", bool, special, default=adds_special),
        optional("documents", array(dict[str, str], 0, _MAX_DOCUMENTS), "Documents, for templates that show them."),
        optional("chat_template_kwargs", dict[str, Any], variables),
    ]


def choice_fields() -> list[Any]:
    """Return the fields of which functions are called."""
    named = struct("FunctionName", required("name", string(1, MAX_NAME_CHARACTERS), "One of the functions of tools."))
    choice = struct(
        "FunctionChoice",
        optional("type", one_of("tool_choice.type"), "The kind of tool."),
        required("function", named, "The function."),
    )
    return [
        optional("tool_choice", one_of("tool_choice") | choice, "Whether functions are called, or the one that is."),
        optional("parallel_tool_calls", bool, "Whether `required` may be several calls.", default=True),
    ]


def tools_of(body: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a struct
    """Return a body's tools as templates have them; raises an ApiError."""
    if body.tools is None:
        return []
    tools = []
    for tool in body.tools:
        given = tool.function
        function = {"name": given.name, "description": given.description, "parameters": given.parameters}
        if given.strict is not None:
            function["strict"] = given.strict
        tools.append({"type": "function", "function": function})
    json_text("tools", tools, MAX_FORM_BYTES)
    return tools


def variables_of(body: Any, template: Template | None = None) -> dict[str, Any]:  # noqa: ANN401 - a struct
    """Return what a body sets for its chat's template, beside messages and tools; raises an ApiError."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message", "only where add_generation_prompt is false, got both")
    variables: dict[str, Any] = {}
    if body.chat_template_kwargs is not None:
        variables = body.chat_template_kwargs
        for name in variables:
            if name in _RESERVED or (template is not None and template.reserves(name)):
                where = f"chat_template_kwargs.{shown(name)[1:-1]}"
                raise invalid(where, "no name of a field, a special token or a function of the template, got one")
        json_text("chat_template_kwargs", variables, _MAX_VARIABLES_BYTES)
    documents = {} if body.documents is None else {"documents": body.documents}
    return {**variables, **documents, "add_generation_prompt": body.add_generation_prompt}


def messages_of(body: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a struct
    """Return a body's messages as OpenAI's API has them; raises an ApiError."""
    for place, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{place}].content", "required, got nothing")
    messages: list[dict[str, Any]] = msgspec.to_builtins(body.messages)
    return messages


def forced_call(body: Any, tools: Sequence[Mapping[str, Any]]) -> ForcedCall | None:  # noqa: ANN401 - a struct
    """Return which function a body wants to be called for certain, if it does; raises an ApiError."""
    choice = body.tool_choice
    if choice is None or choice == "none":
        return None
    if not tools:
        raise invalid("tool_choice", "only with tools, got it without")
    if choice == "auto":
        return None
    if body.structured_outputs is not None:
        raise invalid("structured_outputs", "none where tool_choice forces a call, got one")
    if choice == "required":
        schema = schema_of_calls([tool["function"] for tool in tools], is_one=not body.parallel_tool_calls)
        return ForcedCall(None, json_text("tools", schema, MAX_FORM_BYTES))
    name = choice.function.name
    found = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise invalid("tool_choice.function.name", f"one of {names}, got {name!r}")
    parameters = found[-1]["parameters"] or ANY_PARAMETERS
    return ForcedCall(name, json_text("tools", parameters, MAX_FORM_BYTES))

"""Reads `response_format`, `structured_outputs` and `tool_choice` into the contract's StructuredOutput."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenbus.gateway import bodies
from tokenbus.gateway.validation import check_json, invalid, json_text

_MAX_FORM_BYTES = 262_144
_MEMBERS = {
    "json": ("json_schema", "schema"),
    "regex": ("regex", "pattern"),
    "grammar": ("grammar", "text"),
    "structural_tag": ("structural_tag", "tag"),
}
"""Maps a form in a request body to a member of the contract's StructuredOutput and to the member's text field."""
_OF_JSON = ("json", "structural_tag")
_PARTS_OF_TAGS = ("format", "structures", "triggers")
_ANY_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Default JSON Schema for the arguments of a function."""


def structured_output(body: bodies.Generation) -> dict[str, Any] | None:
    found = None if body.structured_outputs is None else _form_in(body.structured_outputs)
    response = None if body.response_format is None else _form_of_response(body.response_format)
    if found is not None and response is not None and body.response_format is not None:
        raise invalid("response_format", f"none with structured_outputs, got {body.response_format.type}")
    return found or response


def _form_in(wanted: bodies.StructuredOutputs) -> dict[str, Any]:
    given = {name: value for name in wanted.__struct_fields__ if (value := getattr(wanted, name)) is not None}
    if len(given) != 1 or given.get("json_object") is False:
        names = ", ".join(f"{name}: False" if value is False else name for name, value in given.items())
        raise invalid("structured_outputs", f"one of {', '.join(wanted.__struct_fields__)}, got {names or 'none'}")
    ((form, value),) = given.items()
    return _form(f"structured_outputs.{form}", form, value)


def _form_of_response(response: bodies.ResponseFormat) -> dict[str, Any] | None:
    kind, schema, where = response.type, response.json_schema, "response_format.json_schema"
    if schema is not None and kind != "json_schema":
        raise invalid(where, f"only if the type is json_schema, got it with {kind}")
    parts = {name: value for name in _PARTS_OF_TAGS if (value := getattr(response, name)) is not None}
    if kind == "structural_tag":
        if list(parts) not in (["format"], ["structures", "triggers"]):
            got = " and ".join(parts) or "neither"
            raise invalid("response_format", f"a structural_tag has a format, or structures and triggers, got {got}")
        return _form("response_format", "structural_tag", {"type": kind, **parts})
    for name in parts:
        raise invalid(f"response_format.{name}", f"only if the type is structural_tag, got it with {kind}")
    if kind != "json_schema":
        return {"json_object": {}} if kind == "json_object" else None
    if schema is None or schema.schema is None:
        named = where if schema is None else f"{where}.schema"
        raise invalid(named, "required if the type is json_schema, got nothing")
    return _form(f"{where}.schema", "json", schema.schema)


def _form(where: str, form: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    if form == "choice":
        return {"choice": {"texts": value}}
    if form == "json_object":
        return {"json_object": {}}
    if not isinstance(value, str):
        text = json_text(where, value, _MAX_FORM_BYTES)
    else:
        text, size = value, len(value.encode())
        if size > _MAX_FORM_BYTES:
            raise invalid(where, f"at most {_MAX_FORM_BYTES} bytes, got {size}")
        if form in _OF_JSON:
            check_json(where, value)
    name, member = _MEMBERS[form]
    return {name: {member: text}}


def form_of_vllm(form: Mapping[str, Any]) -> dict[str, Any]:
    ((name, members),) = form.items()
    if name == "choice":
        return {"choice": members["texts"]}
    if name == "json_object":
        return {"json_object": True}
    return {ours: members[member] for ours, (theirs, member) in _MEMBERS.items() if theirs == name}


class ForcedCall(NamedTuple):
    """A function call that makes up the whole output."""

    name: str | None
    """The function's name. If the name is None, the output is a list of objects with `name` and `parameters`."""
    schema: str


class AutoCalls(NamedTuple):
    """Functions that the model may call within its text."""

    parser: str
    is_one: bool


def auto_calls(body: bodies.Chat, parser: str) -> AutoCalls | None:
    """Return the way to find calls within a text, or None if the output has no calls or is itself a call."""
    if not parser or not body.tools or body.tool_choice not in (None, "auto"):
        return None
    return AutoCalls(parser, body.parallel_tool_calls is False)


def take_older_names(body: bodies.Chat) -> None:
    """Move OpenAI's older `functions` and `function_call` to `tools` and `tool_choice`."""
    if body.tools is None and body.functions:
        body.tools = [bodies.Tool(function=function) for function in body.functions]
    if body.tool_choice is None and body.function_call is not None and body.tools:
        choice = body.function_call
        body.tool_choice = choice if isinstance(choice, str) else bodies.FunctionChoice(function=choice)


def tools_of(body: bodies.Chat | bodies.Tokenization) -> list[dict[str, Any]]:
    """Return a body's tools in the form of chat templates. Raises an ApiError."""
    tools = []
    for tool in body.tools or ():
        function = msgspec.structs.asdict(tool.function)
        if function["strict"] is None:
            del function["strict"]
        tools.append({"type": "function", "function": function})
    json_text("tools", tools, _MAX_FORM_BYTES)
    return tools


def forced_call(body: bodies.Chat, tools: Sequence[Mapping[str, Any]]) -> ForcedCall | None:
    """Return the call that a body forces the model to make, if any. Raises an ApiError."""
    choice = body.tool_choice
    if choice is None or choice == "none":
        return None
    if not tools:
        raise invalid("tool_choice", "only with tools, got it without")
    if choice == "auto":
        return None
    if body.structured_outputs is not None:
        raise invalid("structured_outputs", "must be absent if tool_choice forces a call")
    if choice == "required":
        schema = _schema_of_calls([tool["function"] for tool in tools], is_one=not body.parallel_tool_calls)
        return ForcedCall(None, json_text("tools", schema, _MAX_FORM_BYTES))
    name = choice.function.name
    found = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise invalid("tool_choice.function.name", f"one of {names}, got {name!r}")
    parameters = found[-1]["parameters"] or _ANY_PARAMETERS
    return ForcedCall(name, json_text("tools", parameters, _MAX_FORM_BYTES))


def _schema_of_calls(functions: Sequence[Mapping[str, Any]], *, is_one: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function["parameters"] or _ANY_PARAMETERS)
        given = parameters.pop("$defs", {})
        if not isinstance(given, dict):
            got = f"{type(given).__name__} for {function['name']!r}"
            raise invalid("tools", f"objects as the $defs of parameters, got {got}")
        for name, definition in given.items():
            if definitions.setdefault(name, definition) != definition:
                raise invalid("tools", f"one definition of a name in $defs, got two of {name!r} that differ")
        name_and_arguments = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        calls.append({"properties": name_and_arguments, "required": ["name", "parameters"]})
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if is_one:
        schema["maxItems"] = 1
    if definitions:  # `$ref` paths of definitions begin at the schema's root
        schema["$defs"] = definitions
    return schema

"""The form of an output: OpenAI's `response_format` and vLLM's `structured_outputs`, as the contract has them."""

from typing import Any

import orjson

from tokenbus_services.gateway.body_fields import (
    MAX_NAME_CHARACTERS,
    array,
    check_depth,
    invalid,
    json_text,
    one_of,
    optional,
    required,
    string,
    struct,
    written_depth,
)

MAX_FORM_BYTES = 262_144
MAX_FORM_CHARACTERS = 65_536
_MAX_PATTERN_CHARACTERS = 4096
_MAX_CHOICE_TEXTS = 1024


def form_fields() -> list[Any]:
    """Return the fields of an output's form."""
    form = string(1, MAX_FORM_CHARACTERS)
    structured = struct(
        "StructuredOutputs",
        optional("json", form | dict[str, Any], "A JSON Schema, as an object or its text."),
        optional("json_object", bool, "Whether the output is any JSON object."),
        optional("regex", string(1, _MAX_PATTERN_CHARACTERS), "A regular expression that matches the output."),
        optional("choice", array(string(1, MAX_NAME_CHARACTERS), 1, _MAX_CHOICE_TEXTS), "The texts to choose from."),
        optional("grammar", form, "A grammar, as the engine reads it."),
    )
    json_schema = struct(
        "ResponseSchema",
        required("name", string(0, MAX_NAME_CHARACTERS), "Its name, which is ignored."),
        optional("description", form, "Accepted and ignored."),
        optional("schema", dict[str, Any], "The JSON Schema."),
        optional("strict", bool, "Accepted and ignored: the schema always holds."),
    )
    response = struct(
        "ResponseFormat",
        required("type", one_of("response_format.type"), "The form of the answer."),
        optional("json_schema", json_schema, "The JSON Schema, where the type is json_schema."),
    )
    return [
        optional("response_format", response, "The form that the answer has."),
        optional("structured_outputs", structured, "The same, with more forms: one of them."),
    ]


def structured_output(body: Any) -> dict[str, Any] | None:  # noqa: ANN401 - a struct
    """Return the contract's StructuredOutput that a body asks for; None: it asks for none. Raises an ApiError."""
    wanted, response = body.structured_outputs, body.response_format
    found = None
    if wanted is not None:
        given = {name: value for name in wanted.__struct_fields__ if (value := getattr(wanted, name)) is not None}
        if len(given) != 1 or given.get("json_object") is False:
            names = ", ".join(f"{name}: False" if value is False else name for name, value in given.items())
            raise invalid("structured_outputs", f"one of {', '.join(wanted.__struct_fields__)}, got {names or 'none'}")
        ((form, value),) = given.items()
        found = _form(f"structured_outputs.{form}", form, value)
    if response is None or response.type == "text":
        if response is not None and response.json_schema is not None:
            raise invalid("response_format.json_schema", "only where the type is json_schema, got it with text")
        return found
    if found is not None:
        raise invalid("response_format", f"none beside structured_outputs, got {response.type}")
    where = "response_format.json_schema"
    if response.type == "json_object":
        if response.json_schema is not None:
            raise invalid(where, "only where the type is json_schema, got it with json_object")
        return {"json_object": {}}
    if response.json_schema is None or response.json_schema.schema is None:
        missing = where if response.json_schema is None else f"{where}.schema"
        raise invalid(missing, "required where the type is json_schema, got nothing")
    return _form(f"{where}.schema", "json", response.json_schema.schema)


def _form(where: str, form: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    if form == "choice":
        return {"choice": {"texts": value}}
    if form == "json_object":
        return {"json_object": {}}
    if not isinstance(value, str):
        return {"json_schema": {"schema": json_text(where, value, MAX_FORM_BYTES)}}
    size = len(value.encode())
    if size > MAX_FORM_BYTES:
        raise invalid(where, f"at most {MAX_FORM_BYTES} bytes, got {size}")
    if form != "json":
        return {form: {"pattern" if form == "regex" else "text": value}}
    check_depth(where, written_depth(value.encode()))
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise invalid(where, f"JSON, got an error: {error}") from None
    return {"json_schema": {"schema": value}}

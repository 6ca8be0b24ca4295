"""Bodies of OpenAI's /v1/responses, which are read as chats."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenbus.gateway import bodies
from tokenbus.gateway.bodies import Body, Content, Effort, Name, says
from tokenbus.gateway.validation import invalid
from tokenbus.settings.errors import shown

FIELDS: Mapping[str, str] = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "reasoning.effort",
}
"""Maps a field name of chats to the different name of the same field in this body."""
_LOGPROBS, _NEAR = "message.output_text.logprobs", 0.85
"""The value that asks for logprobs, and the minimum similarity (difflib's ratio) of a misspelled value."""
_Kind = Literal["function"]
_WhichTools = Literal["none", "auto", "required"]
_Status = Literal["in_progress", "completed", "incomplete"]
_Truncation = Literal["disabled", "auto"]


class InputText(Body, kw_only=True, tag_field="type", tag="input_text"):
    """A text from the client."""

    text: Annotated[Content, says("The text.")]


class OutputText(InputText, kw_only=True, tag="output_text"):
    """A text from the model."""


class Refusal(Body, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal from the model."""

    refusal: Annotated[Content, says("The text.")]


class Thought(Body, kw_only=True):
    """A thought of the model."""

    type: Annotated[Literal["reasoning_text"], says("The kind of part.")]
    text: Annotated[Content, says("The text.")]


_Parts = Annotated[list[InputText | OutputText | Refusal], Meta(max_length=1024)]
_Results = Annotated[list[InputText | OutputText], Meta(max_length=1024)]
_Thoughts = Annotated[list[Thought], Meta(max_length=64)]


class Item(Body, kw_only=True, tag_field="type"):
    """A part of a conversation."""

    id: Annotated[Name | None, says("Accepted and ignored.")] = None
    status: Annotated[
        _Status | None, says("For an assistant's last message: `incomplete` means that the answer continues it.")
    ] = None


class InputMessage(Item, kw_only=True, tag="message"):
    """A message. Clients may omit the type."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], says("The message's author.")]
    content: Annotated[Content | _Parts, says("The text, or its parts.")]


class FunctionCall(Item, kw_only=True, tag="function_call"):
    """A call that the model made."""

    call_id: Annotated[Name, says("The call_id of the item with the result.")]
    name: Annotated[Name, says("The name of the function.")]
    arguments: Annotated[Content, says("Its arguments, as the text of a JSON object.")]


class FunctionCallOutput(Item, kw_only=True, tag="function_call_output"):
    """The result of a call."""

    call_id: Annotated[Name, says("The id of the call that it answers.")]
    output: Annotated[Content | _Results, says("The result, as a text or its parts.")]


class ReasoningItem(Item, kw_only=True, tag="reasoning"):
    """The model's thoughts."""

    content: Annotated[_Thoughts | None, says("Shown by templates that show thoughts.")] = None


class ResponsesTool(bodies.Function, kw_only=True):
    """A function that the model may call."""

    type: Annotated[_Kind, says("The kind of tool.")]


class ResponsesChoice(bodies.FunctionName, kw_only=True):
    """The function that the model must call."""

    type: Annotated[_Kind, says("The kind of tool.")]


class TextFormat(Body, kw_only=True):
    """The form of the answer."""

    type: Annotated[Literal["text", "json_object", "json_schema"], says("The form of the answer.")]
    name: Annotated[Name | None, says("The schema's name; the answer repeats it, like the next two.")] = None
    description: Content | None = None
    strict: bool | None = None
    schema: Annotated[dict[str, Any] | None, says("The JSON Schema, if the type is json_schema.")] = None


class TextConfig(Body, kw_only=True):
    """How the model writes."""

    format: Annotated[TextFormat | None, says("The form of the answer.")] = None


class Reasoning(Body, kw_only=True):
    """How the model thinks."""

    effort: Annotated[Effort | None, says("A variable of the template, for models that think.")] = None


_Items = Annotated[
    list[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem], Meta(min_length=1, max_length=1024)
]
_Tools = Annotated[list[ResponsesTool], Meta(max_length=128)]
_Includes = Annotated[list[Name], Meta(max_length=16)]


class Responses(bodies.FullSampling, kw_only=True):
    """A body of /v1/responses."""

    model: bodies.Model = None
    input: Annotated[Content | _Items, says("A text, or the conversation so far.")]
    instructions: Annotated[Content | None, says("The text before the conversation.")] = None
    max_output_tokens: Annotated[int | None, says("The maximum number of tokens; absent: all that fit.")] = None
    stream: bodies.Streams = False
    tools: Annotated[_Tools | None, says("The functions that the model may call.")] = None
    tool_choice: Annotated[
        _WhichTools | ResponsesChoice | None, says("Whether functions are called, and which ones.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, says("Whether `required` may give several calls.")] = True
    text: Annotated[TextConfig | None, says("How the model writes.")] = None
    reasoning: Annotated[Reasoning | None, says("How the model thinks.")] = None
    include: Annotated[_Includes | None, says(f"With {_LOGPROBS}, tokens have logprobs.")] = None
    top_logprobs: Annotated[int | None, says("The number of alternatives of each token; only with logprobs.")] = None
    truncation: Annotated[_Truncation | None, says("auto: a prompt that is too long is cut on the left.")] = None
    chat_template_kwargs: bodies.Variables = None
    metadata: Annotated[dict[str, Any] | None, says("The answer repeats it.")] = None


_UNFINISHED = ("in_progress", "incomplete")
_SAME = (*bodies.FullSampling.__struct_fields__, "model", "stream", "parallel_tool_calls", "chat_template_kwargs")


def typed(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a body in which items without a type have the type `message`."""
    items = value.get("input") if isinstance(value, dict) else None
    if not isinstance(items, list):
        return value
    named = [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item and "type" not in item else item
        for item in items
    ]
    return {**value, "input": named}


def chat_of(body: Responses) -> bodies.Chat:
    """Return a body as a chat. Raises an ApiError that names the field of this body."""
    included = body.include or ()
    has_logprobs = _LOGPROBS in included
    for index, each in enumerate(included):
        if each != _LOGPROBS and difflib.SequenceMatcher(None, each, _LOGPROBS).ratio() > _NEAR:
            raise invalid(f"include[{index}]", f"{_LOGPROBS} is the one with logprobs, got {shown(each)}")
    if body.top_logprobs and not has_logprobs:
        raise invalid("top_logprobs", f"only with {_LOGPROBS} in include, got {body.top_logprobs} without")
    choice = body.tool_choice
    last = body.input[-1] if body.input else None
    continues = isinstance(last, InputMessage) and last.role == "assistant" and last.status in _UNFINISHED
    return bodies.Chat(
        messages=_messages(body),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        max_tokens=body.max_output_tokens,
        tools=list(map(_tool, body.tools or ())) or None,
        tool_choice=bodies.FunctionChoice(function=choice) if isinstance(choice, ResponsesChoice) else choice,
        response_format=_form(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        **{name: getattr(body, name) for name in _SAME},
    )


def echoed(body: Responses) -> dict[str, Any]:
    """Return the members of a body that the answer repeats, with defaults for absent members."""
    text: dict[str, Any] = {} if body.text is None else _given(body.text)
    choice = body.tool_choice or "auto"
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice if isinstance(choice, str) else _given(choice),
        "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
    }


def _given(value: Body) -> dict[str, Any]:
    return {name: member for name, member in msgspec.to_builtins(value).items() if member is not None}


def _messages(body: Responses) -> list[bodies.Message]:
    messages = [bodies.Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, bodies.Message(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, FunctionCallOutput):
            output = item.output
            text = output if isinstance(output, str) else "\n".join(part.text for part in output)
            messages.append(bodies.Message(role="tool", content=text, tool_call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(bodies.Message(role=item.role, content=_content(item.content)))
        else:
            _add_to_answer(messages, item)
    return messages


def _add_to_answer(messages: list[bodies.Message], item: InputMessage | FunctionCall | ReasoningItem) -> None:
    """Add thoughts, a text or a call to the assistant's last message, or begin such a message."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if isinstance(item, FunctionCall):
        function = bodies.CalledFunction(name=item.name, arguments=item.arguments)
        last = last or _begun(messages)
        call = bodies.ToolCall(id=item.call_id, type="function", function=function)
        last.tool_calls = [*(last.tool_calls or ()), call]
    elif isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or ())
        if text:
            _begun(messages).reasoning = text
    else:
        if last is None or last.content is not None or last.tool_calls:
            last = _begun(messages)
        last.content = _content(item.content)


def _begun(messages: list[bodies.Message]) -> bodies.Message:
    messages.append(bodies.Message(role="assistant"))
    return messages[-1]


def _content(given: str | Sequence[InputText | OutputText | Refusal]) -> str | list[bodies.ContentPart | str]:
    if isinstance(given, str):
        return given
    texts = [part.refusal if isinstance(part, Refusal) else part.text for part in given]
    return texts[0] if len(texts) == 1 else [*texts]


def _tool(tool: ResponsesTool) -> bodies.Tool:
    members = {name: getattr(tool, name) for name in bodies.Function.__struct_fields__}
    return bodies.Tool(function=bodies.Function(**members))


def _form(text: TextConfig | None) -> bodies.ResponseFormat | None:
    form = None if text is None else text.format
    if form is None:
        return None
    if form.schema is not None and form.type != "json_schema":
        raise invalid("text.format.schema", f"only if the type is json_schema, got it with {form.type}")
    schema = bodies.ResponseSchema(schema=form.schema) if form.type == "json_schema" else None
    return bodies.ResponseFormat(type=form.type, json_schema=schema)

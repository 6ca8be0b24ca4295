"""Bodies of Anthropic's /v1/messages, which are read as chats."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta

from tokenbus.gateway import bodies
from tokenbus.gateway.bodies import Body, Content, Description, Effort, Label, Name, Temperature, says
from tokenbus.gateway.validation import invalid

FIELDS: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "tool_choice.function.name": "tool_choice.name",
    "prompt": "messages",
}
"""Maps a field name of chats to the different name of the same field in this body."""
_BILLING = "x-anthropic-billing-header"
"""The beginning of a text that Claude Code adds to the system prompt and changes in every request.

As in vLLM, the text is dropped.
"""
_Choice = Literal["auto", "any", "tool", "none"]
_Thinking = Literal["enabled", "disabled", "adaptive"]


class Block(Body, kw_only=True, tag_field="type"):
    """One part of a message."""


class TextBlock(Block, kw_only=True, tag="text"):
    """A text."""

    text: Annotated[Content, says("The text.")]


class ToolUse(Block, kw_only=True, tag="tool_use"):
    """A call that the assistant made."""

    id: Annotated[Name, says("The tool_use_id of the block with the result.")]
    name: Annotated[Name, says("The name of the tool.")]
    input: Annotated[dict[str, Any], says("Its arguments.")]


_Texts = Annotated[list[TextBlock], Meta(max_length=1024)]


class ToolResult(Block, kw_only=True, tag="tool_result"):
    """The result of a call."""

    tool_use_id: Annotated[Name, says("The id of the call that it answers.")]
    content: Annotated[Content | _Texts | None, says("The result, as a text or its parts.")] = None


class Thinking(Block, kw_only=True, tag="thinking"):
    """The assistant's thoughts."""

    thinking: Annotated[Content, says("Shown by templates that show thoughts.")]


class RedactedThinking(Block, kw_only=True, tag="redacted_thinking"):
    """The assistant's encrypted thoughts."""


_Blocks = Annotated[list[TextBlock | ToolUse | ToolResult | Thinking | RedactedThinking], Meta(max_length=1024)]


class Turn(Body):
    """A message."""

    role: Annotated[Literal["user", "assistant", "system"], says("The message's author.")]
    content: Annotated[Content | _Blocks, says("The text, or its blocks.")]


class MessagesTool(Body, kw_only=True):
    """A tool that the model may call."""

    name: Annotated[Label, says("Its name.")]
    description: Annotated[Description | None, says("What it does.")] = None
    input_schema: Annotated[dict[str, Any], says("The JSON Schema of its arguments.")]
    type: Annotated[Literal["custom"] | None, says("The kind of tool.")] = None
    strict: Annotated[bool | None, says("Passed to the template; a forced call always follows the schema.")] = None


class MessagesChoice(Body, kw_only=True):
    """Whether tools are called, and which ones."""

    type: Annotated[_Choice, says("As the model decides, any tool, the named tool, or none.")]
    name: Annotated[Label | None, says("One of the tools, if the type is tool.")] = None
    disable_parallel_tool_use: Annotated[bool | None, says("Whether `any` gives only one call.")] = None


class ThinkingConfig(Body, kw_only=True):
    """Whether the model thinks."""

    type: Annotated[_Thinking, says("`disabled` means an effort of none; with the others, the model decides.")]


class OutputFormat(Body, kw_only=True):
    """The form of the answer."""

    type: Annotated[Literal["json_schema"], says("The form of the answer.")]
    schema: Annotated[dict[str, Any], says("The JSON Schema.")]


class OutputConfig(Body, kw_only=True):
    """How the model answers."""

    effort: Annotated[Effort | None, says("A variable of the template, for models that think.")] = None
    format: Annotated[OutputFormat | None, says("The form of the answer.")] = None


_Turns = Annotated[list[Turn], Meta(min_length=1, max_length=1024)]
_Tools = Annotated[list[MessagesTool], Meta(max_length=128)]


class TokenCount(Body, kw_only=True):
    """A body of /v1/messages/count_tokens."""

    model: bodies.Model = None
    messages: Annotated[_Turns, says("The chat so far; an assistant's last message is continued.")]
    system: Annotated[Content | _Texts | None, says("The text before the chat.")] = None
    tools: Annotated[_Tools | None, says("The tools that the model may call.")] = None
    tool_choice: Annotated[MessagesChoice | None, says("Whether tools are called, and which ones.")] = None
    thinking: Annotated[ThinkingConfig | None, says("Whether the model thinks.")] = None
    output_config: Annotated[OutputConfig | None, says("How the model answers.")] = None
    chat_template_kwargs: Annotated[bodies.Variables, says("Variables of the template.")] = None


class Messages(TokenCount, kw_only=True):
    """A body of /v1/messages."""

    max_tokens: Annotated[int, says("The maximum number of tokens of the answer.")]
    stop_sequences: Annotated[bodies.Stops | None, says("Texts that end the answer, and are cut off.")] = None
    stream: bodies.Streams = False
    temperature: Annotated[Temperature | None, says("Divides the logits; 0: always the most probable token.")] = None
    top_k: Annotated[bodies.TopK | None, says("How many of the most probable tokens are kept; -1 or 0: all.")] = None
    top_p: Annotated[bodies.TopP | None, says("The probability mass that is kept.")] = None
    vllm_xargs: Annotated[bodies.EngineArguments | None, says("Arguments of the engine's extensions.")] = None
    cache_salt: Annotated[bodies.Word | None, says("Only prompts with the same salt share cached states.")] = None
    session_id: bodies.SessionId = None


_BLOCKS: Mapping[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResult),
    "assistant": (TextBlock, ToolUse, Thinking, RedactedThinking),
    "system": (TextBlock,),
}
_SAME = ("max_tokens", "stream", "temperature", "top_k", "top_p", "vllm_xargs", "cache_salt", "session_id")


def chat_of(body: TokenCount) -> bodies.Chat:
    """Return a body as a chat. Raises an ApiError that names the field of this body."""
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    system = "".join(each for each in texts if not each.startswith(_BILLING))
    messages = [bodies.Message(role="system", content=system)] if system else []
    for index, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{index}].content")
    config, choice = body.output_config or OutputConfig(), body.tool_choice
    is_disabled = body.thinking is not None and body.thinking.type == "disabled"
    last = messages[-1] if messages else None
    continues = last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls
    form = None
    if config.format is not None:
        schema = bodies.ResponseSchema(schema=config.format.schema)
        form = bodies.ResponseFormat(type="json_schema", json_schema=schema)
    chat = bodies.Chat(
        model=body.model,
        messages=messages,
        tools=list(map(_tool, body.tools or ())) or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        reasoning_effort="none" if is_disabled else config.effort,
        response_format=form,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if isinstance(body, Messages):
        for name in _SAME:
            setattr(chat, name, getattr(body, name))
        chat.stop = body.stop_sequences
    return chat


def _messages(turn: Turn, where: str) -> Iterator[bodies.Message]:
    """Yield the messages of a turn: first one message for each result of a tool, then the other parts."""
    if isinstance(turn.content, str):
        yield bodies.Message(role=turn.role, content=turn.content)
        return
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(turn.content):
        if not isinstance(block, _BLOCKS[turn.role]):
            kind = block.__struct_config__.tag
            raise invalid(
                f"{where}[{index}]", f"a block that is allowed in a message of the role {turn.role}, got {kind}"
            )
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            function = bodies.CalledFunction(name=block.name, arguments=orjson.dumps(block.input).decode())
            calls.append(bodies.ToolCall(id=block.id, type="function", function=function))
        elif isinstance(block, ToolResult):
            result = block.content
            text = result if isinstance(result, str) else "\n".join(each.text for each in result or ())
            yield bodies.Message(role="tool", content=text, tool_call_id=block.tool_use_id)
    if texts or thoughts or calls:
        yield bodies.Message(
            role=turn.role,
            content=texts[0] if len(texts) == 1 else [*texts] or None,
            reasoning="".join(thoughts) or None,
            tool_calls=calls or None,
        )


def _tool(tool: MessagesTool) -> bodies.Tool:
    parameters = {"type": "object", **tool.input_schema}
    function = bodies.Function(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)
    return bodies.Tool(function=function)


def _choice(choice: MessagesChoice) -> Literal["none", "auto", "required"] | bodies.FunctionChoice:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "required if the type is tool, got nothing")
        return bodies.FunctionChoice(function=bodies.FunctionName(name=choice.name))
    return "required" if choice.type == "any" else choice.type

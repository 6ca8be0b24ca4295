"""The types of request bodies, with the descriptions and fixed bounds of their fields for the OpenAPI document."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

COMPLETION_TOKENS = 16
MAX_FORM_CHARACTERS = 65_536
MOST_NAMED, MOST_MASKED = 128, 1024
"""Maximum number of token ids whose logprobs are requested, and maximum number of token ids in a mask."""
MAX_BIASED, MAX_BIAS = 1024, 100
"""Maximum number of biased tokens, and the largest bias. As in vLLM, larger biases are clipped."""


def says(meaning: str, **schema: Any) -> Meta:  # noqa: ANN401 - JSON Schema
    """Return the OpenAPI description of a field, with the parts of the schema that the field's type does not imply."""
    return Meta(description=meaning, extra_json_schema=schema or None)


Text = Annotated[str, Meta(min_length=1, max_length=4_194_304)]
Content = Annotated[str, Meta(max_length=4_194_304)]
Name = Annotated[str, Meta(max_length=256)]
Label = Annotated[str, Meta(min_length=1, max_length=256)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
"""A short text. `RequestTypes` bounds the number of bytes of such a text."""
Stop = Annotated[str, Meta(min_length=1, max_length=4096)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FormText = Annotated[str, Meta(min_length=1, max_length=MAX_FORM_CHARACTERS)]
Description = Annotated[str, Meta(max_length=MAX_FORM_CHARACTERS)]
Pattern = Annotated[str, Meta(min_length=1, max_length=4096)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=100)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Side = Literal["left", "right"]
_Continue = Literal["any", "same_weights", "off"]
_WhichTools = Literal["none", "auto", "required"]
_Kind = Literal["function"]
_TextKind = Literal["text", "input_text", "output_text", "refusal", "thinking"]


class Body(Struct, kw_only=True):
    """An object of a body."""


class ContentPart(Body):
    """One part of a message's content."""

    type: Annotated[_TextKind, says("The kind of part; each kind is a text for the model.")]
    text: Annotated[Content | None, says("The text.")] = None
    refusal: Annotated[Content | None, says("The text of a refusal.")] = None
    thinking: Annotated[Content | None, says("The text of a thought.")] = None


class CalledFunction(Body, kw_only=True):
    """A function that the assistant called."""

    name: Annotated[Name, says("Its name.")]
    arguments: Annotated[Content | dict[str, Any] | None, says("Its arguments: a JSON object, or its text.")] = None


class ToolCall(Body, kw_only=True):
    """A tool call that the assistant made."""

    id: Annotated[Name | None, says("The tool_call_id of the message with the result.")] = None
    type: Annotated[_Kind | None, says("The kind of tool.")] = None
    function: Annotated[CalledFunction, says("The function.")]


_Parts = Annotated[list[ContentPart | str], Meta(max_length=1024)]
_Calls = Annotated[list[ToolCall], Meta(max_length=128)]
_Thoughts = Annotated[Content | None, says("The assistant's thoughts, for templates that show them.")]


class Message(Body, kw_only=True):
    """A message of a chat."""

    role: Annotated[
        Label, says("The message's author, in the terms of the template; function is an older name of tool.")
    ]
    content: Annotated[Content | _Parts | None, says("The text, or its parts.")] = None
    name: Annotated[Name | None, says("The author's name, for templates that show it.")] = None
    tool_calls: Annotated[_Calls | None, says("The functions that the assistant called.")] = None
    tool_call_id: Annotated[Name | None, says("The id of the call that a tool's message answers.")] = None
    reasoning: _Thoughts = None
    reasoning_content: _Thoughts = None
    function_call: Annotated[CalledFunction | None, says("The older form of tool_calls.")] = None


class Function(Body, kw_only=True):
    """The description of a function for the model."""

    name: Annotated[Label, says("Its name.")]
    description: Annotated[Description | None, says("What it does.")] = None
    parameters: Annotated[dict[str, Any] | None, says("The JSON Schema of its arguments.")] = None
    strict: Annotated[bool | None, says("Passed to the template; a forced call always follows the schema.")] = None


class Tool(Body, kw_only=True):
    """A function that the model may call."""

    type: Annotated[_Kind | None, says("The kind of tool.")] = None
    function: Annotated[Function, says("The function.")]


class FunctionName(Body):
    """A function, given by its name."""

    name: Annotated[Label, says("One of the functions of tools.")]


class FunctionChoice(Body, kw_only=True):
    """The function that the model must call."""

    type: Annotated[_Kind | None, says("The kind of tool.")] = None
    function: Annotated[FunctionName, says("The function.")]


Conversation = Annotated[list[Message], Meta(min_length=1, max_length=1024)]
_ToolList = Annotated[list[Tool], Meta(max_length=128)]
_Functions = Annotated[list[Function], Meta(max_length=128)]
_Tools = Annotated[_ToolList | None, says("The functions that the model may call.")]
_Begins = Annotated[bool | None, says("Whether the chat ends where the assistant begins.")]
_Continues = Annotated[bool | None, says("Whether the answer continues the last message.")]
Model = Annotated[Name | None, says("A model that /v1/models lists; absent: the first one.")]
Streams = Annotated[bool | None, says("Whether the answer is sent as server-sent events.")]
Scored = Annotated[int | None, says("The number of alternatives of each token; 0: only the token's own logprob.")]
PromptScored = Annotated[int | None, says("The number of alternatives of each token of the prompt.")]
ScoredIds = Annotated[
    list[int] | None, says("Score these alternatives of each token instead of the most probable ones.")
]
OtherLogprobs = Annotated[bool | None, says("Adds token_extras, with each token's other logprob.")]
Entropies = Annotated[bool | None, says("Adds token_extras, with the entropy at each token.")]
LogprobsOf = Annotated[list[int] | None, says("Adds token_extras, with these tokens' logprobs.")]
MaskBound = Annotated[
    int | None, says("Adds token_extras, with up to this many of the tokens that could have been sampled.")
]
SessionId = Annotated[str | None, says("The label of the session, at most 128 bytes of printable text.")]
_Special = Annotated[bool | None, says("Whether the model's special tokens are added.")]
_DocumentList = Annotated[list[dict[str, str]], Meta(max_length=256)]
_Documents = Annotated[_DocumentList | None, says("Documents, for templates that show them.")]
Variables = Annotated[dict[str, Any] | None, says("Variables of the template.")]
Stops = Annotated[list[Stop], Meta(max_length=16)]
_EngineArgument = str | int | float
EngineArguments = dict[str, _EngineArgument | list[_EngineArgument]]
_BadWords = Annotated[list[Word], Meta(max_length=256)]
_OutputTexts = Annotated[list[Label], Meta(min_length=1, max_length=1024)]


class StructuredOutputs(Body, kw_only=True):
    """The form of the answer, in the format of vLLM's API."""

    json: Annotated[FormText | dict[str, Any] | None, says("A JSON Schema, as an object or its text.")] = None
    json_object: Annotated[bool | None, says("Whether the output is any JSON object.")] = None
    regex: Annotated[Pattern | None, says("A regular expression that matches the output.")] = None
    choice: Annotated[_OutputTexts | None, says("The texts to choose from.")] = None
    grammar: Annotated[FormText | None, says("A grammar, as the engine reads it.")] = None
    structural_tag: Annotated[FormText | dict[str, Any] | None, says("Marks, and the form of the text after each.")] = (
        None
    )


class ResponseSchema(Body, kw_only=True):
    """A JSON Schema with a name."""

    schema: Annotated[dict[str, Any] | None, says("The JSON Schema.")] = None


class ResponseFormat(Body, kw_only=True):
    """The form of the answer, in the format of OpenAI's API."""

    type: Annotated[Literal["text", "json_object", "json_schema", "structural_tag"], says("The form of the answer.")]
    json_schema: Annotated[ResponseSchema | None, says("The JSON Schema, if the type is json_schema.")] = None
    format: Annotated[dict[str, Any] | None, says("For a structural_tag: its format, as the engine reads it.")] = None
    structures: Annotated[list[Any] | None, says("The older form of a structural_tag, with triggers.")] = None
    triggers: Annotated[list[str] | None, says("The texts after which a structure may begin.")] = None


class StreamOptions(Body, kw_only=True):
    """How an answer is streamed."""

    include_usage: Annotated[bool | None, says("Whether a last chunk has the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, says("Whether each chunk has the current usage.")] = None


class BusOptions(Body, kw_only=True):
    """How the bus treats a request."""

    continue_: Annotated[_Continue | None, says("Whether another worker may continue it.")] = field(
        default="any", name="continue"
    )


class Sampling(Body, kw_only=True):
    """Sampling parameters of all routes that generate tokens."""

    temperature: Annotated[Temperature | None, says("Divides the logits; 0: always the most probable token.")] = None
    top_p: Annotated[TopP | None, says("The probability mass that is kept.")] = None
    stop: Annotated[Stop | Stops | None, says("Texts that end the answer, and are cut off.")] = None
    seed: Annotated[Int64 | None, says("Makes sampling repeatable; choice i of a prompt uses seed + i.")] = None


class EngineSampling(Sampling, kw_only=True):
    """Further sampling parameters, common to all APIs of vLLM."""

    top_k: Annotated[TopK | None, says("How many of the most probable tokens are kept; -1 or 0: all.")] = None
    ignore_eos: Annotated[bool | None, says("Generates past the model's own end of text.")] = False
    min_p: Annotated[Share | None, says("The least share of the top probability kept.")] = None
    presence_penalty: Annotated[Penalty | None, says("Subtracted from the logits of tokens in the output.")] = None
    frequency_penalty: Annotated[
        Penalty | None, says("Subtracted from the logits once for each occurrence in the output.")
    ] = None
    repetition_penalty: Annotated[Repetition | None, says("Divides the logits of earlier tokens.")] = None
    logit_bias: Annotated[Any, says("Added to tokens' logits, by token id.")] = None
    min_tokens: Annotated[int | None, says("The minimum number of tokens before a stop ends a choice.")] = None
    stop_token_ids: Annotated[list[int] | None, says("Tokens that end the answer, whose text is cut off.")] = None
    include_stop_str_in_output: Annotated[bool | None, says("Whether an answer contains the stop that ends it.")] = (
        False
    )
    skip_special_tokens: Annotated[bool | None, says("Whether special tokens are left out of the text.")] = True
    bad_words: Annotated[_BadWords | None, says("Texts that are not generated.")] = None
    allowed_token_ids: Annotated[list[int] | None, says("The only tokens to choose from.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, says("The form of the answer, in vLLM terms.")] = None


class FullSampling(EngineSampling, kw_only=True):
    """Parameters of completions, chats and responses."""

    priority: Annotated[Int64 | None, says("The priority: the lowest comes first; absent: 0.")] = None
    vllm_xargs: Annotated[EngineArguments | None, says("Arguments of the engine's extensions.")] = None
    cache_salt: Annotated[Word | None, says("Prompts with the same salt share cached states.")] = None
    session_id: SessionId = None


class Generation(FullSampling, kw_only=True):
    """Fields of completions and chats."""

    model: Model = None
    n: Annotated[int, says("How many choices each prompt has.")] = 1
    stream: Streams = False
    stream_options: Annotated[StreamOptions | None, says("Only if stream is true.")] = None
    include_draft_logprobs: Annotated[bool | None, says("Adds draft_logprobs to logprobs.")] = False
    return_token_ids: Annotated[bool | None, says("Adds token_ids and prompt_token_ids.")] = False
    return_tokens_as_token_ids: Annotated[bool | None, says("Names tokens by their ids: token_id:5.")] = None
    return_token_offsets: Annotated[bool | None, says("Adds token_offsets if the body is rendered.")] = False
    prompt_logprobs: PromptScored = None
    prompt_logprob_token_ids: Annotated[
        list[int] | None, says("Score these tokens instead of the most probable ones.")
    ] = None
    logprob_token_ids: ScoredIds = None
    return_other_logprobs: OtherLogprobs = False
    return_entropies: Entropies = False
    return_logprobs_of: LogprobsOf = None
    return_mask: MaskBound = None
    return_columns: Annotated[bool | None, says("Sends logprobs as base64 columns instead.")] = False
    truncate_prompt_tokens: Annotated[int | None, says("How many tokens of a prompt are kept; -1: as many as fit.")] = (
        None
    )
    truncation_side: Annotated[
        _Side | None, says("The side at which a prompt that is too long is cut; absent: left.")
    ] = None
    request_id: Annotated[Label | None, says("The answer's id without `cmpl-` or `chatcmpl-`.")] = None
    tokenbus: Annotated[BusOptions | None, says("How the bus treats the request.")] = None
    response_format: Annotated[ResponseFormat | None, says("The form of the answer.")] = None


class Completion(Generation, kw_only=True):
    """A body of /v1/completions."""

    prompt: Annotated[Any, says("A text, token ids, or several of either.")]
    max_tokens: Annotated[int | None, says("The maximum number of tokens of a choice.")] = COMPLETION_TOKENS
    add_special_tokens: _Special = True
    logprobs: Scored = None
    echo: Annotated[
        bool | None, says("Whether the text begins with the prompt, and the logprobs with those of the prompt.")
    ] = False
    best_of: Annotated[int | None, says("At most n, because choices are not selected.")] = None


class Chat(Generation, kw_only=True):
    """A body of /v1/chat/completions."""

    messages: Annotated[Conversation, says("The chat so far.")]
    tools: _Tools = None
    functions: Annotated[_Functions | None, says("The older name of tools.")] = None
    add_generation_prompt: _Begins = True
    continue_final_message: _Continues = False
    add_special_tokens: _Special = False
    documents: _Documents = None
    chat_template_kwargs: Variables = None
    tool_choice: Annotated[
        _WhichTools | FunctionChoice | None, says("Whether functions are called, and which ones.")
    ] = None
    function_call: Annotated[Literal["none", "auto"] | FunctionName | None, says("The older tool_choice.")] = None
    parallel_tool_calls: Annotated[bool | None, says("Whether `required` may give several calls.")] = True
    max_completion_tokens: Annotated[int | None, says("The maximum number of tokens; absent: all that fit.")] = None
    max_tokens: Annotated[int | None, says("The older name of max_completion_tokens.")] = None
    logprobs: Annotated[bool | None, says("Whether tokens have logprobs.")] = False
    top_logprobs: Annotated[int | None, says("The number of alternatives of each token; only with logprobs.")] = None
    reasoning_effort: Annotated[Effort | None, says("A variable of the template, for models that think.")] = None
    echo: Annotated[bool | None, says("Whether the text begins with the text of the last message.")] = False
    include_reasoning: Annotated[bool | None, says("Ignored, because a model's thoughts are part of its text.")] = None
    modalities: Annotated[list[Literal["text"]] | None, says("Answers are texts.")] = None


class ChatBatch(Chat, kw_only=True):
    """A body of /v1/chat/completions/batch."""

    messages: Annotated[list[Conversation], says("The chats, each with a choice.")]  # type: ignore[assignment]


class Inspection(Sampling, kw_only=True):
    """A body of /inspect."""

    prompt: Annotated[Text, says("The text to continue.")]
    max_tokens: Annotated[int | None, says("The maximum number of tokens.")] = 128
    top_logprobs: Annotated[int | None, says("The number of alternatives of each token.")] = 10
    drafts: Annotated[bool | None, says("Whether rows have the draft model's proposals.")] = True
    return_entropies: Annotated[bool | None, says("Whether each token has its entropy; an engine may refuse.")] = False
    session_id: SessionId = None


class Tokenization(Body, kw_only=True):
    """A body of /tokenize."""

    model: Annotated[Name | None, says("A model that /v1/models lists.")] = None
    prompt: Annotated[Text | None, says("The text; either this or messages.")] = None
    messages: Annotated[Conversation | None, says("The chat; either this or prompt.")] = None
    tools: _Tools = None
    add_generation_prompt: _Begins = True
    continue_final_message: _Continues = False
    add_special_tokens: _Special = None
    documents: _Documents = None
    chat_template_kwargs: Variables = None
    return_token_strs: Annotated[bool | None, says("Adds token_strs: the text of each token.")] = False


class Detokenization(Body, kw_only=True):
    """A body of /detokenize."""

    model: Annotated[Name | None, says("A model that /v1/models lists.")] = None
    tokens: Annotated[list[int], says("The token ids.")]

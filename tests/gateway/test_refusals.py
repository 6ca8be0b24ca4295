"""Bodies that are refused: each error has status 400, and names the field, the limit and the value in one line."""

from typing import Any

import pytest

from tests.gateway.reading import SMALL, read, reading
from tokenbus.gateway.errors import ApiError

READER = reading(context=9, given=SMALL)
FORMS = "json, json_object, regex, choice, grammar, structural_tag"
PARTS = "a structural_tag has a format, or structures and triggers"
LOGPROBS = "message.output_text.logprobs"
LARGE = "\u00e9" * 2049
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}
CITIES: dict[str, Any] = {"$defs": {"City": {"type": "string"}}}
OTHERS: dict[str, Any] = {"$defs": {"City": {"type": "null"}}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
OF_MESSAGES: dict[str, Any] = {"tools": [{"name": "f", "input_schema": {}}]}
OF_RESPONSES: dict[str, Any] = {"tools": [{"type": "function", "name": "f"}]}


def output(**wanted: object) -> dict[str, Any]:
    return {"structured_outputs": wanted}


def form(kind: str, **fields: object) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def said(content: object, role: str = "user", **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


def heard(**item: object) -> dict[str, Any]:
    return {"input": [item]}


def text_form(kind: str, **fields: object) -> dict[str, Any]:
    return {"text": {"format": {"type": kind, **fields}}}


def tools(*parameters: object, **fields: object) -> dict[str, Any]:
    functions = [{"function": {"name": f"f{place}", "parameters": each}} for place, each in enumerate(parameters)]
    return {"tools": functions, **fields}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "completion": [
        ({"n": 6}, "n: expected int <= 2, got 6"),
        ({"n": True}, "n: expected int | null, got True"),
        ({"seed": 2**64}, "seed: expected int <= 9223372036854775807, got 18446744073709551616"),
        ({"top_p": 0}, "top_p: expected float > 0.0, got 0"),
        ({"stop": ["a", ""]}, "stop[1]: expected str of length >= 1, got a length of 0"),
        ({"stop": 5}, "stop: expected str | array | null, got 5"),
        ({"stop": LARGE}, "stop: at most 4096 bytes, got 4098"),
        ({"bad_words": ["a", "\u00e9" * 129]}, "bad_words[1]: at most 256 bytes, got 258"),
        ({"min_tokens": 13}, "min_tokens: expected int <= 12, got 13"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]: expected int >= 0, got -1"),
        ({"logit_bias": [1]}, "logit_bias: expected object | null, got [1]"),
        ({"logit_bias": {"a": 1, "5": 1, "": 1}}, "logit_bias: expected token ids in digits, got 'a', ''"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias: expected int <= 2147483646, got 9999999999"),
        ({"logit_bias": {"7": "a"}}, "logit_bias.7: expected float, got 'a'"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias: expected object of length <= 1024, got a length of 1025"),  # noqa: E501
        ({"prompt": None}, "prompt: required, got nothing"),
        ({"prompt": [1, 2, 3, 4]}, "prompt: expected array of length <= 3, got a length of 4"),
        ({"prompt": [[1], [2, -10]]}, "prompt[1][1]: expected int >= 0, got -10"),
        ({"prompt": ["a", "b", "c"]}, "prompt: expected array of length <= 2, got a length of 3"),
        ({"logprob": 1}, "logprob: no such field (did you mean logprobs?), got 1"),
        ({"topLogprobs": 1}, "topLogprobs: no such field, got 1"),
        ({"temprature": False}, "temprature: no such field (did you mean temperature?), got False"),
        ({"stream_options": {"include-usages": 1}}, "stream_options.include-usages: no such field (did you mean include_usage?), got 1"),  # noqa: E501
        ({"logprob_token_ids": [1]}, "logprob_token_ids: only with logprobs, got it without"),
        ({"logprob_token_ids": [1], "logprobs": 1, "echo": True}, "logprob_token_ids: only without echo, got it with"),
        ({"logprob_token_ids": [1], "logprobs": 1, "return_columns": True}, "return_columns: none with logprob_token_ids, got it"),  # noqa: E501
        ({"return_logprob": True}, "return_logprob: no such field (did you mean return_logprobs_of?), got True"),
        ({"logits_probs": 5}, "logits_probs: no such field, got 5"),
        ({"extra_body": {"logprobs": 5}}, "extra_body: not offered, got {'logprobs': 5}"),
        ({"top_logprobs_num": 5}, "top_logprobs_num: no such field, got 5"),
        ({f"a{number}": 1 for number in range(65)}, "the body: at most 64 unknown fields, got more"),
        ({"suffix": "a"}, "suffix: not offered, got 'a'"),
        ({"guided_json": {"a": 1}}, "guided_json: not offered, got {'a': 1}"),
        ({"vllm_xargs": {"a": [None]}}, "vllm_xargs: expected int | float | str, got {'a': [None]}"),
        ({"use_beam_search": True}, "use_beam_search: not offered, got True"),
        ({"n": 2, "best_of": 3}, "best_of: at most n, 2, as choices are not selected, got 3"),
        ({"max_tokens": 10}, "max_tokens: at most 9, the model's context, got 10"),
        ({"max_tokens": 0}, "max_tokens: at least 1 without echo or prompt_logprobs, got 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: expected int <= 20, got 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: only without stream, got it with"),
        ({"prompt_logprob_token_ids": []}, "prompt_logprob_token_ids: expected array of length >= 1, got a length of 0"),  # noqa: E501
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: -1 or at least 1, got 0"),
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens: at most 9, the model's context, got 10"),
        (output(), f"structured_outputs: one of {FORMS}, got none"),
        (output(regex="a", choice=["b"]), f"structured_outputs: one of {FORMS}, got regex, choice"),
        (output(json_object=False), f"structured_outputs: one of {FORMS}, got json_object: False"),
        (output(json="{"), "structured_outputs.json: JSON, got an error: unexpected end of data: line 1 column 2 (char 1)"),  # noqa: E501
        (output(json={"const": "x" * 300_000}), "structured_outputs.json: at most 262144 bytes, got 300012"),
        (output(json=DEEP), "structured_outputs: nested at most 128 deep, got 302"),
        (form("json_object") | output(regex="a"), "response_format: none with structured_outputs, got json_object"),
        (form("structural_tag"), f"response_format: {PARTS}, got neither"),
        (form("structural_tag", triggers=["a"]), f"response_format: {PARTS}, got triggers"),
        (form("text", format={}), "response_format.format: only if the type is structural_tag, got it with text"),
        (form("json_schema"), "response_format.json_schema: required if the type is json_schema, got nothing"),
        (form("json_schema", json_schema={"name": "n"}), "response_format.json_schema.schema: required if the type is json_schema, got nothing"),  # noqa: E501
        (form("text", json_schema={"name": "n"}), "response_format.json_schema: only if the type is json_schema, got it with text"),  # noqa: E501
    ],
    "chat": [
        ({"max_completion_tokens": 10}, "max_completion_tokens: at most 9, the model's context, got 10"),
        ({"top_logprobs": 1}, "top_logprobs: only with logprobs: true, got 1 without"),
        ({"prompt_logprobs": 1, "prompt_logprob_token_ids": [1]}, "prompt_logprobs: 0 or absent with prompt_logprob_token_ids, got 1"),  # noqa: E501
        ({"echo": True, "tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "echo: only where no function may be called, got it with tools"),  # noqa: E501
        ({"toplogprobs": 3, "logprobs": True}, "toplogprobs: no such field (did you mean top_logprobs?), got 3"),
        ({"modalities": ["text", "audio"]}, "modalities[1]: one of 'text', got 'audio'"),
        ({"truncation_side": "middle"}, "truncation_side: one of 'left', 'right', got 'middle'"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: expected int >= -1, got -2"),
        (form("xml"), "response_format.type: one of 'text', 'json_object', 'json_schema', 'structural_tag', got 'xml'"),
        (said("a", ""), "messages[0].role: expected str of length >= 1, got a length of 0"),
        (said([{"type": "text"}]), "messages[0].content[0].text: required, got nothing"),
        (said([{"type": "refusal", "text": "a"}]), "messages[0].content[0].refusal: required, got nothing"),
        (said("a", "tool", tool_call="1"), "messages[0].tool_call: no such field (did you mean tool_calls?), got '1'"),
        ({"documents": [{"title": 1}]}, "documents[0]: expected str, got {'title': 1}"),
        ({"continue_final_message": True}, "continue_final_message: only if add_generation_prompt is false, got both"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: must not be the name of a field, a special token or a function of the template"),  # noqa: E501
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs: at most 65536 bytes, got 70008"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name: required, got nothing"),
        ({"tools": [{"function": {"name": "f"}, "type": "custom"}]}, "tools[0].type: one of 'function', got 'custom'"),
        (tools(*[{}] * 129), "tools: expected array of length <= 128, got a length of 129"),
        (tools({"const": "x" * 300_000}), "tools: at most 262144 bytes, got 300091"),
        (tools(DEEP), "tools: nested at most 128 deep, got 304"),
        (tools(CITIES, OTHERS, tool_choice="required"), "tools: one definition of a name in $defs, got two of 'City' that differ"),  # noqa: E501
        (tools({"$defs": []}, tool_choice="required"), "tools: objects as the $defs of parameters, got list for 'f0'"),
        ({"tool_choice": "some"}, "tool_choice: one of 'none', 'auto', 'required', got 'some'"),
        ({"tool_choice": "auto"}, "tool_choice: only with tools, got it without"),
        ({"tool_choice": {"function": {}}}, "tool_choice.function.name: required, got nothing"),
        (tools({}, {}, tool_choice={"function": {"name": "g"}}), "tool_choice.function.name: one of f0, f1, got 'g'"),
        (tools({}, tool_choice="required") | output(regex="a"), "structured_outputs: must be absent if tool_choice forces a call"),  # noqa: E501
    ],
    "chat_batch": [
        ({"messages": []}, "messages: expected array of length >= 1, got a length of 0"),
        ({"messages": [[]]}, "messages[0]: expected array of length >= 1, got a length of 0"),
        ({"messages": said("a")["messages"] * 3}, "messages: expected array of length <= 2, got a length of 3"),
        ({"messages": ["a"]}, "messages[0]: expected array, got 'a'"),
        ({"n": 2}, "n: 1 for a batch of chats, got 2"),
        ({"stream": True}, "stream: none in a batch of chats, got some"),
        (tools({}), "tools: none in a batch of chats, got some"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: none in a batch of chats, got some"),
    ],
    "messages": [
        ({"max_tokens": None}, "max_tokens: required, got nothing"),
        ({"max_tokens": 13}, "max_tokens: expected int <= 12, got 13"),
        (said("a", "tool"), "messages[0].role: one of 'user', 'assistant', 'system', got 'tool'"),
        (said([{"type": "image"}]), "messages[0].content[0].type: one of 'text', 'tool_use', 'tool_result', 'thinking', 'redacted_thinking', got 'image'"),  # noqa: E501
        (said([{"type": "text", "text": "a"}, CALL]), "messages[0].content[1]: a block that is allowed in a message of the role user, got tool_use"),  # noqa: E501
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: required, got nothing"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: one of 'auto', 'any', 'tool', 'none', got 'some'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: only with tools, got it without"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: required if the type is tool, got nothing"),
        (OF_MESSAGES | {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: one of f, got 'g'"),
        ({"thinking": {"type": "x"}}, "thinking.type: one of 'enabled', 'disabled', 'adaptive', got 'x'"),
        ({"logprobs": True}, "logprobs: no such field, got True"),
        ({"stop_sequence": ["a"]}, "stop_sequence: no such field (did you mean stop_sequences?), got ['a']"),
        ({"stop_sequences": ["a", LARGE]}, "stop_sequences[1]: at most 4096 bytes, got 4098"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "b" * 262_144}}}}, "output_config.format.schema: at most 262144 bytes, got 262152"),  # noqa: E501
    ],
    "generation": [
        ({"sampling_params": {"logprob": 1}}, "sampling_params.logprob: no such field (did you mean logprobs?), got 1"),
        ({"sampling_params": {"thinking_token_budget": 0}}, "sampling_params.thinking_token_budget: not offered, got 0"),  # noqa: E501
        ({"logprobs": 1}, "logprobs: no such field, got 1"),
        ({"return_logprobs_of": [-1]}, "return_logprobs_of[0]: expected int >= 0, got -1"),
        ({"return_logprobs_of": [1] * 129}, "return_logprobs_of: expected array of length <= 128, got a length of 129"),
        ({"return_mask": 1025}, "return_mask: expected int <= 1024, got 1025"),
    ],
    "responses": [
        ({"max_output_tokens": 13}, "max_output_tokens: expected int <= 12, got 13"),
        ({"input": []}, "input: expected array of length >= 1, got a length of 0"),
        (heard(type="item_reference"), "input[0].type: one of 'message', 'function_call', 'function_call_output', 'reasoning', got 'item_reference'"),  # noqa: E501
        (heard(type="message", role="user", content=[{"type": "input_image"}]), "input[0].content[0].type: one of 'input_text', 'output_text', 'refusal', 'reasoning_text', got 'input_image'"),  # noqa: E501
        ({"top_logprobs": 2}, f"top_logprobs: only with {LOGPROBS} in include, got 2 without"),
        ({"include": ["message.output_text.logprob"]}, f"include[0]: {LOGPROBS} is the one with logprobs, got 'message.output_text.logprob'"),  # noqa: E501
        ({"include": ["message.output_text.log_probs"]}, f"include[0]: {LOGPROBS} is the one with logprobs, got 'message.output_text.log_probs'"),  # noqa: E501
        ({"logprobs": True}, "logprobs: no such field, got True"),
        ({"previous_response_id": "r"}, "previous_response_id: not offered, got 'r'"),
        ({"conversation": "c"}, "conversation: not offered, got 'c'"),
        ({"background": True}, "background: not offered, got True"),
        ({"stop": [LARGE]}, "stop[0]: at most 4096 bytes, got 4098"),
        (text_form("x"), "text.format.type: one of 'text', 'json_object', 'json_schema', got 'x'"),
        (text_form("json_schema"), "text.format.schema: required if the type is json_schema, got nothing"),
        (text_form("text", schema={}), "text.format.schema: only if the type is json_schema, got it with text"),
        (text_form("json_object") | output(regex="a"), "text.format: none with structured_outputs, got json_object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: one of 'function', got 'web_search'"),
        (OF_RESPONSES | {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name: one of f, got 'g'"),
    ],
    "tokenization": [({"chat_template_kwargs": 1}, "chat_template_kwargs: expected object | null, got 1")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("route", "fields", "line"), [(route, *each) for route, refused in REFUSED.items() for each in refused]
)
def test_refusals_name_the_field_the_limit_and_the_value(route: str, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(READER, route, **fields)
    assert (raised.value.status, raised.value.message) == (400, line)
    assert raised.value.param == (line.partition(": ")[0] if not line.startswith("the body") else None)

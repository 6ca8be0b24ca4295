"""What an encoder's process says of a body is what the gateway itself would read in it."""

from typing import Any

import msgspec
import orjson
import pytest
from msgspec.structs import replace

from tests.in_process.builders import settings
from tokenbus.gateway.completion_request import BodyHeaders, Reader, unpacked
from tokenbus.gateway.encoder_process import ERROR, RESULT, Job, Reply, answer
from tokenbus.gateway.vocabulary import vocabulary_of

READER = Reader(settings(), vocabulary_of("ngram"))
CHAT: list[Any] = [{"role": "user", "content": "How do you learn a language?"}]
TOOL = {"name": "f", "description": "Tells it.", "parameters": {"type": "object"}}
USED: list[Any] = [
    *CHAT,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "7"}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "return_mask": 3, "logit_bias": {"5": 1}},
    "chat": {"messages": CHAT, "tools": [{"function": TOOL}], "tool_choice": "required", "stop": ["a"]},
    "messages": {"messages": USED, "max_tokens": 3, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    "responses": {"input": CHAT, "tools": [{"type": "function", **TOOL}], "metadata": {"a": "b"}},
    "generation": {"token_ids": list(range(99)), "sampling_params": {"seed": 5}, "return_token_ids": True},
    "inspection": {"prompt": "a"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_request_is_the_same_behind_the_pipe(kind: str) -> None:
    reply = answer(READER, Job(kind, READER.models, READER.parents), orjson.dumps(BODIES[kind] | {"other": 1}))
    assert reply[:1] == RESULT
    told = msgspec.msgpack.decode(reply[1:], type=Reply)
    assert told.ignored == ["other"]
    decoded = unpacked(told.data)
    expected = getattr(READER, kind)(BODIES[kind])
    assert decoded.generate(0) == expected.generate(0)
    as_lists = replace(decoded, prompts=list(map(list, decoded.prompts)))
    assert msgspec.json.encode(as_lists) == msgspec.json.encode(expected)


def test_headers_count_behind_the_pipe() -> None:
    model = next(iter(READER.models))
    reader = Reader(settings(), vocabulary_of("bytes"))
    job = Job("invocation", READER.models, READER.parents, BodyHeaders("hdr", model))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)
    reply = answer(reader, sent, b'{"prompt": "a", "model": "another", "request_id": "abc"}')
    request = unpacked(msgspec.msgpack.decode(reply[1:], type=Reply).data)
    assert (request.name, request.model) == ("hdr", model)


def test_error_is_the_same_behind_the_pipe() -> None:
    reply = answer(
        READER, Job("chat", READER.models, READER.parents), b'{"messages": CHAT, "n": 0}'.replace(b"CHAT", b"[]")
    )
    assert reply[:1] == ERROR
    assert msgspec.msgpack.decode(reply[1:])[0] == 400

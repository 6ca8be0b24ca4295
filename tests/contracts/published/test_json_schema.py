"""JSON Schema of the messages: it takes what the contract takes, and refuses what it can say of the rest."""

import copy
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from jsonschema import Draft202012Validator

from tokenbus_contracts import Rule
from tokenbus_contracts.generated.client_pb2 import ClientFrame
from tokenbus_contracts.generated.logprob_batch_pb2 import LogprobBatch
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TokenPrompt
from tokenbus_contracts.published.descriptors import FRAMES, Schema
from tokenbus_contracts.published.golden import GoldenMessage, golden_messages
from tokenbus_contracts.published.json_schema import json_schema

SCHEMA = Schema.installed()
BATCH = Draft202012Validator(json_schema(SCHEMA))
SAID = {Rule.MIN, Rule.ITEMS, Rule.FINITE, Rule.VERSION, Rule.REQUIRED, Rule.BYTES}
"""The rules of which each break is one of the JSON Schema too."""
BETWEEN = {"invalid/more_rows_than_step", "invalid/too_many_rows"}
"""What breaks a rule between fields, or a deployment's default, which JSON Schema has not."""
_LARGEST = 10_000
PARSED = [
    message
    for message in golden_messages()
    if "malformed" not in message.expected.values() and len(message.data) < _LARGEST
]


def form_of(message: GoldenMessage) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(LogprobBatch.FromString(message.data))
    return found


@pytest.mark.parametrize("name", FRAMES)
def test_it_is_json_schema(name: str) -> None:
    found = json_schema(SCHEMA, name)
    Draft202012Validator.check_schema(found)
    assert found["$defs"][name]["description"]


@pytest.mark.parametrize("message", PARSED, ids=lambda message: message.name)
def test_golden_message_is_taken_or_refused(message: GoldenMessage) -> None:
    """Valid ones are taken; of the others those are refused whose rule JSON Schema can say."""
    try:
        is_taken = BATCH.is_valid(form_of(message))
    except DecodeError:
        return  # it has no JSON form
    if message.is_valid:
        assert is_taken, next(BATCH.iter_errors(form_of(message))).message
    elif message.expected["rule"] in SAID and message.name not in BETWEEN:
        assert not is_taken


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"generate": {"requestId": "0"}}, "requestId"),
        ({"abort": {"requestId": "1"}}, ""),
        ({"generate": {"requestId": "x"}}, "requestId"),
    ],
)
def test_bounds_of_frames_are_in_it(change: dict[str, Any], path: str) -> None:
    """A request's bounds hold, and a frame says one thing at a time."""
    validator = Draft202012Validator(json_schema(SCHEMA, "ClientFrame"))
    generate = Generate(
        request_id=7, tokens=TokenPrompt(token_ids=[1]), sampling=SamplingParameters(max_tokens=3), top_logprobs=2
    )
    form = MessageToDict(ClientFrame(generate=generate))
    assert validator.is_valid(form)
    broken = copy.deepcopy(form)
    for name, values in change.items():
        broken.setdefault(name, {}).update(values)
    (error, *_) = validator.iter_errors(broken)
    assert path in error.json_path or "valid under each of" in error.message

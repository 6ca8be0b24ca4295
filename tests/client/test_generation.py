"""Generations, steps and watches of a client can be closed, dropped and used beside each other."""

import gc
from typing import Any

import numpy as np
import pytest

from tests.client.peer import HELLO_FIRST, opened
from tests.client.test_client import FINISHED, Processor, meeting, met, taken
from tests.in_process.builders import generate_of, hello_of, ids, item_of
from tests.support.waiting import soon, turns
from tokenbus.client import Client, Generation, RequestEnd, RequestParameters, StepRows
from tokenbus.client import StructuredOutput as FormArgument
from tokenbus.client.parameters import request_of
from tokenbus.delivery import RequestFailedError
from tokenbus.testing import RowShape
from tokenbus_contracts import ContractError, PromptScores, RowStatus
from tokenbus_contracts.generated import request_pb2 as pb
from tokenbus_contracts.generated.client_pb2 import Outputs, ServerFrame, WatchedStream
from tokenbus_contracts.generated.stream_pb2 import Refusal

ABORTED = RowStatus.ABORTED


async def begun(processor: Processor, client: Client, key: int = 5) -> Generation:
    generation = client.generate(generate_of(key))
    await processor.body("generate")
    processor.rows(RowShape(key, 0, 2))
    await turns()
    return generation


# What is sent.


def test_keyword_arguments_are_the_fields_of_a_request() -> None:
    arguments: RequestParameters = {
        "stop_token_ids": np.array([1, 2]), "top_logprobs": 2, "include_draft_logprobs": True, "model": "small",
        "deadline_unix_ms": 2**60, "request_id": 77,
    }  # fmt: skip
    assert request_of("once", arguments) == pb.Generate(
        request_id=77,
        model="small",
        text=pb.TextPrompt(text="once"),
        sampling=pb.SamplingParameters(stop_token_ids=[1, 2]),
        top_logprobs=2,
        include_draft_logprobs=True,
        deadline_unix_ms=2**60,
    )
    assert request_of(np.array([0, 7], np.uint32), {"stop": ".", "max_tokens": None}) == pb.Generate(
        tokens=pb.TokenPrompt(token_ids=[0, 7]), sampling=pb.SamplingParameters(stop=["."])
    )


FORMS = "json_schema, json_object, regex, choice, grammar, structural_tag"
SAMPLING: RequestParameters = {
    "max_tokens": 8, "temperature": 0.5, "top_p": 0.75, "top_k": 40, "seed": 0, "stop": "a", "stop_token_ids": [1],
    "ignore_end_token": True, "min_p": 0.25, "presence_penalty": -2, "frequency_penalty": 0.5,
    "repetition_penalty": 1.5, "logit_bias": {5: -100, 0: 1.5}, "min_tokens": 2, "bad_words": ["b", "c"],
    "allowed_token_ids": np.array([3, 0]), "include_stop_string": True, "include_special_tokens": True,
    "structured_output": {"choice": ["yes", "no"]}, "lora_adapter": "adapter", "priority": -(2**40),
    "cache_salt": "salt", "engine_arguments": {"a": [1]},
}  # fmt: skip


def test_every_sampling_parameter_is_an_argument() -> None:
    names = [field.name for field in pb.SamplingParameters.DESCRIPTOR.fields]
    assert set(names) == SAMPLING.keys() <= RequestParameters.__annotations__.keys()
    written_otherwise: dict[str, Any] = {
        "stop": ["a"],
        "logit_bias": [pb.TokenBias(token_id=5, bias=-100), pb.TokenBias(token_id=0, bias=1.5)],
        "allowed_token_ids": [3, 0],
        "structured_output": {"choice": {"texts": ["yes", "no"]}},
        "engine_arguments": '{"a":[1]}',
    }
    assert request_of([1], SAMPLING).sampling == pb.SamplingParameters(**{**SAMPLING, **written_otherwise})
    assert request_of([1], {"engine_arguments": '{"a": 1}'}).sampling.engine_arguments == '{"a": 1}'


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"json_schema": '{"type": "array"}'}, pb.StructuredOutput(json_schema={"schema": '{"type": "array"}'})),
        ({"json_schema": {"const": "é"}}, pb.StructuredOutput(json_schema={"schema": '{"const":"é"}'})),
        ({"json_object": True}, pb.StructuredOutput(json_object={})),
        ({"regex": "[a-z]+"}, pb.StructuredOutput(regex={"pattern": "[a-z]+"})),
        ({"choice": ["yes", "no"]}, pb.StructuredOutput(choice={"texts": ["yes", "no"]})),
        ({"grammar": 'root ::= "a"'}, pb.StructuredOutput(grammar={"text": 'root ::= "a"'})),
        ({"structural_tag": {"a": 1}}, pb.StructuredOutput(structural_tag={"tag": '{"a":1}'})),
        ({"structural_tag": '{"a": 1}'}, pb.StructuredOutput(structural_tag={"tag": '{"a": 1}'})),
    ],
)
def test_structured_output_is_one_of_its_forms(given: FormArgument, sent: pb.StructuredOutput) -> None:
    assert request_of([1], {"structured_output": given}).sampling.structured_output == sent


@pytest.mark.parametrize(
    ("prompt", "arguments", "line"),
    [
        ([1], {"min_p": 1.5}, "min_p: at most 1, got 1.5"),
        ([1], {"logit_bias": {3: 101}}, "logit_bias[0].bias: at most 100, got 101.0"),
        ([1], {"logit_bias": {3: "x"}}, "logit_bias[0].bias: a number, got x"),
        ([1], {"logit_bias": {"3": 1}}, "logit_bias[0].token_id: a whole number, got 3"),
        ([1], {"logit_bias": [3]}, "logit_bias: a mapping of token ids to numbers, got list"),
        ([1], {"bad_words": [""]}, "bad_words[0]: text, got empty text"),
        ([1], {"bad_words": ["x"] * 257}, "bad_words: at most 256 elements, got 257"),
        ([1], {"allowed_token_ids": [0, 2**31]}, "allowed_token_ids[1]: at most 2147483646, got 2147483648"),
        ([1], {"priority": 2**63}, f"priority: at most {2**63 - 1}, got {2**63}"),
        ([1], {"cache_salt": "s" * 257}, "cache_salt: at most 256 bytes, got 257"),
        ([1], {"structured_output": {}}, f"structured_output: one of {FORMS}, got none"),
        (
            [1],
            {"structured_output": {"regex": "a", "choice": ["b"]}},
            f"structured_output: one of {FORMS}, got regex, choice",
        ),
        ([1], {"structured_output": "regex"}, f"structured_output: one of {FORMS}, got str"),
        ([1], {"structured_output": {"json_object": False}}, "structured_output.json_object: True, got False"),
        ([1], {"structured_output": {"choice": []}}, "structured_output.choice: at least 1 text, got none"),
        ([1], {"structured_output": {"regex": ""}}, "structured_output.regex.pattern: text, got empty text"),
        (
            [1],
            {"structured_output": {"json_schema": {"const": {1}}}},
            "structured_output.json_schema: a value for JSON, got Object of type set is not JSON serializable",
        ),
        ([1], {"max_token": 3}, "max_token: a parameter of a request, as max_tokens, got 3"),
        ([1], {"max_tokens": 0}, "max_tokens: at least 1, got 0"),
        ([1], {"max_tokens": -1}, "max_tokens: at least 0, got -1"),
        ([1], {"max_tokens": True}, "max_tokens: a whole number, got True"),
        ([1], {"seed": "7"}, "seed: a whole number, got 7"),
        ([1], {"temperature": "hot"}, "temperature: a number, got hot"),
        ([1], {"temperature": -0.5}, "temperature: at least 0, got -0.5"),
        ([1], {"top_p": float("nan")}, "top_p: a finite number, got nan"),
        ([1], {"stop": ["x", 3]}, "stop[1]: a text, got 3"),
        ([1], {"stop": 7}, "stop: a sequence, got int"),
        ([1], {"stop": ["x", ""]}, "stop[1]: text, got empty text"),
        ([1], {"ignore_end_token": 1}, "ignore_end_token: True or False, got 1"),
        ([1], {"model": 3}, "model: a text, got 3"),
        ([1], {"request_id": 0}, "request_id: at least 1, got 0"),
        ([1], {"logprob_token_ids": range(129)}, "logprob_token_ids: at most 128 elements, got 129"),
        ([1], {"logprob_token_ids": [2**31 - 1]}, "logprob_token_ids[0]: at most 2147483646, got 2147483647"),
        ([1], {"mask_bound": -1}, "mask_bound: at least 0, got -1"),
        ([1], {"entropies": 1}, "entropies: True or False, got 1"),
        ([1], {"prompt_logprob_token_ids": range(257)}, "prompt_logprob_token_ids: at most 256 elements, got 257"),
        ([1], {"prompt_logprob_token_ids": ["a"]}, "prompt_logprob_token_ids[0]: a whole number, got a"),
        ("", {}, "prompt: text, got empty text"),
        ([], {}, "prompt: at least 1 token id, got none"),
        ([1, "2"], {}, "prompt[1]: a whole number, got 2"),
        ([1, 2**31], {}, "prompt[1]: at most 2147483646, got 2147483648"),
        (b"text", {}, "prompt: a text or a sequence of token ids, got bytes"),
        (generate_of(1), {"seed": 1}, "parameters: none with a Generate message, got seed"),
    ],
)
async def test_wrong_argument_is_refused_in_one_line(prompt: Any, arguments: Any, line: str) -> None:  # noqa: ANN401
    _, client, _ = await meeting({"client.drain_timeout_ms": 0})
    async with client:
        with pytest.raises(ContractError) as refused:
            client.generate(prompt, **arguments)
        assert str(refused.value) == line
        assert len(client.requests) == 0


# Closing what generate returns.


@pytest.mark.parametrize("way", ["aclose", "async with", "dropped", "rows", "cycle"])
async def test_closed_generation_ends_its_request_and_is_not_waited_for(way: str) -> None:
    async with met({"client.drain_timeout_ms": 3_600_000}) as (processor, client, _):
        generation = await begun(processor, client)
        match way:
            case "aclose":
                await generation.aclose()
                assert generation.status is ABORTED
                assert await taken(generation) == []
            case "async with":
                async with generation:
                    async for _ in generation:
                        break
            case "rows":
                async for _ in generation.rows():
                    break
            case "cycle":
                circle: list[object] = [generation]
                circle.append(circle)
                del circle
        del generation
        gc.collect()
        assert (await processor.body("abort")).abort.request_id == 5
        assert len(client.requests) == 0


async def test_generation_that_ended_needs_no_abort() -> None:
    async with met() as (processor, client, _):
        generation = client.generate(generate_of(5))
        await processor.body("generate")
        processor.rows(RowShape(5, 0, 2, FINISHED))
        async with generation:
            assert len(await soon(taken(generation))) == 2
        assert generation.status is FINISHED
        del generation
        await turns()
        assert client.requests.open_count == 0
    await processor.body("goodbye")


def test_rows_of_a_closed_request_are_dropped_until_the_processor_ended_it() -> None:
    peer = opened()
    tokens = peer.requests.open(generate_of(5))
    list(peer.says_all())
    peer.requests.discard(5)
    peer.requests.discard(5)
    assert (tokens.status, peer.session.outstanding, peer.requests.is_open(5)) == (ABORTED, 0, True)
    assert peer.bodies() == ["abort"]
    peer.rows(RowShape(5, 0, 2))
    assert "abort" not in peer.bodies()
    assert len(tokens) == 0
    peer.rows(RowShape(5, 2, 0, ABORTED))
    assert not peer.requests.is_open(5)


@pytest.mark.parametrize("ending", ["error", "taken up", "given up"])
def test_closed_request_is_forgotten_however_it_ends(ending: str) -> None:
    peer = opened()
    peer.requests.open(generate_of(5))
    list(peer.says_all())
    peer.requests.discard(5)
    if ending == "given up":
        peer.requests.give_up("over")
    else:
        taken_up = pb.ErrorCode.ERROR_CODE_TAKEN_UP
        code = taken_up if ending == "taken up" else pb.ErrorCode.ERROR_CODE_ENGINE
        peer.numbered(error=pb.RequestError(request_id=5, code=code, message="over"))
    assert not peer.requests.is_open(5)
    list(peer.says_all())
    if ending == "taken up":
        peer.rows(RowShape(5, 0, 1))
        assert "abort" not in peer.bodies()


def test_abort_of_a_closed_request_is_said_again_after_a_broken_connection() -> None:
    peer = opened()
    peer.requests.open(generate_of(5))
    list(peer.says_all())
    peer.rows(RowShape(5, 0, 2))
    peer.requests.discard(5)
    list(peer.says_all())
    peer.hear(refusal=Refusal(reason=HELLO_FIRST, message="again"))
    peer.says()
    peer.welcome(processor_id="other")
    assert [frame.WhichOneof("body") for frame in peer.says_all()] == ["resume", "abort"]


async def test_closed_requests_are_bounded_with_the_open_ones() -> None:
    async with met({"client.max_requests": 2}) as (processor, client, _):
        for key in (5, 6):
            await (await begun(processor, client, key)).aclose()
        with pytest.raises(RequestFailedError, match="at most 2, got 3"):
            client.generate(generate_of(7))
        processor.rows(RowShape(5, 2, 0, ABORTED))
        await turns()
        await client.generate(generate_of(7)).aclose()


# Steps.


def _ends(outputs: list[StepRows | RequestEnd]) -> dict[int, tuple[RowStatus | None, str | None]]:
    return {
        each.request_id: (each.status, None if each.error is None else each.error.reason)
        for each in outputs
        if isinstance(each, RequestEnd)
    }


@pytest.mark.parametrize(
    ("first", "second"), [(([], False), ([7], False)), (([7], False), ([7], True)), (([7], True), ([8], True))]
)
def test_scores_whose_chunks_do_not_agree_end_their_request_alone(
    first: tuple[list[int], bool], second: tuple[list[int], bool]
) -> None:
    peer = opened()
    outputs: list[StepRows | RequestEnd] = []
    peer.requests.open_stream(outputs.append)
    peer.requests.open(generate_of(1, prompt_scoring=pb.PromptScoring(top_logprobs=1)))
    peer.requests.open(generate_of(2))
    for position, (others, are_named) in enumerate((first, second), 1):
        own = (np.array([position], "u4"), np.array([-1], "f4"), np.array([1], "u4"))
        beside = (np.array([others], "u4"), np.array([[-2.0] * len(others)], "f4"))
        scores = PromptScores(1, position, 3, *own, *beside, are_named)
        (chunk,) = scores.chunks()
        peer.numbered(prompt_scores=chunk)
    assert "as in the chunk before" in str(_ends(outputs)[1][1])
    assert 2 in peer.requests.requests


def test_each_end_comes_once_after_the_rows_before_it() -> None:
    peer = opened()
    outputs: list[StepRows | RequestEnd] = []
    peer.requests.open_stream(outputs.append)
    for key in range(1, 8):
        peer.requests.open(generate_of(key, deadline_unix_ms=1000 if key == 4 else 0))
    peer.rows(*(RowShape(key, 0, 2) for key in range(1, 8)))
    peer.rows(RowShape(1, 2, 1, FINISHED), RowShape(3, 9, 1), RowShape(2, 2, 1))
    peer.numbered(error=pb.RequestError(request_id=2, code=pb.ErrorCode.ERROR_CODE_ENGINE, message="broke"))
    peer.requests.end_overdue(10_000)
    peer.requests.discard(5)
    with pytest.raises(ContractError):
        peer.numbered(b"no batch", outputs=Outputs())
    assert _ends(outputs) == {
        1: (FINISHED, None),
        2: (None, "broke"),
        3: (None, "tokens 2 to 8 never came from the processor"),
        4: (None, "deadline_unix_ms: no end arrived within 9000 ms after it"),
        5: (ABORTED, None),
        6: (None, _ends(outputs)[6][1]),
        7: (None, _ends(outputs)[6][1]),
    }
    assert "tokens cannot be read" in str(_ends(outputs)[6][1])
    ended: set[int] = set()
    for output in outputs:
        if isinstance(output, StepRows):
            assert ended.isdisjoint(output.target.request_ids.tolist())
        else:
            assert output.request_id not in ended
            ended.add(output.request_id)


async def test_second_steps_is_refused_until_the_first_is_closed_or_dropped() -> None:
    async with met({"client.drain_timeout_ms": 0}) as (processor, client, _):
        first = client.steps()
        with pytest.raises(RuntimeError, match=r"steps\(\) is already being iterated over"):
            client.steps()
        client.submit(generate_of(5))
        processor.rows(RowShape(5, 0, 1))
        assert isinstance(await soon(anext(first)), StepRows)
        await first.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(first)
        dropped = client.steps()
        del dropped
        second = client.steps()
        await turns()
        client.submit(generate_of(6))
        processor.rows(RowShape(6, 0, 1))
        assert isinstance(await soon(anext(second)), StepRows)


async def test_submitted_requests_end_with_the_steps() -> None:
    async with met({"client.drain_timeout_ms": 3_600_000}) as (processor, client, _):
        with pytest.raises(RuntimeError, match=r"submit\(\) needs steps\(\) to be open"):
            client.submit([1])
        async with client.steps():
            request_id = client.submit([1], max_tokens=9)
            assert (await processor.body("generate")).generate.request_id == request_id
        assert (await processor.body("abort")).abort.request_id == request_id


async def test_generation_beside_steps_has_its_end() -> None:
    async with met() as (processor, client, _), client.steps() as steps:
        generation = client.generate(generate_of(5, sampling=pb.SamplingParameters(stop=["a", "b"])))
        await processor.body("generate")
        processor.rows(RowShape(5, 0, 2, RowStatus.FINISHED_STOP, stop=3))
        rows, end = await soon(anext(steps)), await soon(anext(steps))
        assert isinstance(rows, StepRows)
        assert end == RequestEnd(5, RowStatus.FINISHED_STOP, None, "b")
        assert generation.stop == "b"
        assert await soon(taken(generation)) == []
        assert generation.status is RowStatus.FINISHED_STOP


@pytest.mark.parametrize(
    ("status", "stop", "expected"),
    [
        (RowStatus.FINISHED_STOP, 0, None),
        (RowStatus.FINISHED_STOP, 1, ids(5, 3, 4)[0]),
        (RowStatus.FINISHED_STOP, 2, "a"),
        (RowStatus.FINISHED_STOP, 3, "b"),
        (RowStatus.FINISHED_STOP, 4, None),  # a text that it did not ask for
        (RowStatus.FINISHED_LENGTH, 0, None),
    ],
)
async def test_stop_that_ended_a_request_is_named(status: RowStatus, stop: int, expected: int | str | None) -> None:
    async with met() as (processor, client, _):
        generation = client.generate([1], request_id=5, stop=["a", "b"], stop_token_ids=[7])
        await processor.body("generate")
        processor.rows(RowShape(5, 0, 2), RowShape(6, 0, 1, RowStatus.FINISHED_STOP, stop=2))
        await turns()
        assert generation.stop is None
        processor.rows(RowShape(7, 0, 3), RowShape(5, 2, 2, status, stop=stop))
        assert len(await soon(taken(generation))) == 4
        assert (generation.status, generation.stop) == (status, expected)


async def test_resumed_request_names_the_token_that_stopped_it() -> None:
    async with met() as (processor, client, _):
        token, text = client.resume(5, 2), client.resume(6, 2)
        for _ in range(2):
            await processor.body("resume")
        processor.rows(*(RowShape(5 + row, 2, 1, RowStatus.FINISHED_STOP, stop=1 + row) for row in range(2)))
        last, _ = [(await soon(taken(generation)))[-1].id for generation in (token, text)]
        assert (token.stop, text.stop) == (last, None)


# Watching.


async def test_second_watch_is_refused_until_the_first_is_closed_or_dropped() -> None:
    async with met() as (processor, client, _):
        first = client.watch("w")
        with pytest.raises(RuntimeError, match=r"watch\(\) is already being iterated over"):
            client.watch("w")
        processor.say(ServerFrame(watched_stream=WatchedStream(epoch=1, hello=hello_of())))
        processor.say(ServerFrame(watched_item=item_of(b"abc", 1)), b"abc")
        assert (await soon(anext(first))).sequence == 1
        del first
        second = client.watch("v")
        await turns()
        processor.say(ServerFrame(watched_item=item_of(b"abc", 2)), b"abc")
        assert (await soon(anext(second))).sequence == 2

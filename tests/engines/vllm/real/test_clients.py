"""OpenAI's client and plain requests against vLLM's own server and against `tokenbus up`: the same answers."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engines.vllm.real.servers import (
    CONTEXT,
    Answer,
    Server,
    Servers,
    answers,
    as_listed_by_vllm,
    joined,
    single,
    streams,
)
from tests.engines.vllm.tiny_model import END
from tests.system.serving import error_of
from tokenbus.gateway.metrics import VLLM


def completions(client: openai.OpenAI) -> Any:  # noqa: ANN401 - OpenAI's
    return client.completions


def chats(client: openai.OpenAI) -> Any:  # noqa: ANN401
    return client.chat.completions


GREEDY: dict[str, Any] = {"temperature": 0}
MESSAGES: list[Any] = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "sat on a mat"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = {"type": "function", "function": {"name": "weather"}}
CALLED = {"role": "assistant", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
]}  # fmt: skip
ONE = r"\[weather\(city=\"(Bern|Oslo)\", days=[0-9]\)\]"
TWO = r"\[weather\(city='(Bern|Oslo)', days=-[1-9]\), now\(\)\]"
IDS = {"return_token_ids": True}
COMPACT = {"\n": -100, "\t": -100, "\r": -100, " ": -100}
"""By a token's text what is added to its logit; without these, the model hardly ever ends an object of JSON."""
SEVERAL = COMPACT | {",": 2, "w": 100}
"""The same for several calls of one function."""


def seeded(seed: int, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - any parameter
    return {"temperature": 1.0, "seed": seed, **others}


ENDING = {**seeded(5), "logit_bias": {"0": 15}}
"""A random request that gets the model's own end soon: without this, hardly ever."""


def matching(pattern: str) -> dict[str, Any]:
    """Return what has the model write what matches: a tiny one calls nothing of its own accord."""
    return {"structured_outputs": {"regex": pattern}}


HARMLESS: dict[str, Any] = {
    "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "store": True,
    "session_id": "s", "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True,
    "user": "u", "echo": False, "prompt_logprobs": None,
}  # fmt: skip
TAG = {
    "type": "structural_tag",
    "format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "the "}, {"type": "regex", "pattern": "(cat|mat)"},
    ]},
}  # fmt: skip
LONG = "the cat " * CONTEXT
MOSTLY_CACHED = "the cat " * 150
CACHED_CHAT: list[Any] = [{"role": "user", "content": MOSTLY_CACHED}]
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "prompt": "the cat", "max_tokens": 12},
    "default length": {**GREEDY, "prompt": "the cat"},
    "sampled": {**seeded(7, top_p=0.9), "prompt": "the cat", "max_tokens": 12, "extra_body": {"top_k": 40}},
    "negative seed": {**seeded(-3), "prompt": "the cat", "max_tokens": 12},
    "logprobs 5": {**seeded(3), "prompt": "the cat", "max_tokens": 20, "logprobs": 5},
    "several prompts": {**seeded(3), "prompt": ["the cat", "a mat"], "n": 2, "max_tokens": 8, "logprobs": 1},
    "token ids": {**GREEDY, "prompt": [5, 6, 7], "max_tokens": 8, "extra_body": IDS},
    "lists of token ids": {**seeded(11), "prompt": [[5, 6, 7], [300, 2]], "max_tokens": 8, "extra_body": IDS},
    "special tokens in a prompt": {**GREEDY, "prompt": f"a{END}b", "max_tokens": 5, "extra_body": IDS},
    "the model's end": {**ENDING, "prompt": "sat on", "max_tokens": 100, "logprobs": 1, "extra_body": IDS},
    "past its end": {**ENDING, "prompt": "sat on", "max_tokens": 24, "extra_body": IDS | {"ignore_eos": True}},
    "least tokens": {**seeded(5), "prompt": "sat on", "max_tokens": 90, "stop": "e", "extra_body": {"min_tokens": 20}},
    "stop": {**GREEDY, "prompt": "the cat", "max_tokens": 40, "stop": ["e", "zz"], "logprobs": 1, "extra_body": IDS},
    "stops in one token": {**seeded(8), "prompt": "the cat", "max_tokens": 60, "stop": ["ou", "rou"], "logprobs": 0},
    "stop included": {
        **GREEDY, "prompt": "the cat", "max_tokens": 40, "stop": "e", "extra_body": {"include_stop_str_in_output": True}
    },
    "penalties": {
        **GREEDY, "prompt": "the cat", "max_tokens": 30, "presence_penalty": 1.5, "frequency_penalty": 0.5,
        "logit_bias": {"5": 3, "9": -50}, "extra_body": {"repetition_penalty": 1.3, "bad_words": ["rou"]},
    },
    "choice": {**GREEDY, "prompt": "a", "logprobs": 2, "extra_body": {"structured_outputs": {"choice": ["by", "mat"]}}},
    "harmless fields": {**GREEDY, "prompt": "the cat", "max_tokens": 3, "extra_body": HARMLESS | {"best_of": 1}},
    "priority without a policy": {**GREEDY, "prompt": "the cat", "max_tokens": 3, "extra_body": {"priority": 3}},
    "many stop tokens": {**seeded(5), "prompt": "sat on", "max_tokens": 90, "extra_body": IDS | {
        "stop_token_ids": [*range(300, 500), 71]
    }},
    "bias beyond the bound": {**GREEDY, "prompt": "the cat", "max_tokens": 5, "logit_bias": {"80": 1e6}},
    "echo": {**GREEDY, "prompt": "the cat", "max_tokens": 5, "echo": True},
    "echo with logprobs": {**GREEDY, "prompt": "the cat sat", "max_tokens": 5, "echo": True, "logprobs": 2},
    "echo with its own logprobs": {**seeded(4), "prompt": "the cat sat", "max_tokens": 5, "echo": True, "logprobs": 0},
    "truncated": {**GREEDY, "prompt": LONG, "max_tokens": 3, "extra_body": IDS | {"truncate_prompt_tokens": 5}},
    "truncated at its right": {**GREEDY, "prompt": LONG, "max_tokens": 3, "extra_body": IDS | {
        "truncate_prompt_tokens": 5, "truncation_side": "right"
    }},
    "truncated to what fits": {**GREEDY, "prompt": LONG, "max_tokens": 3, "extra_body": IDS | {
        "truncate_prompt_tokens": -1
    }},
    "structural tag": {**GREEDY, "prompt": "a", "max_tokens": 30, "extra_body": {"response_format": TAG}},
    "arguments of extensions": {**GREEDY, "prompt": "a", "max_tokens": 3, "extra_body": {
        "vllm_xargs": {"a": 1, "b": ["c", 0.5]}
    }},
}  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "max_tokens": 12},
    "as many as fit": {**GREEDY, "extra_body": {"ignore_eos": True}, "messages": [
        {"role": "user", "content": "the cat " * (CONTEXT // 2 - 20)}
    ]},
    "newer name of the length": {**GREEDY, "max_completion_tokens": 5},
    "logprobs": {**GREEDY, "max_tokens": 6, "logprobs": True},
    "alternatives": {**seeded(9), "max_tokens": 30, "logprobs": True, "top_logprobs": 3, "extra_body": IDS},
    "several choices": {**seeded(9), "n": 2, "max_tokens": 6, "extra_body": IDS},
    "parts": {**GREEDY, "max_tokens": 4, "extra_body": IDS, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]},
    "developer": {**GREEDY, "max_tokens": 4, "extra_body": IDS, "messages": [
        *MESSAGES, {"role": "developer", "content": "be brief", "name": "Ada"}
    ]},
    "json schema": {**GREEDY, "max_tokens": 60, "response_format": {
        "type": "json_schema", "json_schema": {"name": "city", "schema": CITY}
    }},
    "auto call": {**GREEDY, "max_tokens": 90, "tools": TOOLS, "logprobs": True, "extra_body": IDS | matching(ONE)},
    "auto calls": {**seeded(3), "max_tokens": 90, "n": 2, "tools": TOOLS, "extra_body": matching(TWO)},
    "one auto call": {
        **GREEDY, "max_tokens": 90, "tools": TOOLS, "parallel_tool_calls": False, "extra_body": matching(TWO)
    },
    "auto text": {**GREEDY, "max_tokens": 90, "tools": TOOLS, "extra_body": matching("it is [0-9] \\[now\\(\\)\\]")},
    "auto call that is not looked for": {
        **GREEDY, "max_tokens": 90, "tools": TOOLS, "tool_choice": "none", "extra_body": matching(ONE)
    },
    "named tool": {**GREEDY, "max_tokens": 90, "tools": TOOLS, "tool_choice": WEATHER, "logit_bias": COMPACT},
    "named tool, cut off": {**GREEDY, "max_tokens": 4, "tools": TOOLS, "tool_choice": WEATHER, "extra_body": IDS},
    "required tool": {
        **GREEDY, "max_tokens": 90, "tools": TOOLS, "tool_choice": "required", "logprobs": True, "logit_bias": COMPACT
    },
    "required tools": {
        **seeded(0), "n": 2, "max_tokens": 150, "tools": TOOLS, "tool_choice": "required", "logit_bias": SEVERAL
    },
    "one required tool": {
        **seeded(3), "max_tokens": 90, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
        "logit_bias": SEVERAL,
    },
    "required tool, cut off": {**GREEDY, "max_tokens": 8, "tools": TOOLS, "tool_choice": "required"},
    "calls and results": {**GREEDY, "max_tokens": 4, "extra_body": IDS, "messages": [
        *MESSAGES, CALLED, {"role": "tool", "tool_call_id": "1", "content": "rain"}
    ]},
    "harmless fields": {**GREEDY, "max_tokens": 3, "extra_body": HARMLESS | {"modalities": ["text"]}},
    "no thinking": {**GREEDY, "max_tokens": 3, "reasoning_effort": "none", "extra_body": IDS},
    "thinking, as the template has it": {**GREEDY, "max_tokens": 3, "reasoning_effort": "high", "extra_body": IDS | {
        "chat_template_kwargs": {"enable_thinking": "a little"}
    }},
    "truncated": {**GREEDY, "max_tokens": 3, "extra_body": IDS | {"truncate_prompt_tokens": 5}},
    "documents and variables": {**GREEDY, "max_tokens": 4, "extra_body": IDS | {
        "documents": [{"title": "t", "text": "x"}], "chat_template_kwargs": {"mood": "glad"}
    }},
    "last message continued": {
        **GREEDY, "max_tokens": 4, "messages": [*MESSAGES, {"role": "assistant", "content": "one more "}],
        "extra_body": IDS | {"add_generation_prompt": False, "continue_final_message": True},
    },
}  # fmt: skip

STOPPED = ("the model's end", "many stop tokens", "stop", "stops in one token", "least tokens")
"""What ends by itself."""
AUTO = {"auto call": 1, "auto calls": 2, "one auto call": 1, "auto text": 0, "auto call that is not looked for": 0}
"""How many calls are found in answers that need have none."""


@pytest.mark.parametrize("ask", [answers, streams])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_same_completions(servers: Servers, name: str, ask: Any) -> None:  # noqa: ANN401 - one of two functions
    given = {"model": servers.model, **COMPLETIONS[name]}
    theirs, ours = servers.both(ask, completions, **given)
    if "echo" in given and ask is streams:  # vLLM gives the prompt's ids there, which nobody asked for
        unasked = {number: choice._replace(prompt_token_ids=()) for number, choice in theirs.choices.items()}
        theirs = theirs._replace(choices=unasked)
    assert ours == theirs
    assert ours.choices[0].ends[0] == "stop" or name not in STOPPED
    assert 0 in ours.choices[0].token_ids[:-1] or name != "past its end"


@pytest.mark.parametrize("ask", [answers, streams])
@pytest.mark.parametrize("name", CHATS)
def test_same_chats(servers: Servers, name: str, ask: Any) -> None:  # noqa: ANN401
    given = {"model": servers.model, "messages": MESSAGES, **CHATS[name]}
    if "logit_bias" in given:
        given["logit_bias"] = {_token(servers, text): bias for text, bias in given["logit_bias"].items()}
    theirs, ours = servers.both(ask, chats, **given)
    assert as_listed_by_vllm(ours, given.get("top_logprobs", 0)) == theirs
    found = list(ours.choices.values())
    assert found[0].ends[0] == "stop" or name not in STOPPED
    if given.get("tool_choice") in ("required", WEATHER):
        assert not any(choice.text for choice in found)
        ended = "length" if "cut off" in name else "tool_calls" if given["tool_choice"] == "required" else "stop"
        assert {choice.ends[0] for choice in found} == {ended}
    if name in AUTO:
        assert {len(choice.calls) for choice in found} == {AUTO[name]}
    if name == "required tools":
        assert max(len(choice.calls) for choice in found) > 1


def _token(servers: Servers, text: str) -> str:
    (token,) = servers.theirs.plain.post("/tokenize", json={"model": servers.model, "prompt": text}).json()["tokens"]
    return str(token)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": f"the cat{END}", "return_token_strs": True}),
        ("/tokenize", {"prompt": "the cat", "add_special_tokens": False}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False, "add_special_tokens": True}),
        ("/tokenize", {"messages": [*MESSAGES, CALLED], "tools": TOOLS, "chat_template_kwargs": {"mood": "glad"}}),
        ("/detokenize", {"tokens": [0, 5, 80, 300]}),
    ],
)
def test_same_tokens(servers: Servers, path: str, body: dict[str, Any]) -> None:
    theirs, ours = servers.posted(path, body)
    assert theirs.status_code == 200
    assert ours.json() == theirs.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the cat"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/inference/v1/generate", {"token_ids": [5, 80], "sampling_params": {"max_tokens": 2}}),
    ],
)
def test_ours_has_every_member_of_theirs(servers: Servers, path: str, body: dict[str, Any]) -> None:
    """Also those that are null: a client's object has an attribute only for what is there."""
    theirs, ours = (each.json() for each in servers.posted(path, {"max_tokens": 2, **body}))
    never = {"prompt_token_id_logprobs", "mm_placeholders"}
    assert theirs.keys() - ours.keys() <= never
    assert theirs["usage"].keys() <= ours["usage"].keys()
    assert theirs["usage"]["prompt_tokens_details"].keys() <= ours["usage"]["prompt_tokens_details"].keys()
    choices = theirs["choices"][0], ours["choices"][0]
    assert choices[0].keys() - choices[1].keys() <= {"routed_experts", "sampling_mask", "weight_versions"}
    assert choices[0].get("message", {}).keys() <= choices[1].get("message", {}).keys()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": MOSTLY_CACHED}, ("prompt_tokens_details", "cached_tokens")),
        ("/v1/chat/completions", {"messages": CACHED_CHAT}, ("prompt_tokens_details", "cached_tokens")),
        ("/v1/messages", {"messages": CACHED_CHAT}, ("cache_read_input_tokens",)),
        ("/v1/responses", {"input": MOSTLY_CACHED}, ("input_tokens_details", "cached_tokens")),
        (
            "/inference/v1/generate",
            {"token_ids": [7] * 400, "sampling_params": {"max_tokens": 2}},
            ("prompt_tokens_details", "cached_tokens"),
        ),
    ],
)
def test_same_cached_tokens(
    servers: Servers,
    path: str,
    body: dict[str, Any],
    names: tuple[str, ...],
    is_streamed: bool,  # noqa: FBT001
) -> None:
    """The second of two equal requests has the most of its prompt from the cache."""
    given = {"cache_salt": f"{path.replace('/', '-')} {is_streamed}", "max_tokens": 2, **body}
    if is_streamed:
        given |= {"stream": True}
        given |= {"stream_options": {"include_usage": True}} if "prompt_tokens_details" in names else {}
    found = []
    for _ in range(2):
        usages = [_last_usage(answer.text) for answer in servers.posted(path, given)]
        for name in names:
            usages = [usage[name] for usage in usages]
        found.append(usages)
    (none, nothing), (theirs, ours) = found
    assert (none, nothing) == (0, 0)
    assert ours == theirs > 100


def _last_usage(answer: str) -> Any:  # noqa: ANN401 - JSON
    """Return the usage of an answer, or of a stream's last event that has one."""
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line[:1] == "{" or line[:7] == "data: {"]
    found = [event.get("response", event).get("usage") for event in map(json.loads, events)]
    return [usage for usage in found if usage][-1]


def test_same_models(servers: Servers) -> None:
    """The model and its adapter, which answers otherwise; of an adapter vLLM does not say how long its context is."""
    theirs, ours = (
        [tuple(each.get(name) for name in ("id", "object", "parent")) for each in listed]
        for listed in (server.plain.get("/v1/models").json()["data"] for server in servers[:2])
    )
    assert ours == theirs
    assert ours == [(servers.model, "model", None), ("ada", "model", servers.model)]
    assert {each.model_dump()["max_model_len"] for each in servers.ours.openai.models.list().data} == {CONTEXT}
    plain, *adapted = (
        answers(server, completions, model=model, **COMPLETIONS["token ids"])
        for server, model in ((servers.ours, servers.model), (servers.theirs, "ada"), (servers.ours, "ada"))
    )
    assert adapted[0] == adapted[1] != plain
    assert (adapted[0].model, adapted[0].choices[0].token_ids == plain.choices[0].token_ids) == ("ada", False)


USER = {"messages": [{"role": "user", "content": "a"}]}
TEXT = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", TEXT | {"model": "other"}, 404, "model"),
        ("completions", {"prompt": LONG}, 400, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400, "messages"),
        ("completions", TEXT | {"max_tokens": 0}, 400, "max_tokens"),
        ("completions", TEXT | {"max_tokens": CONTEXT + 1}, 400, "max_tokens"),
        ("completions", TEXT | {"logprobs": 21}, 400, "logprobs"),
        ("chat/completions", USER | {"top_logprobs": 2}, 400, "top_logprobs"),
        ("completions", TEXT | {"temperature": 3}, 400, "temperature"),
        ("completions", TEXT | {"min_tokens": 9}, 400, "min_tokens"),
        ("completions", TEXT | {"prompt": [5, 99_999]}, 400, "prompt[1]"),
        ("completions", TEXT | {"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("completions", TEXT | {"structured_outputs": {"regex": "("}}, 400, None),
        ("completions", TEXT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        (
            "chat/completions",
            USER | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}},
            400,
            "tool_choice.function.name",
        ),
        ("chat/completions", USER | {"continue_final_message": True}, 400, "continue_final_message"),
        ("nothing", {}, 404, None),
    ],
)  # fmt: skip
def test_same_refusals(servers: Servers, path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    theirs, ours = servers.posted(f"/v1/{path}", body)
    assert (theirs.status_code, ours.status_code) == (status, status), (theirs.text, ours.text)
    error = error_of(ours.text)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "\n" not in error["message"]
    if path != "nothing":
        assert theirs.json()["error"].keys() == error.keys()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "the cat sat", "max_tokens": 2, "prompt_logprobs": 3, **GREEDY}),
        ("completions", {"prompt": [5, 80, 300], "max_tokens": 2, "prompt_logprobs": 0, **GREEDY}),
        ("completions", {"prompt": [[5, 80], [300]], "max_tokens": 2, "n": 2, "prompt_logprobs": 1, **seeded(1)}),
        ("chat/completions", USER | {"max_tokens": 2, "prompt_logprobs": 2, **GREEDY}),
    ],
)
def test_same_prompt_logprobs(servers: Servers, path: str, body: dict[str, Any]) -> None:
    theirs, ours = (_prompt_logprobs(answer.json()) for answer in servers.posted(f"/v1/{path}", body))
    assert ours == theirs
    assert all(each[0] is None for each in ours)


def _prompt_logprobs(answer: dict[str, Any]) -> list[list[Any]]:
    is_chat = answer["object"] == "chat.completion"
    found = [each["prompt_logprobs"] for each in ([answer] if is_chat else answer["choices"])]
    return [
        [
            None if position is None else {
                token: (single(one["logprob"]), one["rank"], one["decoded_token"]) for token, one in position.items()
            }
            for position in prompt
        ]
        for prompt in found
    ]  # fmt: skip


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_prompt_is_scored_alone(servers: Servers, logprobs: int | None) -> None:
    """An echo without a token; vLLM counts the token that it makes and does not show."""
    body = {"prompt": ["the cat sat", "a mat"], "max_tokens": 0, "echo": True, "logprobs": logprobs, **GREEDY}
    theirs, ours = (answer.json()["choices"] for answer in servers.posted("/v1/completions", body))
    assert [joined([(choice, choice)]) for choice in ours] == [joined([(choice, choice)]) for choice in theirs]


def test_same_metrics_under_their_names(servers: Servers) -> None:
    """Each of vLLM's names that we have counts the same requests the same way, in the same buckets."""
    counted = []
    for server in servers[:2]:
        before = _metrics(server)
        for body in (
            TEXT | {"n": 2, **seeded(1)},
            TEXT | GREEDY | {"stream": True},
            {"prompt": [5] * 9, "max_tokens": 30},
        ):
            assert server.plain.post("/v1/completions", json=body).status_code == 200
        after = _metrics(server)
        counted.append({key: value - before.get(key, 0) for key, value in after.items()})
    theirs, ours = counted
    assert len({name for name, _ in ours}) == len(VLLM) + 2 * sum(family.is_histogram for family in VLLM)
    for key, value in ours.items():
        name, labels = key
        is_time = "seconds" in name and not name.endswith("_count") and "+Inf" not in labels
        is_longer = name.endswith("_bucket") and key not in theirs  # its buckets end at the model's context
        assert is_time or is_longer or theirs[key] == value, key
    assert {name for name, _ in ours} <= {name for name, _ in theirs}


def _metrics(server: Server) -> dict[tuple[str, str], float]:
    wanted = {family.name.removesuffix("_total") for family in VLLM}
    page = server.plain.get("/metrics").text
    return {
        (sample.name, str(sample.labels.get("le", sample.labels.get("finished_reason", "")))): sample.value
        for metric in text_string_to_metric_families(page)
        if metric.name in wanted
        for sample in metric.samples
        if not sample.name.endswith("_created") and sample.labels["model_name"] != "ada"
    }


ASKED: list[Any] = [{"role": "user", "content": "sat on a mat"}]
CALLING: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "a", "signature": ""},
        {"type": "text", "text": "on"},
        {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bern"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "more"},
    ]},
]  # fmt: skip
MESSAGES_TOOLS = [
    {"name": "weather", "description": "tells it", "input_schema": CITY}, {"name": "now", "input_schema": {}}
]  # fmt: skip
SYSTEM = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "the "}]
FORM = {"type": "json_schema", "schema": CITY}
TO_MESSAGES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "system in blocks": {"system": [*SYSTEM, {"type": "text", "text": "cat"}]},
    "system among messages": {"messages": [{"role": "system", "content": "the cat"}, *ASKED]},
    "calls and results": {"messages": CALLING, "tools": MESSAGES_TOOLS},
    "stop": {"max_tokens": 40, "stop_sequences": ["e", "zz"]},
    "json": {"max_tokens": 60, "output_config": {"format": FORM}},
    "no thinking": {"thinking": {"type": "disabled"}},
    "thinking, as the model likes": {"thinking": {"type": "adaptive"}},
}


def _message(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer of /v1/messages says, whole or joined from its events."""
    if not body["stream"]:
        found = server.plain.post("/v1/messages", json=body).json()
    else:
        found = {"content": []}
        for event in _events(server, "/v1/messages", body):
            if event["type"] == "message_start":
                found |= event["message"]
            elif event["type"] == "content_block_start":
                found["content"].append(event["content_block"])
            elif event["type"] == "content_block_delta":
                found["content"][event["index"]]["text"] += event["delta"]["text"]
            elif event["type"] == "message_delta":
                found |= event["delta"] | {"usage": event["usage"]}
    usage = {name: found["usage"][name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens")}
    usage["input_tokens"] += found["usage"].get("cache_creation_input_tokens", 0)  # theirs alone
    content = [(block["type"], block["text"]) for block in found["content"]]
    return {"content": content, "usage": usage, **{name: found.get(name) for name in MESSAGE_MEMBERS}}


MESSAGE_MEMBERS = ("type", "role", "model", "stop_reason", "stop_sequence")


def _events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with server.plain.stream("POST", path, json=body) as sent:
        for line in sent.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


RESPONSES_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "the cat"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "on", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Bern"}'},
    {"type": "function_call_output", "call_id": "1", "output": "rain"},
    {"role": "user", "content": "more"},
]
TO_RESPONSES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "conversation": {"input": ITEMS, "tools": RESPONSES_TOOLS, "tool_choice": "none"},
    "stop": {"max_output_tokens": 40, "stop": ["e", "zz"]},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "json": {"max_output_tokens": 60, "text": {"format": {**FORM, "name": "n"}}},
    "continued": {"input": [
        {"role": "user", "content": "sat"},
        {"type": "message", "role": "assistant", "status": "incomplete", "content": "one more "},
    ]},
    "required tools": {
        "max_output_tokens": 200, "tools": RESPONSES_TOOLS, "tool_choice": "required", "logit_bias": SEVERAL
    },
    "required tools, cut off": {
        "max_output_tokens": 4, "tools": RESPONSES_TOOLS, "tool_choice": "required", "logit_bias": SEVERAL
    },
    "named tool": {
        "max_output_tokens": 60, "tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "weather"},
        "logit_bias": COMPACT,
    },
}  # fmt: skip


def _response(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    if body["stream"]:
        *events, last = _events(server, "/v1/responses", body)
        found = last["response"]
        deltas = [event for event in events if event["type"].endswith(".delta")]
        for place, item in enumerate(found["output"]):
            assert "".join(event["delta"] for event in deltas if event["output_index"] == place) == _said(item)
        numbers = [event["sequence_number"] for event in (*events, last)]
        assert numbers == list(range(len(numbers)))
        logprobs = [each for event in deltas for each in event.get("logprobs", ())]
    else:
        found = server.plain.post("/v1/responses", json=body).json()
        parts = [part for item in found["output"] for part in item.get("content", ())]
        logprobs = [each for part in parts for each in part["logprobs"] or ()]
    usage = {name: found["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    content = [(item["type"], item.get("name"), _said(item)) for item in found["output"]]
    scored = [(each["token"], [other["token"] for other in each["top_logprobs"]]) for each in logprobs]
    details = found["incomplete_details"]
    return {"content": content, "usage": usage, "logprobs": scored, "status": found["status"], "details": details}


def _said(item: dict[str, Any]) -> str:
    said: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return said


TO_GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {"sampling_params": {**GREEDY, "max_tokens": 12}},
    "as many as fit": {"token_ids": [5] * (CONTEXT - 9), "sampling_params": {**GREEDY, "ignore_eos": True}},
    "several choices": {"sampling_params": {**seeded(7), "max_tokens": 20, "logprobs": 5, "n": 2}},
    "the model's end": {"sampling_params": {**ENDING, "max_tokens": 100, "logprobs": 1}},
    "stop": {"sampling_params": {**GREEDY, "max_tokens": 40, "stop": ["e", "zz"], "logprobs": 1}},
    "prompt": {"return_token_ids": True, "sampling_params": {**GREEDY, "max_tokens": 2}},
    "name": {"request_id": "mine", "sampling_params": {**GREEDY, "max_tokens": 2}},
    "text": {"output_mode": "text", "sampling_params": {**GREEDY, "max_tokens": 12}},
    "text and logprobs": {"output_mode": "text", "sampling_params": {**seeded(7), "max_tokens": 12, "logprobs": 3}},
    "text before a stop": {
        "output_mode": "text", "sampling_params": {**GREEDY, "max_tokens": 40, "stop": "e", "logprobs": 0}
    },
    "nulls and harmless fields": {
        "model": None, "token_offsets": None, "features": None, "priority": 0, "reasoning_ended": None,
        "sampling_params": {**GREEDY, "max_tokens": 3, "stop": None, "seed": None, "flat_logprobs": False,
            "detokenize": True, "skip_special_tokens": True, "prompt_logprobs": None},
    },
}  # fmt: skip


def _generated(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    if body["stream"]:
        options = {"stream_options": {"include_usage": True}}
        chunks = list(_events(server, "/inference/v1/generate", body | options))
    else:
        chunks = [server.plain.post("/inference/v1/generate", json=body).json()]
    members: dict[str, Any] = {}
    for chunk in chunks:
        members |= {name: value for name, value in chunk.items() if value is not None and name not in UNCOMPARED}
    name = members.pop("request_id").removeprefix("generate-tokens-")
    usage = members.pop("usage")
    counts = [usage[each] for each in ("prompt_tokens", "completion_tokens", "total_tokens")]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    k = body["sampling_params"].get("logprobs")
    choices = {index: _joined_ids([each for each in parts if each["index"] == index], k) for index in (0, 1)}
    return {**members, "name": name if "request_id" in body else "", "usage": counts, "choices": choices}


UNCOMPARED = ("choices", "created")


def _joined_ids(parts: list[dict[str, Any]], k: int | None) -> dict[str, Any]:
    ends = [(part["finish_reason"], part["stop_reason"]) for part in parts if part["finish_reason"]]
    entries = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
    scored = []
    for entry in entries:
        named = "token_id" if "token_id" in entry else "token"
        own, *others = (
            (each[named], single(each["logprob"]), each.get("rank")) for each in (entry, *entry["top_logprobs"])
        )
        # In texts ours are as in chats: see `as_listed_by_vllm`.
        scored.append(list({own: None, **dict.fromkeys(others)})[: k or 1])
    ids = [token for part in parts for token in part["token_ids"]]
    return {"ids": ids, "ends": ends, "text": "".join(part.get("text", "") for part in parts), "scored": scored}


DIALECTS: list[tuple[Callable[[Server, dict[str, Any]], dict[str, Any]], dict[str, Any], dict[str, dict[str, Any]]]] = [
    (_message, {"messages": ASKED, "max_tokens": 12, "temperature": 0}, TO_MESSAGES),
    (_response, {"input": "sat on", "max_output_tokens": 12, "temperature": 0}, TO_RESPONSES),
    (_generated, {"token_ids": [80, 81, 300, 2]}, TO_GENERATE),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("ask", "given"),
    [
        pytest.param(ask, usual | changes, id=f"{ask.__name__}-{name}")
        for ask, usual, cases in DIALECTS
        for name, changes in cases.items()
    ],
)
def test_same_in_other_dialects(
    servers: Servers,
    ask: Callable[[Server, dict[str, Any]], dict[str, Any]],
    given: dict[str, Any],
    is_streamed: bool,  # noqa: FBT001 - a parameter
) -> None:
    given = {"model": servers.model, "stream": is_streamed, **given}
    if "logit_bias" in given:
        given["logit_bias"] = {_token(servers, text): bias for text, bias in given["logit_bias"].items()}
    theirs, ours = servers.both(ask, given)
    assert ours == theirs


# What differs, and on purpose.


@pytest.mark.parametrize("ask", [answers, streams])
def test_offsets_count_the_text_where_tokens_are_named_by_ids(servers: Servers, ask: Callable[..., Answer]) -> None:
    """In vLLM they count the names."""
    given = {"model": servers.model, "prompt": "the cat", "max_tokens": 5, "logprobs": 2, **GREEDY}
    named = {"extra_body": {"return_tokens_as_token_ids": True}}
    theirs, ours = (answer.choices[0] for answer in servers.both(ask, completions, **given, **named))
    assert ours._replace(offsets=()) == theirs._replace(offsets=())
    assert all(name.startswith("token_id:") for name, _ in ours.tokens)
    assert ours.offsets == ask(servers.ours, completions, **given).choices[0].offsets


def test_part_of_a_character_is_named_by_its_bytes(servers: Servers) -> None:
    """A token that is part of a character has OpenAI's name for it; vLLM's is empty, or the whole character.

    In `text_offset` a character counts with the first of its tokens, in vLLM with the last.
    """
    extra = {"structured_outputs": {"choice": ["🦊é cat"]}}
    given = {"model": servers.model, "prompt": "a", "max_tokens": 20, "logprobs": 0, **GREEDY, "extra_body": extra}
    theirs, ours = (answer.choices[0] for answer in servers.both(answers, completions, **given))
    assert ours.text == theirs.text == "🦊é cat"
    assert [value for _, value in ours.tokens] == [value for _, value in theirs.tokens]
    assert [name for name, _ in theirs.tokens] == ["", "", "", "🦊", "", "é", " cat", END]
    bytes_ = "".join(f"\\x{byte:02x}" for byte in "🦊é".encode())
    assert "".join(name.removeprefix("bytes:") for name, _ in ours.tokens) == f"{bytes_} cat{END}"
    assert theirs.offsets == (0, 0, 0, 0, 1, 1, 2, 6)
    assert ours.offsets == (0, 1, 1, 1, 1, 2, 2, 6)


def test_echo_has_the_text_beside_the_ids(servers: Servers) -> None:
    """In vLLM an echo has no text of the prompt where ids are asked for, too."""
    body = TEXT | {"prompt": "the cat", "echo": True, "return_token_ids": True, **GREEDY}
    theirs, ours = servers.choices("/v1/completions", body)
    assert ours["text"] == "the cat" + theirs["text"]
    assert (ours["token_ids"], ours["prompt_token_ids"]) == (theirs["token_ids"], theirs["prompt_token_ids"])

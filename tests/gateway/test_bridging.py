"""A session's next prompt begins with the ids of the turn before, unless its history was edited."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import AddedToken

from tests.gateway.answering import App, answering
from tests.gateway.reading import read, reading
from tests.support.model_folder import byte_level, write_model
from tokenbus.gateway.bridging import Turn, digest_with
from tokenbus.gateway.completion_request import CompletionRequest, Ending, Reader
from tokenbus.gateway.errors import ApiError
from tokenbus.gateway.last_turns import LastTurns, TurnRecorder, size_of
from tokenbus.recordings.items import StreamItem
from tokenbus.recordings.session_turns import TurnReader
from tokenbus.recordings.sessions import sessions_of
from tokenbus.settings.errors import SettingsError
from tokenbus.testing import Answer, ScriptedEngine

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or () %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
END = "<|im_end|>"
USER: dict[str, Any] = {"role": "user", "content": "hello"}
NEXT: dict[str, Any] = {"role": "user", "content": "the lazy dog"}
SAID: dict[str, Any] = {"role": "assistant", "content": "quick fox"}
TOOL: dict[str, Any] = {"name": "jump", "description": "jumps", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "jump", "arguments": {"over": 2}}\n</tool_call>'
TOKENIZER = byte_level()
TOKENIZER.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", END)])
TOKENIZER.add_tokens(
    [
        AddedToken(name, special=False, normalized=False)
        for name in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    ]
)


def written(text: str) -> list[int]:
    """Return a text byte by byte, as no tokenizer would encode it, with the model's end token behind it."""
    return [each for letter in text for each in TOKENIZER.encode(letter).ids] + [TOKENIZER.token_to_id(END)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("family") / "model", TOKENIZER, TEMPLATE))


class Sessions:
    """A reader, and the turns that it finds."""

    def __init__(self, folder: str, most: int = 2**20, **given: object) -> None:
        self.turns = LastTurns(most)
        self.reader: Reader = reading(folder, given={"gateway.bridge_turns": "qwen3", **given})
        assert self.reader.bridge is not None
        self.reader.bridge.find = partial(self.turns.find, 7)

    def read(self, *messages: dict[str, Any], **fields: object) -> CompletionRequest:
        request: CompletionRequest = read(self.reader, "chat", messages=list(messages), **{"session_id": "a"} | fields)
        return request

    def answer(self, request: CompletionRequest, output: Sequence[int], ending: Ending | None = None) -> list[int]:
        """End a turn; return the ids with which the next prompt begins if it is bridged."""
        recorder = TurnRecorder(self.turns, 7, request, self.reader._vocabulary)
        recorder.add(output)
        recorder.end(ending or Ending("stop", None))
        recorder.close()
        return [*request.prompts[0], *output]


@pytest.fixture
def sessions(folder: str) -> Sessions:
    return Sessions(folder)


def _text(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False))


def test_next_prompt_begins_with_the_ids_of_the_turn_before(sessions: Sessions) -> None:
    first = sessions.read(USER)
    assert (first.bridging, bool(first.conversation)) == ("", True)
    begin = sessions.answer(first, written("quick fox"))
    second = sessions.read(USER, SAID, NEXT)
    assert second.bridging == "bridged"
    assert list(second.prompts[0][: len(begin)]) == begin
    again = reading_alone(sessions, USER, SAID, NEXT)
    assert _text(second.prompts[0]) == _text(again)
    assert second.prompts[0] != again
    begin = sessions.answer(second, written("jumps"))
    third = sessions.read(USER, SAID, NEXT, {"role": "assistant", "content": "jumps"}, USER)
    assert list(third.prompts[0][: len(begin)]) == begin


def reading_alone(sessions: Sessions, *messages: dict[str, Any], **fields: object) -> list[int]:
    """Return the prompt that the messages have without a session."""
    return list(sessions.read(*messages, **{"session_id": None} | fields).prompts[0])


@pytest.mark.parametrize(
    "messages",
    [
        ({**USER, "content": "hello world"}, SAID, NEXT),
        (USER, {**SAID, "content": "quick  fox"}, NEXT),
        (USER, {**SAID, "content": None}, NEXT),
        (USER, {**SAID, "reasoning": "hm"}, NEXT),
        ({"role": "system", "content": "brown"}, USER, SAID, NEXT),
        (USER, SAID, NEXT, {"role": "assistant", "content": "jumps"}, USER),
    ],
)
def test_edited_history_is_not_bridged(sessions: Sessions, messages: Sequence[dict[str, Any]]) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    request = sessions.read(*messages)
    assert request.bridging == "unknown"
    assert list(request.prompts[0]) == reading_alone(sessions, *messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": "b"},
        {"tools": [{"type": "function", "function": TOOL}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "a"}]},
    ],
)
def test_turn_belongs_to_its_session_tools_and_variables(sessions: Sessions, fields: dict[str, Any]) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    assert sessions.read(USER, SAID, NEXT, **fields).bridging == "unknown"


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": None},
        {"n": 2},
        {"truncate_prompt_tokens": 5},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_special_tokens": True},
        {"echo": True},
    ],
)
def test_requests_that_are_not_one_turn_of_a_session_are_not_bridged(
    sessions: Sessions, fields: dict[str, Any]
) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    request = sessions.read(USER, SAID, **fields)
    assert (request.bridging, request.conversation) == ("", b"")


def test_each_branch_of_a_session_has_its_own_turns(sessions: Sessions) -> None:
    first = sessions.answer(sessions.read(USER), written("quick fox"))
    other = sessions.answer(sessions.read(NEXT), written("quick fox"))
    assert list(sessions.read(USER, SAID, NEXT).prompts[0][: len(first)]) == first
    assert list(sessions.read(NEXT, SAID, NEXT).prompts[0][: len(other)]) == other


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"enable_thinking": True}, {"mood": "calm"}])
def test_variables_of_the_template_hold_for_the_next_turn(sessions: Sessions, variables: dict[str, Any]) -> None:
    begin = sessions.answer(sessions.read(USER, chat_template_kwargs=variables), written("quick fox"))
    second = sessions.read(USER, SAID, NEXT, chat_template_kwargs=variables)
    assert second.bridging == "bridged"
    assert list(second.prompts[0][: len(begin)]) == begin
    assert _text(second.prompts[0]).endswith("</think>\n\n") == (not variables.get("enable_thinking", True))


def test_variables_that_the_family_refuses_are_not_bridged(sessions: Sessions) -> None:
    for value in ("no", [1]):  # the family takes the first one for false, and the template for true
        variables: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": value}}
        sessions.answer(sessions.read(USER, **variables), written("quick fox"))
        assert sessions.read(USER, SAID, NEXT, **variables).bridging == "refused"


@pytest.mark.parametrize(
    "ending", [Ending("length", None), Ending("stop", "fox"), Ending("stop", 5), Ending("abort", None)]
)
def test_only_turns_that_the_model_ended_are_continued(sessions: Sessions, ending: Ending) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"), ending)
    assert sessions.read(USER, SAID, NEXT).bridging == "unknown"
    assert sessions.turns.size == 0


def test_template_that_writes_another_text_is_not_bridged(tmp_path: Path) -> None:
    template = TEMPLATE.replace("<|im_start|>{{ message.role }}", "<|im_start|>{{ message.role | upper }}")
    other = Sessions(str(write_model(tmp_path / "model", TOKENIZER, template)))
    other.answer(other.read(USER), written("quick fox"))
    request = other.read(USER, SAID, NEXT)
    assert request.bridging == "refused"
    assert list(request.prompts[0]) == reading_alone(other, USER, SAID, NEXT)


@pytest.mark.parametrize(
    "added",
    [
        [{"role": "narrator", "content": "jumps"}, NEXT],
        [NEXT, {"role": "narrator", "content": "jumps"}, NEXT],
        [],
    ],
)
def test_roles_that_the_renderer_does_not_know_are_not_bridged(
    sessions: Sessions, added: Sequence[dict[str, Any]]
) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    assert sessions.read(USER, SAID, *added).bridging == "refused"


def test_message_that_a_renderer_leaves_out_is_not_lost(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    bridge: Any = sessions.reader.bridge
    (renderer,) = bridge._renderers.values()
    whole = renderer.bridge_to_next_turn
    for left_out, result in ((0, "refused"), (1, "refused"), (2, "bridged")):
        monkeypatch.setattr(
            renderer,
            "bridge_to_next_turn",
            lambda prompt, output, messages, tools, without=left_out: whole(
                prompt, output, [each for place, each in enumerate(messages) if place != without], tools=tools
            ),
        )
        # The text of the first message is also in the frame of the second one.
        assert sessions.read(USER, SAID, {**NEXT, "content": "user"}, NEXT).bridging == result


def test_turn_that_did_not_end_as_the_template_ends_it_is_not_bridged(sessions: Sessions) -> None:
    sessions.answer(sessions.read(USER), [*written("quick fox")[:-1], TOKENIZER.token_to_id("<|endoftext|>")])
    request = sessions.read(USER, SAID, NEXT)
    assert request.bridging == "refused"
    assert list(request.prompts[0]) == reading_alone(sessions, USER, SAID, NEXT)


def test_lack_of_memory_is_no_refusal(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: object, **_named: object) -> None:
        raise MemoryError

    sessions.answer(sessions.read(USER), written("quick fox"))
    bridge: Any = sessions.reader.bridge
    (renderer,) = bridge._renderers.values()
    variables: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    sessions.answer(sessions.read(USER, **variables), written("quick fox"))
    with monkeypatch.context() as patched:
        patched.setattr(renderer, "bridge_to_next_turn", fail)
        patched.setattr(bridge._library, "create_renderer", fail)
        with pytest.raises(MemoryError):
            sessions.read(USER, SAID, NEXT)
        with pytest.raises(MemoryError):
            sessions.read(USER, SAID, NEXT, **variables)
    assert sessions.read(USER, SAID, NEXT, **variables).bridging == "bridged"


def test_text_of_a_bridged_prompt_has_no_offsets(sessions: Sessions) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    for label, has_offsets in (("a", False), ("b", True)):
        asked = {"model": "m", "messages": [USER, SAID, NEXT], "session_id": label, "return_token_offsets": True}
        rendered = orjson.loads(sessions.reader.chat_rendering(asked))
        assert rendered["token_offsets"] is None or len(rendered["token_offsets"]) == len(rendered["token_ids"])
        assert (rendered["token_offsets"] is not None) == has_offsets


def test_bridged_prompt_that_is_too_long_is_encoded_instead(folder: str) -> None:
    sessions = Sessions(folder, **{"gateway.max_prompt_tokens": 60})
    sessions.answer(sessions.read(USER), written("quick fox " * 5))
    request = sessions.read(USER, {**SAID, "content": "quick fox " * 5}, NEXT)
    assert (request.bridging, len(request.prompts[0]) <= 60) == ("refused", True)


def test_bridged_prompt_that_does_not_fit_the_model_is_encoded_instead(sessions: Sessions) -> None:
    sessions.answer(sessions.read(USER), written("quick fox"))
    size = len(sessions.read(USER, SAID, NEXT).prompts[0])
    for context, result in ((size + 1, "bridged"), (size, "refused")):
        sessions.reader.models = dict.fromkeys(sessions.reader.models, context)
        assert sessions.read(USER, SAID, NEXT).bridging == result


def test_least_recently_used_turns_are_dropped() -> None:
    turn = Turn(b"1234", b"5678")
    turns = LastTurns(3 * size_of(turn))
    for digest in (b"a", b"b", b"c"):
        assert turns.hold(size_of(turn))
        turns.keep(1, "s", digest, turn)
    assert turns.find(1, "s", b"a") == turn
    assert turns.hold(size_of(turn))
    turns.keep(1, "s", b"d", turn)
    assert [turns.find(1, "s", digest) for digest in (b"a", b"b", b"c", b"d")] == [turn, None, turn, turn]
    assert (turns.find(2, "s", b"a"), turns.find(1, "t", b"a")) == (None, None)
    assert (turns.size, turns.dropped) == (turns.most, 1)
    assert not turns.hold(turns.most + 1)


def test_turn_is_kept_again_in_its_place() -> None:
    turn = Turn(b"1234", b"5678")
    turns = LastTurns(1000)
    for _ in range(2):
        assert turns.hold(size_of(turn))
        turns.keep(1, "s", b"a", turn)
    assert turns.size == size_of(turn)


def test_recorder_keeps_no_second_copy_of_the_prompt(sessions: Sessions) -> None:
    request = sessions.read(USER)
    recorder = TurnRecorder(sessions.turns, 7, request, sessions.reader._vocabulary)
    assert all(each is not request for each in vars(recorder).values())
    recorder.close()
    assert sessions.turns.size == 0


def test_turn_without_room_is_not_kept(folder: str) -> None:
    sessions = Sessions(folder, most=700)
    sessions.answer(sessions.read(USER), written("quick fox " * 5))
    assert sessions.read(USER, {**SAID, "content": "quick fox " * 5}, NEXT).bridging == "unknown"
    assert sessions.turns.size == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
        ({"content": None}, {"content": ""}),
        ({"tool_calls": None}, {"tool_calls": []}),
    ],
)
def test_messages_in_other_forms_have_the_same_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": "a"}
    assert digest_with(b"", said | one) == digest_with(b"", said | other)


def _called(content: object, arguments: object, call_id: str = "1") -> bytes:
    call = {"id": call_id, "function": {"name": "jump", "arguments": arguments}}
    return digest_with(b"", {"role": "assistant", "content": content, "tool_calls": [call]})


def test_calls_in_other_forms_have_the_same_digest() -> None:
    expected = _called(None, '{"over": 2, "a": 1}')
    assert _called("\n", {"a": 1, "over": 2}, "2") == expected
    assert _called(None, '{"over": 3, "a": 1}') != expected
    assert _called("a", '{"over": 2, "a": 1}') != expected
    assert _called(None, '{"over"') == _called("", '{"over"')
    assert _called(None, f"[{2**64 + 1}]") != _called(None, f"[{2**64 + 2}]")


def test_call_with_deep_arguments_is_kept(folder: str) -> None:
    given: dict[str, Any] = {"gateway.tool_call_parser": "hermes"}
    sessions = Sessions(folder, **given)
    deep = {"arguments": f'{{"over": {"[" * 900}{"]" * 900}}}', "name": "jump"}
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]}
    sessions.answer(sessions.read(USER, **tools), written(CALL.replace('{"over": 2}', deep["arguments"])))
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": deep}]}
    request = sessions.read(USER, called, {"role": "tool", "tool_call_id": "1", "content": "2"}, **tools)
    assert request.bridging == "bridged"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"gateway.bridge_turns": "qwen"}, "gateway.bridge_turns: empty or one of deepseek-r1, "),
        ({"gateway.bridge_turns": "auto"}, "gateway.bridge_turns: empty or one of deepseek-r1, "),
        (
            {"gateway.bridge_turns": "deepseek-v3"},
            "gateway.bridge_turns: the family of the model in gateway.tokenizer (",
        ),
        (
            {"gateway.chat_template": "roles"},
            "gateway.bridge_turns: empty unless gateway.tokenizer is a model's folder and gateway.chat_template is",
        ),
    ],
)
def test_setting_that_does_not_fit_is_refused(folder: str, given: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Sessions(folder, **given)
    assert str(refused.value).startswith(line)


def test_bridging_needs_a_model_and_the_package(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="a model's folder"):
        Sessions("bytes")
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(SettingsError, match=r"^gateway.bridge_turns: empty unless the extra bridge is installed \("):
        Sessions(folder)


OUTPUTS = [written("quick fox"), written(CALL), written("the lazy dog")]


class Session:
    """Checks the prompts of a session that reach the engine."""

    def __init__(self, app: App, engine: ScriptedEngine, label: str) -> None:
        self.app = app
        self.label = label
        self._engine = engine
        self._begin: list[int] = []

    def check(self) -> None:
        """Compare the newest prompt with the turn before."""
        prompt = list(self._engine.admitted[-1].tokens.token_ids)
        assert prompt[: len(self._begin)] == self._begin
        assert _text(prompt).endswith("<|im_start|>assistant\n")
        self._begin = prompt + OUTPUTS[(len(self._engine.admitted) - 1) % len(OUTPUTS)]


async def _with_openai(session: Session, *, streams: bool) -> None:
    tools: Any = [{"type": "function", "function": TOOL}]
    messages: list[Any] = [USER]
    async with session.app.openai() as client:
        for _ in OUTPUTS:
            asked: Any = {"model": "tokenbus", "messages": messages, "tools": tools}
            asked["extra_body"] = {"session_id": session.label}
            if streams:
                async with client.chat.completions.stream(**asked) as stream:
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            session.check()
            message = answer.choices[0].message
            results = [{"role": "tool", "tool_call_id": each.id, "content": "2"} for each in message.tool_calls or ()]
            messages += [message, *(results or [NEXT])]


async def _with_anthropic(session: Session, *, streams: bool) -> None:
    tools: Any = [{"name": "jump", "description": "jumps", "input_schema": {"type": "object"}}]
    messages: list[Any] = [USER]
    async with session.app.anthropic() as client:
        for _ in OUTPUTS:
            asked: Any = {"model": "tokenbus", "messages": messages, "tools": tools, "max_tokens": 200}
            asked["extra_headers"] = {"X-Session-Id": session.label}
            if streams:
                async with client.messages.stream(**asked) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            session.check()
            calls = [block.id for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": each, "content": "2"} for each in calls]
            messages += [{"role": "assistant", "content": answer.content}]
            messages += [{"role": "user", "content": results or NEXT["content"]}]


async def _with_responses(session: Session, *, streams: bool) -> None:
    tools: Any = [{"type": "function", **TOOL}]
    items: list[Any] = [USER]
    async with session.app.openai() as client:
        for _ in OUTPUTS:
            asked: Any = {"model": "tokenbus", "input": items, "tools": tools}
            asked["extra_body"] = {"session_id": session.label}
            if streams:
                async with client.responses.stream(**asked) as stream:
                    answer: Any = await stream.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            session.check()
            calls = [item.call_id for item in answer.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": each, "output": "2"} for each in calls]
            items += [*answer.output, *(results or [NEXT])]


@pytest.mark.process
async def test_agents_of_all_clients_stay_on_one_branch(folder: str) -> None:
    clients = (_with_openai, _with_anthropic, _with_responses)
    asks = [(ask, streams) for ask in clients for streams in (False, True)]
    engine = ScriptedEngine(*(Answer(tokens=output, tokens_per_step=3) for output in OUTPUTS * len(asks)))
    given: dict[str, Any] = {"gateway__bridge_turns": "qwen3", "gateway__tool_call_parser": "hermes"}
    with TurnReader() as reader:
        async with answering(engine, gateway__tokenizer=folder, **given) as app, app.bus.client.watch() as watched:
            collecting = asyncio.create_task(_collect(watched, reader))
            for number, (ask, streams) in enumerate(asks):
                await ask(Session(app, engine, str(number)), streams=streams)
                assert app.gateway.counts.bridged_turns == {"bridged": 2 * number + 2}
            await app.bus.settle()
            collecting.cancel()
            async with app.client() as client:
                page = (await client.get("/metrics")).text
        sessions = list(sessions_of(reader))
    assert 'tokenbus_gateway_bridged_turns_total{result="bridged"} 12.0' in page
    assert app.gateway.turns.size == sum(map(size_of, app.gateway.turns._turns.values()))
    assert [(session.missing, len(session.requests), len(session.branches)) for session in sessions] == [
        ([], len(OUTPUTS), 1)
    ] * len(asks)


async def test_bodies_without_a_session_need_no_encoder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_given: object) -> None:
        raise ApiError(503, "no encoder", code="overloaded")

    engine = ScriptedEngine(Answer(tokens=written("quick fox")))
    async with answering(engine, gateway__tokenizer=folder, gateway__bridge_turns="qwen3") as app:
        monkeypatch.setattr(app.gateway.encoders, "read", refuse)
        async with app.client() as client:
            headers: dict[str, str]
            for headers, fields, status in (
                ({}, {}, 200),
                ({}, {"session_id": "a"}, 503),
                ({"x-session-id": "a"}, {}, 503),
            ):
                body = {"messages": [USER], **fields}
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == status


async def _collect(watched: AsyncIterator[StreamItem], reader: TurnReader) -> None:
    async for item in watched:
        reader.add(item)

"""What is written of rows: each form says what the columns hold, in a stream as at once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.gateway.rendering import array, chunks, joined, said
from tests.in_process.builders import settings
from tests.support.model_folder import END, byte_level, write_model
from tokenbus.client.tokens import Turn
from tokenbus.engines.paddle import tokenizer
from tokenbus.gateway.buffers import Buffers
from tokenbus.gateway.completion_request import CompletionRequest
from tokenbus.gateway.rendered_step import RenderedStep
from tokenbus.gateway.sse import InspectorFormat, StreamedAnswer
from tokenbus.gateway.vocabulary import Vocabulary, vocabulary_of
from tokenbus.model_files import ModelTokenizer
from tokenbus.testing import RowShape, batch
from tokenbus_contracts import BatchKind, LogprobBatch, Row, RowStatus, Scoring

VOCABULARIES = {name: vocabulary_of(name) for name in ("ngram", "bytes", "numbers")}
NO_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}
KEYS = (3, 4)


def _steps(top_k: int = 2, scoring: Scoring = Scoring.FULL) -> list[tuple[LogprobBatch, LogprobBatch | None]]:
    steps: list[tuple[LogprobBatch, LogprobBatch | None]] = []
    for step, (position, count, status) in enumerate(
        [(0, 1, RowStatus.ACTIVE), (1, 3, RowStatus.ACTIVE), (4, 2, RowStatus.FINISHED_LENGTH)], 1
    ):
        rows = [RowShape(key, position, count, status, scoring, top_k) for key in KEYS]
        neighbour = RowShape(9, position, 4, RowStatus.ACTIVE, top_k=5)
        drafts = [RowShape(4, position, 2, RowStatus.ACTIVE, scoring, top_k)]
        draft = batch(drafts, step=step, kind=BatchKind.DRAFT, selection=True) if step == 2 else None
        steps.append((batch([*rows, neighbour], step=step), draft))
    return steps


def _asked(**fields: Any) -> CompletionRequest:  # noqa: ANN401 - as they are
    return CompletionRequest(model="tokenbus", prompts=[[1, 2]], n=len(KEYS), **fields)


def _truth(steps: list[tuple[LogprobBatch, LogprobBatch | None]], place: int, *, draft: bool = False) -> list[Row]:
    batches = [step[draft] for step in steps]
    return [row for each in batches if each is not None for row in each.rows() if row.request_id == KEYS[place]]


def _pairs(rows: list[Row]) -> list[list[tuple[int, float]]]:
    return [
        list(zip(ids, logprobs, strict=True))
        for row in rows
        for ids, logprobs in zip(row.alternative_token_ids.tolist(), row.alternative_logprobs.tolist(), strict=True)
    ]


def _name(vocabulary: str, token_id: int, *, is_id: bool = False) -> str:
    name: str = f"token_id:{token_id}" if is_id else json.loads(VOCABULARIES[vocabulary].names[token_id])
    return name


def _choices(data: bytes, place: int) -> list[dict[str, Any]]:
    return [choice for chunk in chunks(data) for choice in chunk["choices"] if choice["index"] == place]


@pytest.mark.parametrize(
    ("vocabulary", "is_id"), [*((vocabulary, False) for vocabulary in VOCABULARIES), ("ngram", True)]
)
@pytest.mark.parametrize("top_k", [0, 2, 20])
async def test_lists_say_what_the_columns_hold(vocabulary: str, top_k: int, *, is_id: bool) -> None:
    """Tokens have their texts as names, or their ids where that is asked for."""
    steps, asked = _steps(top_k), _asked(top_logprobs=top_k, names_ids=is_id)
    streamed = await said(replace(asked, is_streamed=True), steps, VOCABULARIES[vocabulary])
    whole = json.loads(await said(asked, steps, VOCABULARIES[vocabulary]))
    for place in range(len(KEYS)):
        rows = _truth(steps, place)
        ids = [token for row in rows for token in row.token_ids.tolist()]
        found = [choice["logprobs"] for choice in _choices(streamed, place)]
        names = [_name(vocabulary, token, is_id=is_id) for token in ids]
        logprobs = [value for row in rows for value in row.logprobs.tolist()]
        assert joined(found, "tokens") == names
        assert np.array(joined(found, "token_logprobs"), np.float32).tolist() == logprobs
        tops = joined(found, "top_logprobs")
        for top, pairs, name, logprob in zip(tops, _pairs(rows), names, logprobs, strict=True):
            wanted = {_name(vocabulary, token, is_id=is_id): value for token, value in pairs} | {name: logprob}
            assert {key: float(np.float32(value)) for key, value in top.items()} == wanted
            assert next(iter(top)) == name  # the others behind it are sorted, the most probable first
            assert list(top.values())[1:] == sorted(list(top.values())[1:], reverse=True)
        at_once = whole["choices"][place]["logprobs"]
        assert {name: joined(found, name) for name in at_once} == at_once
        text = "".join(choice["text"] for choice in _choices(streamed, place))
        assert text == whole["choices"][place]["text"]
        pieces = b"".join(VOCABULARIES[vocabulary].pieces[token] for token in ids)
        assert text == pieces.decode(errors="replace").rstrip("\ufffd")


@pytest.mark.parametrize("is_id", [False, True])
@pytest.mark.parametrize("top_k", [0, 2])
async def test_entries_say_what_the_columns_hold(top_k: int, *, is_id: bool) -> None:
    steps, asked = _steps(top_k), _asked(top_logprobs=top_k, is_chat=True, names_ids=is_id)
    streamed = await said(replace(asked, is_streamed=True), steps, VOCABULARIES["ngram"])
    whole = json.loads(await said(asked, steps, VOCABULARIES["ngram"]))
    for place in range(len(KEYS)):
        rows = _truth(steps, place)
        first, *others = _choices(streamed, place)
        assert first["delta"] == {"role": "assistant", "content": ""}
        entries = joined([choice["logprobs"] for choice in others], "content")
        ids = [token for row in rows for token in row.token_ids.tolist()]
        assert [entry["token"] for entry in entries] == [_name("ngram", token, is_id=is_id) for token in ids]
        assert [bytes(entry["bytes"]) for entry in entries] == [VOCABULARIES["ngram"].pieces[token] for token in ids]
        for entry, pairs in zip(entries, _pairs(rows), strict=False):
            wanted = [(_name("ngram", token, is_id=is_id), np.float32(value)) for token, value in pairs]
            assert [(each["token"], np.float32(each["logprob"])) for each in entry["top_logprobs"]] == wanted
        assert whole["choices"][place]["logprobs"]["content"] == entries
        content = "".join(choice["delta"]["content"] for choice in others)
        assert whole["choices"][place]["message"]["content"] == content


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_columns_hold_the_same_bits(is_streamed: bool) -> None:  # noqa: FBT001 - a parameter of the test
    steps = _steps(2)
    asked = _asked(top_logprobs=2, wants_columns=True, wants_drafts=True, is_streamed=is_streamed)
    data = await said(asked, steps, VOCABULARIES["ngram"])
    for place in range(len(KEYS)):
        choices = _choices(data, place) if is_streamed else [json.loads(data)["choices"][place]]
        for name, is_draft in (("columns", False), ("draft_columns", True)):
            rows, given = _truth(steps, place, draft=is_draft), [choice[name] for choice in choices if choice[name]]
            assert sum(each["tokens"] for each in given) == sum(row.token_ids.size for row in rows)
            for column, kind, true in (
                ("token_ids", "<u4", [row.token_ids for row in rows]),
                ("logprobs", "<f4", [row.logprobs for row in rows]),
                ("ranks", "<u4", [row.ranks for row in rows]),
                ("top_token_ids", "<u4", [row.alternative_token_ids.ravel() for row in rows]),
                ("top_logprobs", "<f4", [row.alternative_logprobs.ravel() for row in rows]),
            ):
                found = np.concatenate([array("", kind), *(array(each[column], kind) for each in given)])
                assert found.tobytes() == b"".join(each.tobytes() for each in true)
            assert set(b"".join(array(each["top_ks"], "u1").tobytes() for each in given)) <= {2}


@pytest.mark.parametrize("is_chat", [False, True])
async def test_drafts_stand_beside_logprobs(is_chat: bool) -> None:  # noqa: FBT001
    steps = _steps(1)
    asked = _asked(top_logprobs=1, wants_drafts=True, is_streamed=True, is_chat=is_chat)
    data = await said(asked, steps, VOCABULARIES["ngram"])
    names = [_name("ngram", token) for row in _truth(steps, 1, draft=True) for token in row.token_ids.tolist()]
    given: list[Any] = [choice.get("draft_logprobs") for choice in _choices(data, 1)[is_chat:]]
    assert [each is None for each in given] == [True, False, True]
    tokens = [entry["token"] for entry in given[1]["content"]] if is_chat else given[1]["tokens"]
    assert tokens == names
    assert all(choice.get("draft_logprobs") is None for choice in _choices(data, 0))


async def test_token_ids_come_on_request() -> None:
    """`return_token_ids` gives the ids of the prompt and of every token, token 0 like any other (case 10)."""
    steps = _steps()
    whole = json.loads(await said(_asked(wants_ids=True), steps, VOCABULARIES["ngram"]))
    streamed = await said(_asked(wants_ids=True, is_streamed=True), steps, VOCABULARIES["ngram"])
    for place in range(len(KEYS)):
        ids = [token for row in _truth(steps, place) for token in row.token_ids.tolist()]
        first, *others = _choices(streamed, place)
        assert whole["choices"][place]["token_ids"] == joined([first, *others], "token_ids") == ids
        assert whole["choices"][place]["prompt_token_ids"] == first["prompt_token_ids"] == [1, 2]
        assert len(first["token_ids"]) == len(_truth(steps, place)[0].token_ids)
        assert all("prompt_token_ids" not in choice or choice["prompt_token_ids"] is None for choice in others)
    asked = _asked(wants_ids=True, is_chat=True)
    whole = json.loads(await said(asked, steps, VOCABULARIES["ngram"]))
    first, *_ = chunks(await said(replace(asked, is_streamed=True), steps, VOCABULARIES["ngram"]))
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == [1, 2]
    assert all("prompt_token_ids" not in choice for choice in whole["choices"] + first["choices"])


@pytest.mark.parametrize("is_chat", [False, True])
async def test_answer_has_the_name_that_was_asked_for(is_chat: bool) -> None:  # noqa: FBT001
    steps = _steps()
    kind = "chatcmpl" if is_chat else "cmpl"
    for name, given in (("mine", "mine"), ("", f"{0xA:016x}")):
        whole = json.loads(await said(_asked(name=name, is_chat=is_chat), steps, VOCABULARIES["ngram"]))
        streamed = await said(_asked(name=name, is_chat=is_chat, is_streamed=True), steps, VOCABULARIES["ngram"])
        assert {whole["id"], *(chunk["id"] for chunk in chunks(streamed))} == {f"{kind}-{given}"}


@pytest.mark.parametrize("scoring", [Scoring.SHED, Scoring.NONE])
@pytest.mark.parametrize("is_chat", [False, True])
async def test_rows_without_alternatives_or_scores_say_so(scoring: Scoring, is_chat: bool) -> None:  # noqa: FBT001
    steps = _steps(0, scoring)
    whole = json.loads(await said(_asked(top_logprobs=2, is_chat=is_chat), steps, VOCABULARIES["ngram"]))
    logprobs = whole["choices"][0]["logprobs"]
    values = [each["logprob"] for each in logprobs["content"]] if is_chat else logprobs["token_logprobs"]
    assert len(values) == 6
    assert all((value is None) == (scoring is Scoring.NONE) for value in values)
    tops = [each["top_logprobs"] for each in logprobs["content"]] if is_chat else logprobs["top_logprobs"]
    assert all(not top for top in tops)


@pytest.mark.parametrize("cached", [None, 0, 1])
async def test_usage_counts_prompts_and_all_choices(cached: int | None) -> None:
    steps = _steps()
    nulls = {"created_cache_tokens": None, "multimodal_tokens": None}
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached, **nulls}}
    usage = {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14, **NO_DETAILS, **details}
    assert json.loads(await said(_asked(), steps, VOCABULARIES["ngram"], cached=cached))["usage"] == usage
    data = await said(_asked(is_streamed=True, wants_usage=True), steps, VOCABULARIES["ngram"], cached=cached)
    *others, last = chunks(data)
    assert (last["choices"], last["usage"]) == ([], usage)
    assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_choice_that_went_on_elsewhere_has_its_turns(is_streamed: bool) -> None:  # noqa: FBT001
    turns = [Turn(0, 5), Turn(2, 2**60, "worker_lost", "w")]
    data = await said(_asked(is_streamed=is_streamed), _steps(), VOCABULARIES["ngram"], turns=turns)
    found = [choice for chunk in (chunks(data) if is_streamed else [json.loads(data)]) for choice in chunk["choices"]]
    ended = [choice["turns"] for choice in found if choice["finish_reason"]]
    assert (
        ended
        == [
            [
                {"request_id": "0000000000000005", "start": 0, "reason": ""},
                {"request_id": "1000000000000000", "start": 2, "reason": "worker_lost"},
            ]
        ]
        * 2
    )


@pytest.mark.parametrize("is_chat", [False, True])
async def test_what_is_not_there_is_null(is_chat: bool) -> None:  # noqa: FBT001
    """As in vLLM: an SDK's object has an attribute only for what the answer has."""
    whole = json.loads(await said(_asked(is_chat=is_chat), _steps(), VOCABULARIES["ngram"]))
    answer, choice = {"system_fingerprint", "service_tier", "kv_transfer_params"}, {"token_ids", "stop_reason"}
    of_prompt = {"prompt_token_ids", "prompt_logprobs"}
    (answer if is_chat else choice).update(of_prompt)
    assert {name for name in answer if whole[name] is None} == answer
    assert {name for name in choice if whole["choices"][0][name] is None} == choice
    if is_chat:
        names = {"refusal", "annotations", "audio", "function_call", "reasoning"}
        assert {name for name, value in whole["choices"][0]["message"].items() if value is None} == names
    data = await said(_asked(is_chat=is_chat, is_streamed=True), _steps(), VOCABULARIES["ngram"])
    for chunk in _choices(data, 0)[is_chat:]:
        wanted = {"token_ids", "stop_reason"} | (set() if is_chat else {"prompt_token_ids"})
        assert {name for name in wanted if chunk[name] is None} == wanted


@pytest.mark.parametrize("is_chat", [False, True])
async def test_every_chunk_has_the_usage_up_to_it_on_request(is_chat: bool) -> None:  # noqa: FBT001
    asked = _asked(is_streamed=True, is_chat=is_chat, wants_usage=True, wants_running_usage=True)
    *others, last = chunks(await said(asked, _steps(), VOCABULARIES["ngram"]))
    for place in range(len(KEYS)):
        usages = [chunk["usage"] for chunk in others if chunk["choices"][0]["index"] == place]
        counts = [0] * is_chat + [1, 4, 6]
        assert [usage["completion_tokens"] for usage in usages] == counts
        assert all(usage["prompt_tokens"] == 2 for usage in usages)
        assert [usage["total_tokens"] for usage in usages] == [2 + count for count in counts]
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14, **NO_DETAILS}


async def test_stop_cuts_everything_together() -> None:
    """A stop inside a block of tokens ends text, ids and logprobs at the token that completes it (case 13)."""
    steps = _steps()
    ids = [token for row in _truth(steps, 0) for token in row.token_ids.tolist()]
    vocabulary = VOCABULARIES["numbers"]
    stop = str(ids[2])
    asked = CompletionRequest(
        model="tokenbus", prompts=[[1]], sampling={"stop": [stop]}, top_logprobs=2, wants_ids=True
    )
    choice = json.loads(await said(asked, steps, vocabulary))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == ids[:3]
    assert choice["text"] == f" {ids[0]} {ids[1]} "
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 3


@pytest.mark.parametrize("stops", [(), ("never",)])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_included", [False, True])
async def test_stop_token_ends_the_text_before_it(
    stops: tuple[str, ...], *, is_streamed: bool, is_included: bool
) -> None:
    rows = [RowShape(3, 0, 2), RowShape(3, 2, 2, RowStatus.FINISHED_STOP, stop=1)]
    steps: list[tuple[LogprobBatch, LogprobBatch | None]] = [
        (batch([row], step=step), None) for step, row in enumerate(rows, 1)
    ]
    ids = [token for row in _truth(steps, 0) for token in row.token_ids.tolist()]
    others: dict[str, Any] = {"stop_token_ids": [ids[3], ids[0]]}
    if is_included:
        others["include_stop_string"] = True
    asked = CompletionRequest(
        model="tokenbus", prompts=[[1]], sampling={**others, "stop": stops}, wants_ids=True, top_logprobs=0,
        is_streamed=is_streamed,
    )  # fmt: skip
    data = await said(asked, steps, VOCABULARIES["numbers"])
    choices = _choices(data, 0) if is_streamed else json.loads(data)["choices"]
    assert "".join(choice["text"] for choice in choices) == "".join(f" {each}" for each in ids[: 3 + is_included])
    assert [token for choice in choices for token in choice.get("token_ids", ())] == ids
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", ids[3])


@pytest.mark.parametrize(
    ("others", "stop", "text", "reason"),
    [
        ({}, 0, "ab", None),
        ({"include_special_tokens": True}, 0, f"{END}ab", None),
        ({"include_special_tokens": True, "include_stop_string": True}, 0, f"{END}ab{END}", None),
        ({"include_special_tokens": True, "stop_token_ids": [1]}, 1, f"{END}ab", "id"),
        ({"include_special_tokens": True}, 2, f"{END}a", f"b{END}"),
    ],
)
async def test_special_tokens_are_in_the_text_where_they_are_wanted(
    tmp_path: Path, others: dict[str, Any], stop: int, text: str, reason: str | None
) -> None:
    model = ModelTokenizer(write_model(tmp_path, byte_level()))
    ids = model.encode(f"{END}ab{END}")
    made = batch([RowShape(3, 0, len(ids), RowStatus.FINISHED_STOP, stop=stop)], step=1)
    made = LogprobBatch.of_views(made.header, made.columns | {"token_ids": np.array(ids, np.uint32)})
    asked = CompletionRequest(
        model="tokenbus", prompts=[[1]], sampling={**others, "stop": [f"b{END}"] if stop > 1 else []}, wants_ids=True
    )
    (choice,) = json.loads(await said(asked, [(made, None)], Vocabulary(model)))["choices"]
    assert (choice["text"], choice["token_ids"]) == (text, ids)
    assert choice["stop_reason"] == (ids[-1] if reason == "id" else reason)


@pytest.mark.parametrize(
    ("sampling", "status", "stop", "reason"),
    [
        ({"stop": ["a", "<end>"]}, RowStatus.FINISHED_STOP, 3, "<end>"),
        ({"stop_token_ids": [2**31 - 2]}, RowStatus.FINISHED_STOP, 0, None),
        ({"stop_token_ids": [2**31 - 2]}, RowStatus.FINISHED_LENGTH, 0, None),
    ],
)
async def test_end_whose_stop_is_not_in_the_text_cuts_nothing(
    sampling: dict[str, Any], status: RowStatus, stop: int, reason: str | None
) -> None:
    """A stop text that lies in special tokens' texts is named; an end that no stop of the request made has none."""
    steps = [(batch([RowShape(3, 0, 2, status, stop=stop)], step=1), None)]
    asked = CompletionRequest(model="tokenbus", prompts=[[1]], sampling=sampling)
    (choice,) = json.loads(await said(asked, steps, VOCABULARIES["numbers"]))["choices"]
    assert (choice["stop_reason"], len(choice["text"].split())) == (reason, 2)


async def test_inspector_tells_parts_of_characters_apart() -> None:
    first, second = "\u00e9".encode()
    ids, others = [ord("a"), first, second, tokenizer.END], [0xC4, second, ord("b"), tokenizer.END]
    made = batch([RowShape(3, 0, 4, RowStatus.FINISHED_LENGTH, top_k=1)], step=1)
    columns = {"token_ids": np.array(ids, np.uint32), "alternative_token_ids": np.array(others, np.uint32)}
    made = LogprobBatch.of_views(made.header, made.columns | columns)
    asked = CompletionRequest(model="m", prompts=[[1]], top_logprobs=1)
    form = InspectorFormat(asked, 1)  # type: ignore[abstract]  # it is always streamed
    answer = StreamedAnswer(asked, form, settings().gateway, Buffers(2**30))
    answer.begin(lambda: None)
    answer.choices[0].take(RenderedStep(made, VOCABULARIES["bytes"]), 0)
    _, row, *_ = answer.queue.take(2**30).data.decode().split("\n\n")
    tokens = json.loads(row.partition("data: ")[2])["tokens"]
    assert [token["text"] for token in tokens] == ["a", "", "\u00e9", ""]
    end = "<|end|>"
    assert [token.get("name") for token in tokens] == [None, "bytes:\\xc3", "bytes:\\xa9", end]
    assert [token["alternatives"][0][1] for token in tokens] == ["bytes:\\xc4", "bytes:\\xa9", "b", end]

"""LLM: outputs in the order of the prompts, the same as a client's, and what ends a call or the whole."""

import asyncio
import gc
import io
import pickle
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.pages import blocks
from tests.services.offline.conftest import interrupted
from tests.support.settings import settings_of
from tests.support.waiting import MOST, until, wait_until
from tokenbus_contracts import ContractError
from tokenbus_contracts.generated.request_pb2 import PromptScoring
from tokenbus_engines.ngram import NgramEngine, NgramOptions
from tokenbus_engines.synthetic import true_prompt_scores
from tokenbus_services.bus.memory import MemoryTransport
from tokenbus_services.client import Client, ControlError, RequestFailedError, RequestParameters, Token
from tokenbus_services.delivery.step import extras_by_token
from tokenbus_services.delivery.weight_spans import WeightSpan
from tokenbus_services.offline import LLM, Outputs
from tokenbus_services.processor import Processor
from tokenbus_services.settings import Settings
from tokenbus_services.token_table import EXTRAS, SCHEMA
from tokenbus_services.worker.run import serve_engine

PROMPTS: list[Any] = ["In the evening the old man said", [5, 6, 7], np.array([9, 8]), "At sea"]
WINDOW = 8
ENDLESS = 100_000
MODES: list[int | None] = [None, 0, 5, 20]


def settings(**overrides: object) -> Settings:
    values = {"worker.max_requests": WINDOW, "client.max_requests": WINDOW}
    addresses = {"bus.workers_address": "memory://workers", "bus.clients_address": "memory://clients"}
    return settings_of({**values, **addresses, **overrides})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine="ngram", settings=settings(), context=2 * ENDLESS) as made:
        yield made


async def by_client(asked: Sequence[tuple[Any, RequestParameters]]) -> list[list[Token]]:
    """Return the tokens of requests that a client sends, one after the other, to a worker with the same engine."""
    chosen, stop = settings(), asyncio.Event()
    transport = MemoryTransport(chosen.bus)
    async with Processor(chosen, transport=transport) as processor:
        engine = NgramEngine(NgramOptions(max_top_logprobs=20))
        working = asyncio.create_task(serve_engine(engine, chosen, stop, transport=transport))
        await until(lambda: processor.workers.by_id)
        async with Client(chosen, transport=transport) as client:
            found = [[token async for token in client.generate(prompt, **wanted)] for prompt, wanted in asked]
        stop.set()
        await asyncio.wait_for(working, MOST)
    return found


def assert_same(outputs: Outputs, place: int, tokens: Sequence[Token], k: int | None) -> None:
    output = outputs[place]
    begin, end = outputs.offsets[place : place + 2].tolist()
    assert output.token_ids.tolist() == [token.id for token in tokens] == outputs.token_ids[begin:end].tolist()
    assert output.token_ids.dtype == np.uint32
    assert output.alternative_token_ids.shape == (end - begin, k or 0)
    if k is None:
        assert [output.logprobs, output.ranks, outputs.logprobs, outputs.ranks] == [None] * 4
        return
    assert output.logprobs is not None
    assert output.ranks is not None
    assert output.logprobs.tobytes() == np.array([token.logprob for token in tokens], np.float32).tobytes()
    assert output.ranks.tolist() == [token.rank for token in tokens]
    pairs = zip(output.alternative_token_ids.tolist(), output.alternative_logprobs.tolist(), strict=True)
    lines = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    assert lines == [token.alternatives for token in tokens]


# What comes back.


@pytest.mark.parametrize("k", MODES)
async def test_outputs_are_the_tokens_that_a_client_gets(llm: LLM, k: int | None) -> None:
    wanted: RequestParameters = {"max_tokens": 12, "temperature": 0.9, "top_logprobs": k}
    outputs = llm.generate(PROMPTS, wanted, n=3, seed=7)
    asked: list[tuple[Any, RequestParameters]] = [
        (prompt, {**wanted, "seed": 7 + sample}) for prompt in PROMPTS for sample in range(3)
    ]
    tokens = await by_client(asked)
    assert len(outputs) == len(tokens) == 12
    assert outputs.token_ids.size == outputs.offsets[-1] == sum(map(len, tokens))
    for place, of_request in enumerate(tokens):
        assert (outputs[place].prompt_index, outputs[place].sample) == divmod(place, 3)
        assert_same(outputs, place, of_request, k)


def test_arrays_lie_in_one_piece(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, max_tokens=9, top_logprobs=2, seed=1)
    assert outputs.logprobs is not None
    assert outputs.logprobs.dtype == np.float32
    assert outputs.logprobs.flags.c_contiguous
    assert outputs.alternative_logprobs.shape == (outputs.token_ids.size, 2)
    views = [output.logprobs for output in outputs]
    assert all(view is not None and np.shares_memory(view, outputs.logprobs) for view in views)
    assert np.array_equal(np.concatenate(views), outputs.logprobs)  # type: ignore[arg-type]  # none is None
    assert [output.prompt_index for output in outputs[1:3]] == [1, 2]
    assert outputs[-1].prompt_index == 3
    with pytest.raises(IndexError):
        outputs[4]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    wanted: list[RequestParameters] = [{"top_logprobs": 3, "max_tokens": 2}, {}, {"top_logprobs": 1}, {"seed": 9}]
    outputs = llm.generate(PROMPTS, wanted, max_tokens=4, seed=3, ignore_end_token=True)
    assert np.diff(outputs.offsets).tolist() == [2, 4, 4, 4]
    assert outputs.top_ks.tolist() == [3, 0, 1, 0]
    assert [output.alternative_token_ids.shape for output in outputs] == [(2, 3), (4, 0), (4, 1), (4, 0)]
    assert outputs.logprobs is not None
    assert np.isnan(outputs.logprobs).tolist() == [False] * 2 + [True] * 4 + [False] * 4 + [True] * 4
    assert np.isnan(outputs.alternative_logprobs[6:10]).tolist() == [[False, True, True]] * 4
    for place, each in enumerate(wanted):
        alone: RequestParameters = {"max_tokens": 4, "seed": 3, "ignore_end_token": True, **each}
        (only,) = llm.generate([PROMPTS[place]], alone)
        assert only.token_ids.tolist() == outputs[place].token_ids.tolist()
        assert only.alternative_logprobs.tobytes() == outputs[place].alternative_logprobs.tobytes()


def test_more_prompts_than_may_be_in_flight(llm: LLM) -> None:
    prompts = [[1 + place % 50, 3] for place in range(20 * WINDOW)]
    outputs = llm.generate(prompts, max_tokens=3, temperature=0.0, ignore_end_token=True)
    assert np.diff(outputs.offsets).tolist() == [3] * len(prompts)
    for place, output in enumerate(outputs):
        assert output.token_ids.tolist() == outputs[place % 50].token_ids.tolist()


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    outputs = llm.generate([], top_logprobs=2)
    assert (len(outputs), outputs.token_ids.size, outputs.offsets.tolist()) == (0, 0, [0])
    assert outputs.to_arrow().num_rows == 0


def test_table_has_what_the_arrays_have(llm: LLM) -> None:
    wanted: list[RequestParameters] = [{"top_logprobs": 3}, {}, {"top_logprobs": 0}, {"top_logprobs": 1}]
    outputs = llm.generate(PROMPTS, wanted, n=2, max_tokens=3, seed=3, ignore_end_token=True)
    table = outputs.to_arrow()
    assert isinstance(table, pa.Table)
    rows = table.to_pylist()
    assert [(row["prompt_index"], row["sample"], row["position"]) for row in rows] == [
        (prompt, sample, position) for prompt in range(4) for sample in range(2) for position in range(3)
    ]
    for row in rows:
        output, position = outputs[2 * row["prompt_index"] + row["sample"]], row["position"]
        assert row["token_id"] == output.token_ids[position]
        assert row["alternative_token_ids"] == output.alternative_token_ids[position].tolist()
        assert row["alternative_logprobs"] == output.alternative_logprobs[position].tolist()
        if row["prompt_index"] == 1:
            assert row["logprob"] is row["rank"] is None
        elif output.logprobs is not None and output.ranks is not None:
            assert (row["logprob"], row["rank"]) == (output.logprobs[position], output.ranks[position])
    assert table.schema == llm.generate(PROMPTS, max_tokens=1).to_arrow().schema
    for name in set(table.column_names) - {"prompt_index", "sample"}:
        assert table.schema.field(name) == SCHEMA.field(name)


def test_table_has_the_extras_that_were_asked_for() -> None:
    wanted: list[RequestParameters] = [
        {"entropies": True, "other_logprobs": True, "top_logprobs": 1},
        {},
        {"logprob_token_ids": [9, 7], "mask_bound": 4, "entropies": True},
        {"top_logprobs": 0},
    ]
    with LLM(engine="synthetic") as llm:
        outputs = llm.generate([[1, 2]] * 4, wanted, n=2, max_tokens=5)
    rows = outputs.to_arrow().to_pylist()
    for output in outputs:
        mine = [row for row in rows if (row["prompt_index"], row["sample"]) == (output.prompt_index, output.sample)]
        for row, extras in zip(mine, extras_by_token(output.extras, 5), strict=True):
            given = (
                None if extras is None or not extras.given_logprobs else list(zip(*extras.given_logprobs, strict=True))
            )
            assert [row[name] for name in EXTRAS] == [
                extras and extras.other_logprob,
                extras and extras.entropy,
                given and list(given[0]),
                given and list(given[1]),
                extras and extras.mask_size,
                None if extras is None or extras.mask is None else list(extras.mask),
            ]
    assert {row["prompt_index"] for row in rows if row["entropy"] is not None} == {0, 2}
    assert {row["mask_token_ids"] is None for row in rows if row["mask_size"] is not None} == {True, False}


def test_texts_end_where_their_stops_begin(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[:1], max_tokens=12, temperature=0.0)
    stop = whole.text[8:12]
    stopped, included = llm.generate(
        PROMPTS[:1] * 2, [{}, {"include_stop_string": True}], max_tokens=12, temperature=0.0, stop=[stop, "never there"]
    )
    assert (stopped.finish_reason, stopped.text) == ("stop", whole.text.partition(stop)[0])
    assert (included.finish_reason, included.text) == ("stop", stopped.text + stop)
    (short,) = llm.generate(PROMPTS[:1], max_tokens=3, temperature=0.0, ignore_end_token=True)
    assert short.finish_reason == "length"
    assert pickle.loads(pickle.dumps(llm.generate(PROMPTS[:1], max_tokens=3, temperature=0.0)))[0].text == short.text  # noqa: S301


def test_output_names_the_stop_that_ended_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[:1], max_tokens=12, temperature=0.0)
    ids, stop = whole.token_ids.tolist(), whole.text[8:12]
    place = next(place for place, each in enumerate(ids) if place and each not in ids[:place])
    wanted: list[RequestParameters] = [
        {"stop": ["never there", stop]},
        {"stop_token_ids": [ids[place]]},
        {"stop_token_ids": [ids[place]], "include_stop_string": True},
        {"ignore_end_token": True},
        {"max_tokens": ENDLESS, "temperature": 1.0, "seed": 1},
    ]
    outputs = llm.generate(PROMPTS[:1] * len(wanted), wanted, max_tokens=12, temperature=0.0)
    assert [(output.finish_reason, output.stop_reason) for output in outputs] == [
        ("stop", stop),
        *[("stop", ids[place])] * 2,
        ("length", None),
        ("stop", None),
    ]
    before, included = outputs[1], outputs[2]
    assert before.token_ids.tolist() == included.token_ids.tolist() == ids[: place + 1]
    assert whole.text.startswith(included.text)
    assert len(before.text) < len(included.text)
    assert [each.stop_reason for each in pickle.loads(pickle.dumps(outputs))[:2]] == [stop, ids[place]]  # noqa: S301


def test_durable_log_of_the_settings_is_not_written() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = f"nats://127.0.0.1:{server.getsockname()[1]}/log"
        with LLM(engine="ngram", settings=settings(**{"durable_log.address": address})) as logged:
            assert logged.generate([[1, 2, 3]], max_tokens=4).token_ids.size
        with pytest.raises(BlockingIOError):
            server.accept()


def test_engine_without_text_has_none() -> None:
    with LLM(engine="synthetic", settings=settings(), tokens_per_step=2) as llm:
        (output,) = llm.generate([[1]], max_tokens=4)
        assert output.token_ids.size == 4
        with pytest.raises(ValueError, match="text: an engine with a tokenizer, got one whose tokens have no text"):
            _ = output.text


def test_prompts_are_scored_as_arrays() -> None:
    prompt = list(range(3, 2_000))
    with LLM(engine="synthetic", settings=settings()) as llm:
        first_id = 0
        outputs = llm.generate([prompt, [5, 6, 7]], n=2, max_tokens=0, prompt_logprobs=3)
        assert [each.token_ids.size for each in outputs] == [0] * 4
        assert {each.finish_reason for each in outputs} == {"length"}
        for each, of in zip(pickle.loads(pickle.dumps(outputs)), (prompt, prompt, [5, 6, 7], [5, 6, 7]), strict=True):  # noqa: S301
            scores = each.prompt_scores
            first_id = first_id or scores.request_key
            assert scores.token_ids.tolist() == of[1:]
            true = true_prompt_scores(scores.request_key, of, PromptScoring(top_logprobs=3))
            assert np.array_equal(scores.logprobs, true.logprobs)
            assert np.array_equal(scores.alternative_token_ids, true.alternative_token_ids)
        (plain,) = llm.generate([[1]], max_tokens=2)
        assert plain.prompt_scores is None


def test_tokens_have_what_was_asked_of_each() -> None:
    asked: dict[str, Any] = {"entropies": True, "logprob_token_ids": [4, 9], "mask_bound": 5}
    with LLM(engine="synthetic", settings=settings()) as llm:
        outputs = llm.generate([[1], [2]], max_tokens=7, **asked)
        assert llm.generate([[1]], max_tokens=2)[0].extras is None
    first, second = (each.extras for each in outputs)
    assert first is not None
    assert second is not None
    for extras in (first, second):
        assert extras.other_logprobs.size == 0
        assert extras.entropies.shape == (7,)
        assert extras.given_logprobs.shape == (7, 2)
        assert [mask is None for mask in extras.masks()] == (extras.mask_sizes > 5).tolist()
    assert not np.array_equal(first.entropies, second.entropies)


def test_weights_change_between_calls(tmp_path: Path) -> None:
    with LLM(engine="synthetic", settings=settings()) as llm:
        assert llm.generate([[1]], max_tokens=3)[0].weight_spans == ()
        with pytest.raises(ControlError, match=r"load_weights.folder: a folder with \*.safetensors"):
            llm.update_weights(tmp_path)
        assert llm.generate([[1]], max_tokens=3)[0].token_ids.size == 3
        (tmp_path / "model.safetensors").write_bytes(b"")
    with LLM(engine="synthetic", settings=settings()) as llm:
        assert (llm.update_weights(tmp_path), llm.update_weights(str(tmp_path), 9)) == (1, 9)
        assert llm.generate([[1]], max_tokens=3)[0].weight_spans == (WeightSpan(9, 0, 3),)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.update_weights(tmp_path)


def test_examples_of_the_page() -> None:
    names: dict[str, Any] = {}
    for block in blocks("python", of="docs/offline.md"):
        code = block.text.replace('"/models/qwen", max_num_seqs=128', 'engine="ngram"')
        assert "/models/qwen" not in code
        exec(code, names)  # noqa: S102 - our own page
    assert [output.prompt_index for output in names["outputs"]] == [0] * 4 + [1] * 4
    assert names["advantages"].size == names["outputs"].logprobs.size
    assert names["second"].finish_reason in {"stop", "length"}


class Terminal(io.StringIO):
    """What looks like a terminal."""

    def isatty(self) -> bool:
        return True


def test_terminal_shows_how_far_a_call_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal, progress in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(sys, "stderr", shown := Terminal() if is_terminal else io.StringIO())
        llm.generate(PROMPTS, max_tokens=2, progress=progress)
        assert ("of 4 requests, " in shown.getvalue()) == (is_terminal and progress)
        assert shown.getvalue().endswith("\r") == (is_terminal and progress)


# What is refused.


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda llm: llm.generate(5), "prompts: a sequence of prompts, got int"),
        (lambda llm: llm.generate([1, 2]), "prompts[0]: a text or a sequence of token ids, got int"),
        (lambda llm: llm.generate(["a", ""]), "prompts[1]: text, got empty text"),
        (lambda llm: llm.generate(["a", []]), "prompts[1]: at least 1 token id, got none"),
        (lambda llm: llm.generate([[1], [2, -3]]), "prompts[1][1]: at least 0, got -3"),
        (lambda llm: llm.generate([[1], [2, True]]), "prompts[1][1]: a whole number, got True"),
        (lambda llm: llm.generate([[1], [2, 70_000]]), "prompts[1][1]: below 1793, as the model has tokens, got 70000"),
        (
            lambda llm: llm.generate([[1], [2] * 2 * ENDLESS]),
            "prompts[1]: at most 199999 tokens, one less than the context, got 200000",
        ),
        (lambda llm: llm.generate(["a"], max_tokns=3), "max_tokns: a parameter of a request, as max_tokens, got 3"),
        (lambda llm: llm.generate(["a"], temperature=-1), "temperature: at least 0, got -1.0"),
        (lambda llm: llm.generate(["a"], top_logprobs=21), "top_logprobs: at most 20, got 21"),
        (lambda llm: llm.generate(["a"], request_id=3), "request_id: none in a call of generate, got 3"),
        (lambda llm: llm.generate(["a"], 3), "parameters: parameters by their names, got int"),
        (lambda llm: llm.generate(["a", "b"], [{}]), "parameters: 2, one for each prompt, got 1"),
        (lambda llm: llm.generate(["a"], [3]), "parameters[0]: parameters by their names, got int"),
        (lambda llm: llm.generate(["a", "b"], [{}, {"top_p": 2}]), "parameters[1].top_p: at most 1, got 2.0"),
        (lambda llm: llm.generate(["a"], n=0), "n: a whole number from 1 to 1024, got 0"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a"}]),
            "messages: texts or token ids for generate, as there is no chat template, got chats",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(llm: LLM, call: Callable[[LLM], object], fault: str) -> None:
    with pytest.raises(ContractError) as raised:
        call(llm)
    assert str(raised.value) == fault


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (LLM, "model: the folder of a model, for the engine vllm, got None"),
        (lambda: LLM("/nowhere"), "--model: the folder of a model, got no folder: /nowhere"),
        (lambda: LLM("/nowhere", engine="ngram"), "model: none for ngram, got /nowhere"),
        (lambda: LLM(engine="ngram", max_runing=3), "unrecognized arguments: --max-runing 3"),
        (
            lambda: LLM(engine="ngram", speculate=99, settings=settings()),
            "--speculate: 0 to 7 (limits.max_tokens_per_row is 8), got 99",
        ),
        (
            lambda: LLM(engine="ngram", settings=settings(**{"worker.max_requests": 0})),
            "worker.max_requests: at least 1 here, got 0",
        ),
    ],
)
def test_engine_that_cannot_be_made_is_said(make: Callable[[], LLM], fault: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        make()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_request_that_fails_ends_the_call(llm: LLM) -> None:
    endless: RequestParameters = {"max_tokens": ENDLESS, "ignore_end_token": True}
    with pytest.raises(RequestFailedError) as raised:
        llm.generate(["a", "b", "c"], [endless, endless, {"min_p": 0.5}], n=2)
    assert raised.value.code_name == "invalid_request"
    assert raised.value.reason == "prompts[2], sample 0: sampling.min_p: only 0 with this engine, got 0.5"
    assert len(llm.generate(PROMPTS, max_tokens=2, n=WINDOW)) == WINDOW * len(PROMPTS)


# What ends a call, and what ends all.


def endless(llm: LLM) -> Outputs:
    return llm.generate([[1, 2]] * 3 * WINDOW, max_tokens=ENDLESS, ignore_end_token=True)


def call_of(llm: LLM) -> object:
    return llm._system._call


def test_interrupted_call_ends(llm: LLM) -> None:
    with interrupted(lambda: call_of(llm)):
        endless(llm)
    assert len(llm.generate(PROMPTS, max_tokens=2, n=WINDOW)) == WINDOW * len(PROMPTS)
    assert llm._system._client.requests.open_count == 0


async def test_call_within_a_running_event_loop(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert llm.generate("At sea", max_tokens=2)[0].token_ids.size == 2


def test_calls_of_threads_take_turns(llm: LLM) -> None:
    found: dict[int, Outputs] = {}

    def call(size: int) -> None:
        found[size] = llm.generate([[1, 2]] * size, max_tokens=size, ignore_end_token=True)

    threads = [threading.Thread(target=call, args=[size]) for size in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {size: np.diff(found[size].offsets).tolist() for size in found} == {
        size: [size] * size for size in (1, 2, 3, 4)
    }


def test_closed_llm_takes_no_calls() -> None:
    llm = LLM(engine="ngram", settings=settings(), context=2 * ENDLESS)
    thread = llm._system._thread

    def close() -> None:
        wait_until(lambda: call_of(llm))
        llm.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        endless(llm)
    closing.join()
    assert not thread.is_alive()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate(PROMPTS)


def test_dropped_llm_ends() -> None:
    llm = LLM(engine="ngram", settings=settings())
    dropped, thread = weakref.ref(llm), llm._system._thread
    del llm
    gc.collect()
    assert dropped() is None
    wait_until(lambda: not thread.is_alive())


ENDS_WITH_THE_PROCESS = """
import tokenbus
llm = tokenbus.LLM(engine="ngram")
print(llm.generate("At sea", max_tokens=3, temperature=0, top_logprobs=0)[0].logprobs.size)
"""


@pytest.mark.process
def test_process_ends_without_closing_it() -> None:
    command = [sys.executable, "-c", ENDS_WITH_THE_PROCESS]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST)
    assert (run.returncode, run.stdout, run.stderr) == (0, "3\n", "")

"""The engine transformers beside transformers' own `generate`: the same logits, and what every engine is held to."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.real.runs import Answer, Case, answered, check_abort
from tests.engines.vllm.tiny_model import CONTEXT, VOCABULARY
from tests.integration.deployment import COMMAND, Deployment
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt
from tokenbus_engines.transformers import TransformersEngine, TransformersOptions
from tokenbus_gpu_ops import TokenColumns, token_logprobs
from tokenbus_services.client import Client

GREEDY = {"temperature": 0.0, "ignore_end_token": True}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 42, "ignore_end_token": True}
LONG = [5 + place * 7 % 300 for place in range(150)]
PROMPTS = ([5, 6, 7, 8], [300, 20, 4], [9, 9, 9, 9, 9], [7, 8, 9] * 8, LONG)
CLOSE = 1e-4
"""How far a logprob may be from that of a request alone: sums of other sizes are rounded otherwise."""


def started(model: Path, **options: Any) -> TransformersEngine:  # noqa: ANN401 - as the options have them
    small: dict[str, Any] = {"prefill_chunk": 56, "max_running": 8, "cache_tokens": 4096, "block_tokens": 16}
    return TransformersEngine(TransformersOptions(model=model, dtype="float32", **{**small, **options}))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[TransformersEngine]:
    made = started(model)
    yield made
    made.close()


def generated(model: Path, prompt: Sequence[int], count: int, top_k: int) -> tuple[list[int], TokenColumns]:
    import torch
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - only where it is

    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = own.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        suppress_tokens=None,
    )
    tokens = made.sequences[0, len(prompt) :].tolist()
    return tokens, token_logprobs(torch.cat(made.logits), np.array(tokens), top_k)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_same_bits_as_generate(engine: TransformersEngine, model: Path, prompt: list[int]) -> None:
    (mine,) = answered(engine, [Case(prompt, {**GREEDY, "max_tokens": 24}, 5)])
    tokens, columns = generated(model, prompt, 24, 5)
    assert (mine.status, mine.tokens) == (RowStatus.FINISHED_LENGTH, tokens)
    assert mine.logprobs == columns.logprobs.tolist()
    assert mine.ranks == columns.ranks.tolist()
    alternatives = zip(
        columns.alternative_token_ids.reshape(-1, 5).tolist(),
        columns.alternative_logprobs.reshape(-1, 5).tolist(),
        strict=True,
    )
    assert mine.alternatives == [dict(zip(ids, values, strict=True)) for ids, values in alternatives]


def close(mine: Answer, other: Answer) -> bool:
    return (mine.status, mine.tokens, len(mine.alternatives)) == (
        other.status,
        other.tokens,
        len(other.alternatives),
    ) and np.allclose(mine.logprobs, other.logprobs, rtol=0, atol=CLOSE)


def test_neighbours_change_no_answer(engine: TransformersEngine) -> None:
    cases = [
        Case(prompt, {**sampling, "max_tokens": 20}, k)
        for prompt, k in zip(PROMPTS, (None, 0, 2, 20, 5), strict=True)
        for sampling in (GREEDY, SEEDED)
    ]
    alone = [answered(engine, [case])[0] for case in cases]
    assert all(map(close, answered(engine, cases), alone))
    assert alone[0].tokens != alone[1].tokens
    assert not alone[0].logprobs


def test_preempted_requests_go_on(engine: TransformersEngine, model: Path) -> None:
    cases = [Case([place, *range(40, 70)], {**GREEDY, "max_tokens": 90}, 2) for place in range(1, 7)]
    small = started(model, cache_tokens=320, prefill_chunk=256)
    try:
        mine = answered(small, cases)
    finally:
        small.close()
    assert any(answer.was_preempted for answer in mine)
    assert all(map(close, mine, answered(engine, cases)))


def test_stops_and_ends(engine: TransformersEngine) -> None:
    (whole,) = answered(engine, [Case("the cat", {**GREEDY, "max_tokens": 12})])
    assert (whole.status, len(whole.tokens)) == (RowStatus.FINISHED_LENGTH, 12)
    place = whole.tokens.index(whole.tokens[6])
    text = engine._tokenizer.token_bytes(whole.tokens[4]).decode()
    stops: list[dict[str, Any]] = [{"stop_token_ids": [whole.tokens[6]]}, {"stop": [text]}]
    by_id, by_text = answered(engine, [Case("the cat", {**GREEDY, "max_tokens": 12, **stop}) for stop in stops])
    assert (by_id.status, by_id.tokens) == (RowStatus.FINISHED_STOP, whole.tokens[: place + 1])
    assert by_text.status is RowStatus.FINISHED_STOP
    assert text in b"".join(map(engine._tokenizer.token_bytes, by_text.tokens)).decode()


def test_requests_are_refused_and_aborted(engine: TransformersEngine) -> None:
    most = engine.max_model_tokens
    assert most == CONTEXT
    for wrong, line in (
        (Case([VOCABULARY]), rf"tokens\.token_ids\[0\]: below {VOCABULARY}, got {VOCABULARY}"),
        (Case([1] * most), rf"tokens\.token_ids: at most {most - 1} tokens, got {most}"),
        (Case([1], top_logprobs=21), "top_logprobs: at most 20, got 21"),
        (Case([1], {"min_p": 0.5}), r"sampling\.min_p: only 0 with this engine, got 0\.5"),
    ):
        with pytest.raises(ValueError, match=line):
            engine.admit(wrong.generate(1))
    with pytest.raises(ValueError, match="state: none for the engine transformers, got one"):
        engine.admit(Case([1]).generate(1), b"state")
    assert not engine.has_work

    endless = Case([300, 20], {**GREEDY, "max_tokens": 200})
    check_abort(engine, endless)
    assert not engine.has_work
    text = Generate(request_key=1, text=TextPrompt(text="the cat"), sampling=SamplingParameters(max_tokens=1))
    assert engine.admit(text) == len(engine._tokenizer.encode("the cat"))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"context": 300}, f"--context: 0 to {CONTEXT}, got 300"),
        ({"max_running": 0}, "--max-running: 1 to 1024, got 0"),
        ({"cache_tokens": 16}, "--cache-tokens: 32 to "),
    ],
)
def test_options_are_checked(model: Path, options: dict[str, int], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        started(model, **options)


async def test_worker_serves_the_model(model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        deployment = Deployment(Path(folder))
        try:
            deployment.start_processor()
            command = [COMMAND, "worker", "--engine", "transformers", "--model", str(model), "--dtype", "float32"]
            worker = deployment.start("worker", command)
            worker.wait_for('"connected"')
            async with Client(deployment.settings()) as client:
                asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "top_logprobs": 2, "model": model.name}
                tokens = [token async for token in client.generate("the cat", **asked)]
            assert [token.rank for token in tokens] == [1] * 8
            assert all(len(token.alternatives) == 2 for token in tokens)
        finally:
            deployment.close()

"""The engine beside vLLM's own `LLM.generate`, bit by bit; and what it refuses, ends and survives."""

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.real.runs import (
    SHARED,
    Answer,
    Case,
    answered,
    answers_apart,
    arguments,
    check,
    reference,
)
from tests.engines.vllm.tiny_model import CONTEXT, VOCABULARY, make_adapter
from tokenbus.engines.vllm import VllmEngine, compatibility
from tokenbus.engines.vllm import engine as engine_module
from tokenbus.settings import Settings
from tokenbus.worker import StepAssembler
from tokenbus_contracts import Limits, RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, SamplingParameters, TextPrompt

GREEDY = {"temperature": 0.0, "ignore_end_token": True}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 42, "ignore_end_token": True}
LONG = [5 + place * 7 % 300 for place in range(150)]
SHORT: list[str | list[int]] = [[5, 6, 7, 8], [300, 20, 4], "the cat sat", [9, 9, 9, 9, 9]]
_SAME: dict[str, Any] = {
    "min_p": 0.2,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "min_tokens": 4,
    "bad_words": ["the", "cat"],
    "allowed_token_ids": list(range(300, 340)),
}
_SCHEMA = '{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}'
FURTHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: value}, {name: value}) for name, value in _SAME.items()),
    ({"logit_bias": [{"token_id": 269, "bias": 5}, {"token_id": 7, "bias": -9}]}, {"logit_bias": {269: 5, 7: -9}}),
    (
        {"structured_output": {"choice": {"texts": ["round", "mat"]}}},
        {"structured_outputs": {"choice": ["round", "mat"]}},
    ),
    ({"structured_output": {"regex": {"pattern": "[a-c]{3}"}}}, {"structured_outputs": {"regex": "[a-c]{3}"}}),
    ({"structured_output": {"json_schema": {"schema": _SCHEMA}}}, {"structured_outputs": {"json": _SCHEMA}}),
    (
        {"structured_output": {"grammar": {"text": 'root ::= "on" | "off"'}}},
        {"structured_outputs": {"grammar": 'root ::= "on" | "off"'}},
    ),
    ({"cache_salt": "s"}, {}),
]
"""Further parameters: by our names, and as vLLM has them."""
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(autouse=True, scope="module")
def in_this_process() -> Iterator[None]:
    """Let vLLM run the model on the thread that steps it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


def started(model: Path, options: Mapping[str, Any]) -> VllmEngine:
    gc.collect()
    return VllmEngine(model, arguments(options))


def compare(mine: list[Answer], theirs: list[Answer], cases: list[Case]) -> None:
    """Hold all answers to vLLM's own."""
    for case, ours, others in zip(cases, mine, theirs, strict=True):
        check(case, ours, others)


def test_same_answers(model: Path) -> None:
    plain = [
        Case(prompt, {**sampling, "max_tokens": 12}, k)
        for prompt, k in zip(SHORT, (None, 0, 5, 20), strict=True)
        for sampling in (GREEDY, SEEDED)
    ]
    chunked = [
        Case(LONG, {**GREEDY, "max_tokens": 8}, 5),
        Case([*LONG[:100], 3, 1], {**GREEDY, "max_tokens": 8}, None),
        Case([*LONG[:100], 4], {**GREEDY, "max_tokens": 3}, 20),
    ]
    further = [
        Case("the cat sat", {**sampling, "max_tokens": 12}, 2, ours, theirs)
        for sampling in (GREEDY, SEEDED)
        for ours, theirs in FURTHER
    ]
    ends = [Case(SHORT[1], {"temperature": 1.0, "seed": seed, "max_tokens": 64}, 0) for seed in range(4)]
    found = reference(model, SHARED, plain, chunked, chunked, further, ends, stops_of=0)
    engine = started(model, SHARED)
    try:
        for cases, theirs in found:
            compare(answered(engine, cases), theirs, cases)
        assert all(answer.status is RowStatus.FINISHED_STOP for answer in found[-1][1])
        survives(engine)
    finally:
        engine.close()


def survives(engine: VllmEngine) -> None:
    """Refuse, abort and fail requests of an engine, and get the right answers from it afterwards."""
    case = Case(SHORT[0], {**GREEDY, "max_tokens": 5}, 2)
    (before,) = answered(engine, [case])
    for wrong, line in (
        (Case([VOCABULARY]), rf"tokens\.token_ids\[0\]: below {VOCABULARY}, got {VOCABULARY}"),
        (Case([1] * CONTEXT), rf"tokens\.token_ids: at most {CONTEXT - 1} tokens, got {CONTEXT}"),
        (Case("cat " * CONTEXT), rf"text\.text: at most {CONTEXT - 1} tokens, got \d+"),
        (Case("cat " * 100_000), rf"text\.text: at most {16 * (CONTEXT - 1)} bytes, got 400000"),
        (Case([1], top_logprobs=21), "top_logprobs: at most 20, got 21"),
        (Case([1], {"temperature": 2.5}), r"^sampling\.temperature: temperature must be in \[0, 2\], got 2\.5\.$"),
        (Case([1], {"max_tokens": 0}), "^sampling.max_tokens: max_tokens must be at least 1"),
        (Case([1], adapter=Path("x")), "sampling.lora_adapter: none, since none is loaded, got 'x'"),
        (Case([1], {"structured_output": {"json_schema": {"schema": "{"}}}), "JSON|json"),
        (Case([1], {"stop_token_ids": [VOCABULARY]}), rf"sampling\.stop_token_ids\[0\]: below {VOCABULARY}"),
    ):
        with pytest.raises(ValueError, match=line) as raised:
            engine.admit(wrong.generate(1))
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="state: none for the engine vllm, got one"):
        engine.admit(case.generate(1), b"state")
    assert not engine.has_work

    endless = Case(SHORT[1], {**GREEDY, "max_tokens": 200})
    engine.admit(endless.generate(1))
    with pytest.raises(ValueError, match="request_key: one that is not in use, got 1"):
        engine.admit(endless.generate(1))
    engine.step()
    engine.abort(1)
    engine.abort(2)
    (made,) = engine.step()
    (row,) = StepAssembler(Limits.default()).assemble(made)[0].rows()
    assert (row.status, row.token_ids.size, row.position) == (RowStatus.ABORTED, 0, 1)

    executor = engine._core.model_executor
    engine.admit(endless.generate(1))
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "execute_model", raises)
        with pytest.raises(OSError, match="out of everything"):
            engine.step()
    engine.abort(1)
    while engine.has_work:
        engine.step()
    check(case, answered(engine, [case])[0], before)

    text = Generate(request_key=1, text=TextPrompt(text="the cat"), sampling=SamplingParameters(max_tokens=1))
    assert engine.admit(text) == len(engine._inputs.tokenizer.encode("the cat"))
    while engine.has_work:
        engine.step()


def raises(*_: object, **__: object) -> None:
    raise OSError("out of everything")


def test_same_answers_after_preemption(model: Path) -> None:
    options = {**SHARED, "num_gpu_blocks_override": 10}
    cases = [Case([place, *range(40, 70)], {**GREEDY, "max_tokens": 90}, 2) for place in range(4)]
    ((_, theirs),) = reference(model, options, cases)
    engine = started(model, options)
    try:
        mine = answered(engine, cases)
    finally:
        engine.close()
    compare(mine, theirs, cases)
    assert any(answer.was_preempted for answer in mine)


def test_same_answers_with_adapters(model: Path, tmp_path: Path) -> None:
    ada, bob = (make_adapter(tmp_path / name, seed) for seed, name in enumerate(("ada", "bob")))
    # vLLM on a CPU adds the last place's adapter to requests without one: of three places one stays empty.
    options = {**SHARED, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    cases = [
        Case(prompt, {**GREEDY, "max_tokens": 12}, k, adapter=adapter)
        for prompt, k in zip(SHORT[:2], (None, 5), strict=True)
        for adapter in (None, ada, bob)
    ]
    ((_, theirs),) = reference(model, options, cases)
    assert len({tuple(answer.tokens) for answer in theirs}) == len(cases)
    wide = make_adapter(tmp_path / "wide", 1)
    config = wide / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 64'))
    with pytest.raises(ValueError, match=r"--lora-modules: wide: .*64 is greater than max_lora_rank 8"):
        VllmEngine(model, [*arguments(options), "--lora-modules", f"wide={wide}"])
    with pytest.raises(ValueError, match="--lora-modules: only with --enable-lora, got 1 without"):
        VllmEngine(model, [*arguments(SHARED), "--lora-modules", f"ada={ada}"])
    modules = ["--lora-modules", f"ada={ada}", f'{{"name": "bob", "path": "{bob}"}}']
    engine = VllmEngine(model, [*arguments(options), *modules])
    try:
        assert list(engine.lora_adapters) == ["ada", "bob"]
        compare(answered(engine, cases), theirs, cases)
        with pytest.raises(ValueError, match=r"sampling\.lora_adapter: one of ada, bob, got 'eve'"):
            engine.admit(Case([1], adapter=Path("eve")).generate(1))
    finally:
        engine.close()


def test_same_answers_with_speculation(model: Path) -> None:
    options = {**SHARED, "speculative_config": SPECULATION}
    cases = [Case([7, 8, 9] * 8, {**GREEDY, "max_tokens": 60}, k) for k in (None, 0, 5)]
    cases.append(Case(SHORT[2], {**GREEDY, "max_tokens": 60}, 20))
    found = reference(model, options, cases, stops_of=0)
    mine = answers_apart(model, options, [asked for asked, _theirs in found])
    for (asked, theirs), ours in zip(found, mine, strict=True):
        compare(ours, theirs, asked)
    assert all(answer.drafts > 0 and answer.steps < len(answer.tokens) for answer in mine[0])


@pytest.mark.parametrize(
    ("arguments", "overrides", "line"),
    [
        (["--no-such-option"], {}, "vLLM's options: unrecognized arguments: --no-such-option"),
        (["--max-num-seqs", "many"], {}, "vLLM's options: argument --max-num-seqs: "),
        (["--max-num-seqs", "600"], {}, r"--max-num-seqs: at most 512 \(limits.max_rows is 512, "),
        (["--max-num-seqs", "9"], {"worker.max_requests": 8}, r"--max-num-seqs: at most 8 \(limits.max_rows is "),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 2}'],
            {},
            "--speculative-config: num_speculative_tokens: at most 7 .*, got 8",
        ),
        (["--max-logprobs", "5"], {}, "limits.max_top_k: at most 5, as --max-logprobs, got 20"),
        (["--dtype", "float17"], {}, "dtype|invalid choice"),
        (["--lora-modules", "ada"], {}, "--lora-modules: name=path, or an object in JSON, got 'ada'"),
    ],
)
def test_limits_and_options_are_compared_first(
    model: Path, arguments: list[str], overrides: dict[str, object], line: str
) -> None:
    settings = Settings.load(environment={}, overrides=overrides)
    with pytest.raises(ValueError, match=line) as raised:
        VllmEngine(model, arguments, settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("lacking", ["InputProcessor.tokenizer", "CachedTokenizer.max_chars_per_token"])
def test_what_vllm_lacks_is_found_at_the_start_and_leaves_nothing(
    model: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore

    used, shut = compatibility.check_members, []
    core_shutdown = EngineCore.shutdown

    def shut_down(core: Any) -> None:  # noqa: ANN401 - vLLM's
        shut.append(core)
        core_shutdown(core)

    def checked(owner: object, names: tuple[str, ...]) -> None:
        """Check as it is done, with one member missing."""
        for name in names:
            if lacking.endswith(f".{name}") and not hasattr(owner, "step_fn"):
                raise compatibility.VersionError(f"vLLM: {lacking} is not there")
        used(owner, names)

    monkeypatch.setattr(engine_module, "check_members", checked)
    monkeypatch.setattr("vllm.v1.engine.core.EngineCore.shutdown", shut_down)
    with pytest.raises(ValueError, match=f"vLLM: {lacking} is not there"):
        VllmEngine(model, arguments(SHARED))
    assert len(shut) == 1

"""The engine beside vLLM's own `LLM.generate`, bit by bit; and what it refuses, ends and survives."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.engines.vllm.real.hosts import EngineHost, Host
from tests.engines.vllm.real.runs import LORA, SHARED, Answer, Case, answered, arguments, check, reference
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
FEW_BLOCKS = {**SHARED, "num_gpu_blocks_override": 16}
"""So few that long requests are preempted."""
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def compare(mine: list[Answer], theirs: list[Answer], cases: list[Case]) -> None:
    for case, ours, others in zip(cases, mine, theirs, strict=True):
        check(case, ours, others)


def answers_of(engine: VllmEngine, groups: Sequence[Sequence[Case]]) -> list[list[Answer]]:
    engine._core.reset_prefix_cache()
    return [answered(engine, cases) for cases in groups]


def test_same_answers(model: Path, engine_of: Callable[..., EngineHost]) -> None:
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
    likely = {"logit_bias": [{"token_id": 0, "bias": 15}]}, {"logit_bias": {0: 15}}
    ends = [Case(SHORT[1], {"temperature": 1.0, "seed": seed, "max_tokens": 64}, 0, *likely) for seed in range(4)]
    preempted = [Case([place, *range(40, 70)], {**GREEDY, "max_tokens": 90}, 2) for place in range(4)]
    found = reference(model, FEW_BLOCKS, plain, chunked, chunked, further, ends, preempted, stops_of=0)
    mine = engine_of(*arguments(FEW_BLOCKS))(answers_of, [cases for cases, _ in found])
    for (cases, theirs), answers in zip(found, mine, strict=True):
        compare(answers, theirs, cases)
    *_, at_their_end, preempted_ones, stopped = mine
    assert all(answer.status is RowStatus.FINISHED_STOP for answer in (*at_their_end, *stopped))
    assert any(answer.was_preempted for answer in preempted_ones)


def test_next_turn_goes_on_with_the_same_tokens(engine_of: Callable[..., EngineHost]) -> None:
    engine_of(*arguments(FEW_BLOCKS))(turns_go_on)


def turns_go_on(engine: VllmEngine) -> None:
    """Continue greedy requests at each place, also where a stop string has begun, and refuse what cannot go on."""
    case = Case(SHORT[0], {**GREEDY, "max_tokens": 12, "min_tokens": 3}, 2)
    (whole,) = answered(engine, [case])
    for cut in range(1, 12):
        (answer,) = answered(engine, [case], accepted=whole.tokens[:cut])
        assert (answer.tokens, answer.status) == (whole.tokens, whole.status)
        assert len(answer.logprobs) == 12 - cut
    text, ended = engine._inputs.tokenizer.decode, 0
    for cut in range(4, 11):
        begun = text(whole.tokens[:cut])
        stop = begun[-1:] + text(whole.tokens)[len(begun) :][:1]
        stopping = replace(case, sampling={**case.sampling, "stop": [stop]})
        (first,) = answered(engine, [stopping])
        if len(first.tokens) > cut:
            (answer,) = answered(engine, [stopping], accepted=whole.tokens[:cut])
            assert (answer.tokens, answer.status, answer.stop) == (first.tokens, first.status, stop)
            ended += 1
        else:
            with pytest.raises(ValueError, match="no token that ends the request, got a stop string"):
                answered(engine, [stopping], accepted=whole.tokens[:cut])
    assert ended
    for name, value in (("presence_penalty", 1.0), ("frequency_penalty", 1.0), ("bad_words", ["cat"])):
        with pytest.raises(ValueError, match=f"continuation: none with {name}"):
            answered(engine, [replace(case, sampling={**case.sampling, name: value})], accepted=whole.tokens[:2])
    with pytest.raises(ValueError, match=r"continuation.token_ids: fewer than the 12 of max_tokens, got 12"):
        answered(engine, [case], accepted=whole.tokens)
    assert not engine.has_work


def test_engine_survives(engine_of: Callable[..., EngineHost]) -> None:
    engine_of(*arguments(FEW_BLOCKS))(survives)


def survives(engine: VllmEngine) -> None:
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
    assert not engine.token_scores
    given = Case([1], {"max_tokens": 1}).generate(1)
    given.prompt_scoring.token_ids.append(1)
    with pytest.raises(ValueError, match=r"^prompt_scoring\.token_ids: none without --token-scores, got 1$"):
        engine.admit(given)
    assert not engine.has_work

    endless = Case(SHORT[1], {**GREEDY, "max_tokens": 200})
    engine.admit(endless.generate(1))
    with pytest.raises(ValueError, match="request_id: 1 is in use already"):
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

    text = Generate(request_id=1, text=TextPrompt(text="the cat"), sampling=SamplingParameters(max_tokens=1))
    assert engine.admit(text) == len(engine._inputs.tokenizer.encode("the cat"))
    while engine.has_work:
        engine.step()


def refused(engine: VllmEngine, case: Case) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - as above
        engine.admit(case.generate(1))
    return str(raised.value)


def raises(*_: object, **__: object) -> None:
    raise OSError("out of everything")


def test_same_answers_with_adapters(
    model: Path, adapters: Sequence[Path], host: Host, engine_with_adapters: EngineHost, tmp_path: Path
) -> None:
    ada, bob = adapters
    cases = [
        Case(prompt, {**GREEDY, "max_tokens": 12}, k, adapter=adapter)
        for prompt, k in zip(SHORT[:2], (None, 5), strict=True)
        for adapter in (None, ada, bob)
    ]
    ((_, theirs),) = reference(model, LORA, cases)
    assert len({tuple(answer.tokens) for answer in theirs}) == len(cases)
    ((mine),) = engine_with_adapters(answers_of, [cases])
    compare(mine, theirs, cases)
    unknown = Case([1], adapter=Path("eve"))
    assert engine_with_adapters(refused, unknown) == "sampling.lora_adapter: one of ada, bob, got 'eve'"
    wide = host(make_adapter, tmp_path / "wide", 1)
    config = wide / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 64'))
    modules = ["--lora-modules", f"wide={wide}"]
    line = host(refused_at_start, model, [*arguments(LORA), *modules])
    assert re.match("--lora-modules: wide: .*64 is greater than max_lora_rank 8", line)
    assert host(refused_at_start, model, modules) == "--lora-modules: only with --enable-lora, got 1 without"


def test_same_answers_with_speculation(model: Path, engine_of: Callable[..., EngineHost]) -> None:
    options = {**SHARED, "speculative_config": SPECULATION}
    cases = [Case([7, 8, 9] * 8, {**GREEDY, "max_tokens": 60}, k) for k in (None, 0, 5)]
    cases.append(Case(SHORT[2], {**GREEDY, "max_tokens": 60}, 20))
    found = reference(model, options, cases, stops_of=0)
    mine = engine_of(*arguments(options))(answers_of, [asked for asked, _ in found])
    for (asked, theirs), ours in zip(found, mine, strict=True):
        compare(ours, theirs, asked)
    assert all(answer.drafts > 0 and answer.steps < len(answer.tokens) for answer in mine[0])


def refused_at_start(model: Path, arguments: Sequence[str], overrides: Mapping[str, object] | None = None) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller compares it
        VllmEngine(model, arguments, Settings.load(environment={}, overrides=overrides or {}))
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "overrides", "line"),
    [
        (["--no-such-option"], {}, "vLLM's options: unrecognized arguments: --no-such-option"),
        (["--max-num-seqs", "600"], {}, r"--max-num-seqs: at most 512 \(limits.max_rows is 512, "),
        (["--max-num-seqs", "9"], {"worker.max_requests": 8}, r"--max-num-seqs: at most 8 \(limits.max_rows is "),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 2}'],
            {},
            "--speculative-config: num_speculative_tokens: at most 7 .*, got 8",
        ),
        (["--max-logprobs", "5"], {}, "limits.max_top_k: at most 5, as --max-logprobs, got 20"),
        (["--dtype", "float17"], {}, "dtype|invalid choice"),
    ],
)
def test_limits_and_options_are_compared_first(
    model: Path, host: Host, arguments: list[str], overrides: dict[str, object], line: str
) -> None:
    refusal = host(refused_at_start, model, arguments, overrides)
    assert re.search(line, refusal)
    assert "\n" not in refusal


@pytest.mark.parametrize("lacking", ["InputProcessor.tokenizer", "CachedTokenizer.max_chars_per_token"])
def test_what_vllm_lacks_is_found_at_the_start_and_leaves_nothing(model: Path, host: Host, lacking: str) -> None:
    refusal, shutdowns = host(refused_for_a_lack, model, lacking)
    assert f"vLLM: {lacking} is missing" in refusal
    assert shutdowns == 1


def refused_for_a_lack(model: Path, lacking: str) -> tuple[str, int]:
    """Return the line by which an engine is refused, and how often vLLM's core was shut down."""
    used, core = compatibility.check_members, import_module("vllm.v1.engine.core").EngineCore

    def checked(owner: object, names: tuple[str, ...]) -> None:
        for name in names:
            if lacking.endswith(f".{name}") and not hasattr(owner, "step_fn"):
                raise compatibility.VersionError(f"vLLM: {lacking} is missing")
        used(owner, names)

    with (
        mock.patch.object(engine_module, "check_members", checked),
        mock.patch.object(core, "shutdown", autospec=True, side_effect=core.shutdown) as shutdown,
    ):
        return refused_at_start(model, arguments(SHARED)), shutdown.call_count

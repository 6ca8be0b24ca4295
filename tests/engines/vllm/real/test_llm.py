"""`tokenbus.LLM` beside `vllm.LLM`, bit by bit: tokens, logprobs, ranks, alternatives and texts."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tokenbus
from tests.engines.vllm.real.runs import WHOLE, Answer, Case, check, reference
from tests.engines.vllm.real.test_engine import GREEDY, LONG, SEEDED, SHORT
from tests.support.model_folder import TEMPLATE
from tests.support.waiting import wait_until

MODES = (None, 0, 5, 20)


@pytest.fixture(scope="module")
def chatting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model with a chat template."""
    folder = tmp_path_factory.mktemp("chatting") / "tiny"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(chatting: Path) -> Iterator[tokenbus.LLM]:
    """Return an LLM as a user starts it: vLLM runs the model in a process of its own."""
    with tokenbus.LLM(chatting, settings=tokenbus.Settings(), **WHOLE) as made:
        yield made
    assert not multiprocessing.active_children()


def parameters(case: Case) -> tokenbus.RequestParameters:
    """Return a case's parameters."""
    return {**case.sampling, "top_logprobs": case.top_logprobs}  # type: ignore[typeddict-item]  # of the right types


def answer(output: tokenbus.Output) -> Answer:
    """Return an output as the other tests have answers."""
    pairs = zip(output.alternative_token_ids.tolist(), output.alternative_logprobs.tolist(), strict=True)
    is_scored = output.logprobs is not None and output.ranks is not None
    return Answer(
        {"stop": tokenbus.RowStatus.FINISHED_STOP, "length": tokenbus.RowStatus.FINISHED_LENGTH}[output.finish_reason],
        output.token_ids.tolist(),
        output.logprobs.tolist() if output.logprobs is not None else [],
        output.ranks.tolist() if output.ranks is not None else [],
        [dict(zip(ids, values, strict=True)) for ids, values in pairs] if is_scored else [],
        text=output.text,
    )


def compare(llm: tokenbus.LLM, cases: Sequence[Case], theirs: Sequence[Answer]) -> None:
    """Hold outputs to vLLM's own."""
    outputs = llm.generate([case.prompt for case in cases], [parameters(case) for case in cases])
    for case, output, others in zip(cases, outputs, theirs, strict=True):
        mine = answer(output)
        check(case, mine, replace(others, stop=None))  # an output does not say which
        if case.prompt != LONG:  # it ends within a character, and vLLM shows it again before its own text
            assert mine.text == others.text, case


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[list[Case], list[Answer]]]:
    """Return groups of cases, one for each mode and one with stops, with vLLM's own answers."""
    groups = [
        [
            *(Case(prompt, {**sampling, "max_tokens": 12}, k) for prompt in SHORT for sampling in (GREEDY, SEEDED)),
            Case(LONG, {**GREEDY, "max_tokens": 8}, k),
            Case(SHORT[0], {**SEEDED, "seed": 43, "max_tokens": 12}, k),
        ]
        for k in MODES
    ]
    return reference(model, WHOLE, *groups, stops_of=2)


@pytest.mark.parametrize("group", range(len(MODES) + 1))
def test_outputs_are_those_of_vllm(
    llm: tokenbus.LLM, expected: list[tuple[list[Case], list[Answer]]], group: int
) -> None:
    compare(llm, *expected[group])


def test_samples_have_seeds_of_their_own(llm: tokenbus.LLM, expected: list[tuple[list[Case], list[Answer]]]) -> None:
    cases, theirs = expected[1]
    first, second = llm.generate([cases[1].prompt], parameters(cases[1]), n=2)
    check(cases[1], answer(first), theirs[1])
    check(cases[-1], answer(second), theirs[-1])


def test_chat_is_what_the_template_writes(llm: tokenbus.LLM) -> None:
    chat = [{"role": "user", "content": "the cat"}]
    (only,) = llm.chat(chat, GREEDY, max_tokens=6)  # type: ignore[arg-type]  # as `parameters`
    (written,) = llm.generate(["<user>the cat<end><assistant>"], GREEDY, max_tokens=6)  # type: ignore[arg-type]
    assert only.token_ids.tolist() == written.token_ids.tolist()
    assert [each.token_ids.size for each in llm.chat([chat, chat], GREEDY, max_tokens=2)] == [2, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "wanted", "fault"),
    [
        ([512], {}, "prompts[1][0]: below 512, as the model has tokens, got 512"),
        ([1] * 256, {}, "prompts[1]: at most 255 tokens, one less than the context, got 256"),
    ],
)
def test_what_the_model_cannot_have_is_said_first(
    llm: tokenbus.LLM, prompt: list[int], wanted: tokenbus.RequestParameters, fault: str
) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]") as raised:
        llm.generate([[1], prompt], wanted)
    assert str(raised.value) == fault


LEFT_OPEN = """
import multiprocessing, sys
import tokenbus
if __name__ == "__main__":
    llm = tokenbus.LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4)
    (output,) = llm.generate([[5, 6]], max_tokens=3, ignore_end_token=True, temperature=0.0)
    print(output.token_ids.size, *(child.pid for child in multiprocessing.active_children()))
"""


def test_process_ends_without_closing_it(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "left_open.py"
    script.write_text(LEFT_OPEN)
    environment = {name: value for name, value in os.environ.items() if name != "TOKENBUS_NEEDS_VLLM"}
    command = [sys.executable, str(script), str(model)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    size, *children = map(int, run.stdout.splitlines()[-1].split())
    assert size == 3
    assert children
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))

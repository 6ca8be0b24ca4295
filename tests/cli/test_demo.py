"""tokenbus demo: what it shows is what happened, and what is wrong is never called right."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.local import Command, environment
from tokenbus.cli.demo import Answer, compared, expected_answers, requests, summary_lines
from tokenbus_contracts import Limits


@pytest.fixture(scope="module")
def truth() -> list[Answer]:
    return expected_answers(requests(6, 24), Limits.default())


@pytest.fixture
def answers(truth: list[Answer]) -> list[Answer]:
    return [replace(answer, tokens=list(answer.tokens)) for answer in truth]


def said(answers: list[Answer], truth: list[Answer]) -> str:
    return "\n".join(summary_lines(compared(answers, truth)))


def test_whole_demo(folder: Path) -> None:
    """A system whose worker and processor are killed gives every token: the lines say so, without colours in a pipe."""
    with Command(["demo"], environment(folder)) as command:
        status, output, complaints = command.end()
    assert (status, complaints) == (0, "")
    assert "\x1b" not in output
    for service in ("mixed-0", "processor"):
        assert re.search(rf"{service} is killed \(kill -9\) with [1-9]\d* requests open, and started again", output)
    assert re.search(r"[1-9]\d* of these went on at another worker", output)
    assert "of 200 of 200 requests" in output
    assert "no token lost, none repeated, all in order" in output
    assert "200 of 200 answers: ids, logprobs, ranks and alternatives are, bit by bit," in output
    assert "every token was right" in output
    assert list(folder.iterdir()) == []


def test_right_answers_are_called_right(answers: list[Answer], truth: list[Answer]) -> None:
    tokens = sum(len(answer.tokens) for answer in answers)
    wrong = {"disordered_requests": 0, "differing_requests": 0, "errors": []}
    assert compared(answers, truth) == {"ok": True, "requests": 6, "tokens": tokens, "continued": 0, **wrong}


@pytest.mark.parametrize(
    "changed",
    [{"id": 1}, {"logprob": -0.123}, {"rank": 77}, {"alternatives": ((1, -0.5),)}],
    ids=lambda changed: next(iter(changed)),
)
def test_one_value_that_differs_is_found(changed: dict[str, Any], answers: list[Answer], truth: list[Answer]) -> None:
    """One value of one answer that is not the true one is reported, whichever it is (case 28)."""
    answers[2].tokens[3] = answers[2].tokens[3]._replace(**changed)
    assert compared(answers, truth)["ok"] is False
    assert "1 of 6 answers DIFFER" in said(answers, truth)


def test_lost_and_repeated_tokens_are_told(answers: list[Answer], truth: list[Answer]) -> None:
    tokens = answers[0].tokens
    for wrong in ([*tokens[:3], *tokens[4:]], [tokens[0], *tokens]):
        answers[0].tokens = wrong
        values = compared(answers, truth)
        assert (values["ok"], values["disordered_requests"], values["differing_requests"]) == (False, 1, 1)
        assert "1 requests with tokens LOST or REPEATED, 0 requests FAILED" in said(answers, truth)


def test_failed_and_cut_off_requests_are_told(answers: list[Answer], truth: list[Answer]) -> None:
    answers[3].error = "worker_lost: gone"
    assert compared(answers, truth)["ok"] is False
    assert "1 requests FAILED" in said(answers, truth)
    answers[3].error = ""
    answers[3].tokens.pop()
    assert compared(answers, truth)["differing_requests"] == 1

"""tokenbus demo: what it shows is what happened, and what is wrong is never called right."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.local import Command, environment
from tokenbus.cli.demo import Answer, ExpectedRows, compared, expected_rows, requests, summary_lines
from tokenbus_contracts import Limits, Row


@pytest.fixture(scope="module")
def truth() -> ExpectedRows:
    return expected_rows(requests(6, 24), Limits.default())


@pytest.fixture
def answers(truth: ExpectedRows) -> list[Answer]:
    return [answered(generate.request_id, truth[generate.request_id]) for generate in requests(6, 24)]


def answered(key: int, rows: list[Row]) -> Answer:
    answer = Answer(next(generate for generate in requests(6, 24) if generate.request_id == key))
    for row in rows:
        answer.add(row)
    return answer


def said(answers: list[Answer], truth: ExpectedRows) -> str:
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


def test_right_answers_are_called_right(answers: list[Answer], truth: ExpectedRows) -> None:
    tokens = sum(answer.position for answer in answers)
    wrong = {"lost": 0, "repeated": 0, "differing_requests": 0, "errors": []}
    assert compared(answers, truth) == {"ok": True, "requests": 6, "tokens": tokens, "continued": 0, **wrong}


@pytest.mark.parametrize("column", ["token_ids", "logprobs", "ranks", "alternative_token_ids", "alternative_logprobs"])
def test_one_value_that_differs_is_found(column: str, answers: list[Answer], truth: ExpectedRows) -> None:
    """One number of one answer that is not the true one is reported, whichever column it is in (case 28)."""
    rows = answers[2].rows
    changed: Any = np.array(getattr(rows[1], column))
    changed.flat[-1] += 1
    rows[1] = rows[1]._replace(**{column: changed})
    assert compared(answers, truth)["ok"] is False
    assert "1 of 6 answers DIFFER" in said(answers, truth)


def test_lost_and_repeated_tokens_are_counted(answers: list[Answer], truth: ExpectedRows) -> None:
    """A row that did not come, and one that came twice, are reported with how many tokens that is."""
    key, rows = answers[0].generate.request_id, truth[answers[0].generate.request_id]
    without = answered(key, [rows[0], *rows[2:]])
    twice = answered(key, [rows[0], rows[0], *rows[1:]])
    assert (without.lost, without.repeated) == (rows[1].token_ids.size, 0)
    assert twice.repeated >= rows[0].token_ids.size
    for wrong in (without, twice):
        values = compared([wrong, *answers[1:]], truth)
        assert (values["ok"], values["differing_requests"]) == (False, 1)
        assert re.search(r"\d+ LOST, \d+ REPEATED, 0 requests FAILED", said([wrong, *answers[1:]], truth))


def test_failed_and_cut_off_requests_are_told(answers: list[Answer], truth: ExpectedRows) -> None:
    answers[3].error = "worker_lost: gone"
    assert compared(answers, truth)["ok"] is False
    assert "1 requests FAILED" in said(answers, truth)
    key = answers[3].generate.request_id
    answers[3] = answered(key, truth[key][:-1])
    assert compared(answers, truth)["differing_requests"] == 1

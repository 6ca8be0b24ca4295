"""tokenbus ask: one request, its tokens as they come, and how it ended."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tokenbus
from tokenbus import testing
from tokenbus.cli import main
from tokenbus.cli.ask import _print_text, show_answer
from tokenbus.engines.synthetic import true_tokens


async def test_each_token_is_shown_then_the_end() -> None:
    shown: list[dict[str, Any]] = []
    async with testing.bus() as bus, tokenbus.connect(bus.address) as client:
        generation = client.generate([1, 2], max_tokens=5, top_logprobs=2)
        await show_answer(generation, None, shown.append)
    *tokens, end = json.loads(json.dumps(shown, allow_nan=False))
    true = true_tokens(generation.request_id, 0, 5)
    assert [each["token_id"] for each in tokens] == true.ids.tolist()
    assert [each["text"] for each in tokens] == [str(each) for each in true.ids]
    assert [each["logprob"] for each in tokens] == true.logprobs.tolist()
    assert [len(each["alternatives"]) for each in tokens] == [2] * 5
    assert (end["status"], end["tokens"], end["request_id"]) == (
        *("FINISHED_LENGTH", 5),
        f"{generation.request_id:016x}",
    )
    assert end["mean_logprob"] == pytest.approx(true.logprobs.mean())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--temperature", "-1"], "temperature: at least 0, got -1.0"),
        (
            ["--tokenizer", "qwen"],
            "tokenizer: one of bytes, ngram, or the path of a model's folder, with a slash (./qwen), got 'qwen'",
        ),
        (["--max-tokens", "0"], "argument --max-tokens: a whole number of at least 1, got '0'"),
        (["--alternatives", "200"], "top_logprobs: at most 127, got 200"),
    ],
)
def test_wrong_use_is_one_line(
    options: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_BUS_CLIENTS_ADDRESS", f"ipc://{tmp_path}/c")
    assert main(["ask", "Once", *options]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(line)


def test_harmless_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Tabs, kinds of spaces and joined emoji; anything that could change the terminal is escaped."""
    family = "\U0001f469\u200d\U0001f467"
    for text in (f"def f():\n\treturn\xa0{family}", "\x1b[2J\r\u202e"):
        _print_text({"text": text, "logprob": None})
    assert capsys.readouterr().out == f"def f():\n\treturn\xa0{family}" + r"\x1b[2J\r\u202e"


class Spelling(tokenbus.BaseEngine):
    """Says the bytes of a text, one a token."""

    text = " \u00e9\U0001f600!".encode()

    def __init__(self) -> None:
        super().__init__("bytes")

    def logits(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        logits = np.full((len(sequences), self.vocabulary_size), -99, np.float32)
        for row, token_ids in zip(logits, sequences, strict=True):
            row[self.text[len(token_ids) - 2]] = 0
        return logits


async def test_character_of_several_tokens_is_shown_whole() -> None:
    shown: list[dict[str, Any]] = []
    async with testing.bus(Spelling()) as bus, tokenbus.connect(bus.address) as client:
        generation = client.generate("a", max_tokens=len(Spelling.text))
        await show_answer(generation, tokenbus.load_tokenizer("bytes"), shown.append)
    assert "".join(each["text"] for each in shown[:-1]) == Spelling.text.decode()

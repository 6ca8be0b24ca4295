"""The pages about the drop-in name what is there."""

import re
from pathlib import Path

from tests.engines.fastdeploy.test_errors import WRONG
from tokenbus.engines import fastdeploy

ROOT = Path(__file__).resolve().parents[3]


def test_answers_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "fastdeploy.md").read_text()
    lines = page[page.index("## What three reports found") :].splitlines()
    rows = [line for line in lines if line.startswith("- ")]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, function in named:
            assert re.search(rf"^(async )?def {function}\b", (ROOT / path).read_text(), re.MULTILINE), (path, function)


def test_page_names_every_op_and_no_other() -> None:
    text = (ROOT / "docs" / "fastdeploy.md").read_text()
    table = text[text.index("| save | get |") : text.index("A tensor is a paddle tensor")]
    ops = {name for name in fastdeploy.__all__ if "output" in name or "first_token" in name}
    assert set(re.findall(r"`(\w+)`", table)) == ops


def test_page_quotes_errors_as_they_are() -> None:
    text = (ROOT / "docs" / "fastdeploy.md").read_text()
    folder = Path(__file__).parent
    expected = (folder / "test_environment.py").read_text() + "\n".join(f"{name}{text}" for _, name, _, text in WRONG)
    table = text[text.index("| before | now |") : text.index("A save op clears `preempted_idx`")]
    quoted = re.findall(r"\| `(?:(\w+)\.)?([^`]+), got ([^`]+)`", table)
    assert len(quoted) > 3
    assert [line for line in quoted if line[0] not in {*fastdeploy.OPS, ""}] == []
    assert [
        line
        for _, line, value in quoted
        if f"{line}, got {value}" not in expected and f"{line}, got {{" not in expected
    ] == []

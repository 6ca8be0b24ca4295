"""The table at the end of a run of all tests."""

import pytest

from tests.support import seconds


def test_folder_that_takes_half_more_than_its_share_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest listed folder counts a test; of 20 seconds `system` may take 10 by its share, and takes 16."""
    monkeypatch.setattr(seconds, "SHARES", {".": 1, "system": 2, "system/log": 1})
    durations = [("tests/test_a.py::test_a", 1.0), ("tests/system/deep/test_b.py::test_b", 10.0)]
    durations += [("tests/system/log/test_c.py::test_c", 3.0), ("tests/system/deep/test_b.py::test_b", 6.0)]
    lines = list(seconds.table(durations))
    assert lines[1:5] == [
        "    16.0  system  MORE THAN ITS SHARE, 10.0 s",
        "     3.0  system/log",
        "     1.0  .",
        "    20.0  in all",
    ]
    assert lines[6] == "    16.0  tests/system/deep/test_b.py::test_b"
    assert "MORE" not in "".join(seconds.table(durations[:2]))

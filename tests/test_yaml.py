"""The YAML files: Go's library, which reads them where they are used, makes of them what the tests' own does."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.pages import ROOT
from tests.support.kubectl import read_by_go

FILES = [
    path.relative_to(ROOT)
    for found in (ROOT.glob("*.y*ml"), (ROOT / "proto").glob("*.y*ml"), (ROOT / "deploy").rglob("*.y*ml"))
    for path in sorted(found)
    if "kubernetes" not in path.parts  # kustomize itself reads those: tests/test_kubernetes.py
]


def with_values(value: Any) -> Any:  # noqa: ANN401 - YAML
    if isinstance(value, dict):
        return {key: with_values(each) for key, each in value.items() if each is not None}
    return value


@pytest.mark.nightly
@pytest.mark.parametrize("path", FILES, ids=str)
def test_go_reads_the_same(path: Path, tmp_path: Path) -> None:
    """No file is refused by Go's YAML library, or means something else to it: `yes`, 0400 and an open `?` do."""
    text, copy = (ROOT / path).read_text(), tmp_path / path.name
    found = YAML(typ="safe").load(text)
    is_list = isinstance(found, list)  # Go's reader wants a mapping
    copy.write_text(f"found:\n{text}" if is_list else text)
    assert read_by_go(copy) == with_values({"found": found} if is_list else found)


def test_a_difference_and_a_refusal_are_found(tmp_path: Path) -> None:
    path = tmp_path / "some.yml"
    path.write_text("a: yes")
    assert read_by_go(path) != YAML(typ="safe").load(path.read_text())
    path.write_text("a: {b: c?d=e}")
    assert YAML(typ="safe").load(path.read_text())
    with pytest.raises(AssertionError, match="did not find expected"):
        read_by_go(path)

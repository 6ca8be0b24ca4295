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


def test_the_files_are_found() -> None:
    """What Docker Compose, Prometheus, Grafana, buf, pre-commit and GitHub read is among them."""
    tops = {".pre-commit-config.yaml", ".pre-commit-hooks.yaml", "action.yml", "deploy", "docker-compose.yml", "proto"}
    assert {path.parts[0] for path in FILES} == tops
    assert {path.name for path in FILES} >= {"alerts.yml", "prometheus.yml", "tokenbus.yml", "buf.yaml"}


@pytest.mark.nightly
@pytest.mark.parametrize("path", FILES, ids=str)
def test_go_reads_the_same(path: Path, tmp_path: Path) -> None:
    """No file is refused by Go's YAML library, or means something else to it: `yes`, 0400 and an open `?` do."""
    found = YAML(typ="safe").load((ROOT / path).read_text())
    if isinstance(found, list):  # Go's reader wants a mapping
        copy = tmp_path / path.name
        copy.write_text("found:\n" + (ROOT / path).read_text())
        assert read_by_go(copy) == {"found": with_values(found)}
        return
    assert read_by_go(ROOT / path) == with_values(found)


def test_a_difference_and_a_refusal_are_found(tmp_path: Path) -> None:
    """What the two libraries read differently is seen by this comparison, and what one refuses, in Go's words."""
    path = tmp_path / "some.yml"
    path.write_text("a: yes")
    assert read_by_go(path) != YAML(typ="safe").load(path.read_text())
    path.write_text("a: {b: c?d=e}")
    assert YAML(typ="safe").load(path.read_text())
    with pytest.raises(AssertionError, match="did not find expected"):
        read_by_go(path)

"""Documents that name code name code that is there, and describe the whole as it is."""

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT
from tokenbus import testing

TOKENBUS = ROOT / "services" / "tokenbus"


def _source(name: str) -> Path:
    if name.startswith(("contracts/", "gpu_ops/")):
        return ROOT / name
    return TOKENBUS / name


def _text(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("page", "files"), [("docs/extending.md", 5), ("CONTRIBUTING.md", 10)])
def test_page_names_files_that_exist(page: str, files: int) -> None:
    text = _text(ROOT / page)
    named_files = {name for name in re.findall(r"`([\w/]+\.py)`", text) if not name.startswith("tests/")}
    assert len(named_files) >= files
    assert [name for name in named_files if not _source(name).is_file()] == []
    assert [name for name in re.findall(r"`(tests/[\w/.]+)`", text) if not (ROOT / name).exists()] == []


def test_architecture_has_a_row_for_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/.]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    packages = {f"services/tokenbus/{path.parent.name}/" for path in TOKENBUS.glob("*/__init__.py")}
    assert packages | {"contracts/tokenbus_contracts/"} <= {name for name, _ in rows}
    for name, files in rows:
        named = re.findall(r"`([\w/]+\.\w+)`", files)
        assert [each for each in named if not (ROOT / name / each).is_file()] == []
        assert named or files == "itself", name


def test_members_that_pages_name_exist() -> None:
    classes: dict[str, str] = {}
    for path in (path for folder in ("services", "contracts", "gpu_ops") for path in (ROOT / folder).rglob("*.py")):
        for name, bases, body in _CLASS.findall(path.read_text()):
            classes[name] = f"{classes.get(name, '')}({bases})\n{body}"
    named = {(page.name, *found) for page in PAGES for found in re.findall(r"`([A-Z]\w+)\.(\w+)", _text(page))}
    ours = [each for each in sorted(named) if each[1] in classes]
    assert len(ours) > 70
    assert [each for each in ours if not _has(classes, each[1], each[2])] == []


_CLASS = re.compile(r"^class (\w+)(?:\((.*?)\))?:\n((?:(?: .*)?\n)*)", re.MULTILINE)


def _has(classes: dict[str, str], name: str, member: str) -> bool:
    text = classes.get(name, "")
    bases = re.findall(r"\w+", "".join(re.findall(r"^\((.*)\)$", text, re.MULTILINE)))
    return _defines(text, member) or any(_has(classes, base, member) for base in bases if base != name)


def _defines(text: str, name: str) -> bool:
    pattern = rf"^ *(?:(?:async )?def {name}\(|class {name}\b|(?:self\.)?{name}(?:: .*)?(?: =|$))"
    return re.search(pattern, text, re.MULTILINE) is not None


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in {*PAGES, *(ROOT / "docs").rglob("*.md")}:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            other = page.parent / target if target else page
            assert other.exists(), f"{page.relative_to(ROOT)}: {target}"
            assert not anchor or anchor in _anchors(other.read_text()), f"{page.name}: {target}#{anchor}"


def test_attacks_that_security_names_are_tests() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test


def test_page_of_testing_has_every_name() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    methods = [name for kind in (testing.Bus, testing.Line) for name in vars(kind) if not name.startswith("_")]
    internal = {
        "start", "close", "listen", "connect", "closed", "copies", "flows", "is_held", "is_dead", "worker",
        "processor",
    }  # fmt: skip
    assert [name for name in {*testing.__all__, *methods} - internal if not re.search(rf"\b{name}\b", page)] == []

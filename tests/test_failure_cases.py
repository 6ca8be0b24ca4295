"""What went wrong elsewhere stays covered: each case has a test whose docstring cites its number."""

import ast

from tests.failure_cases import PAGE, TESTS, cited, listed, with_tests

PACKAGES = [TESTS.parent / name for name in ("contracts", "gpu_ops", "services")]


def test_no_case_loses_its_test() -> None:
    """Every case of docs/failure-cases.md has a test, and every number that a test cites is a case of that page."""
    cases = listed(PAGE.read_text())
    assert cases == list(range(1, len(cases) + 1))
    assert set(cited()) == set(cases)


def test_page_names_the_modules_that_hold_each_case() -> None:
    """The page's last column is what `python -m tests.failure_cases` writes."""
    page = PAGE.read_text()
    assert page == with_tests(page)


def test_nothing_that_came_from_the_network_is_unpickled() -> None:
    """No module of the packages imports what rebuilds objects from bytes and runs code for that (case 32)."""
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill"}, path

"""Documents that name code name code that is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ROOT / "services" / "tokenbus_services"


def _source(name: str) -> Path:
    return ROOT / name if name.startswith("contracts/") else SERVICES / name


def test_one_batch_names_files_and_functions_that_exist() -> None:
    """Every file that docs/one-batch.md names is there, and every Class.function is defined in the services."""
    text = (ROOT / "docs" / "one-batch.md").read_text()
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(files) > 15
    assert [name for name in files if not _source(name).is_file()] == []
    code = "\n".join(path.read_text() for path in [*SERVICES.rglob("*.py"), *(ROOT / "contracts").rglob("batch.py")])
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", text))
    assert len(named) > 20
    for owner, member in named:
        assert re.search(rf"class {owner}\b", code), owner
        assert re.search(rf"def {member}\b|^    {member}: ", code, re.MULTILINE), f"{owner}.{member}"

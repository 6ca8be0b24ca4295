"""The schema's guards: each change is made in a copy of the tree, and the check must find it there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schema_tools.paths import REPOSITORY

CONTRACT = "proto/tokenbus/v1/logprob_batch.proto"


class Copy:
    """A copy of the schema and of all that is made from it, in which the tools can be run."""

    def __init__(self, folder: Path) -> None:
        """Copy what the tools read and write."""
        self.root = folder
        for name in ("proto", "contracts"):
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, command: str) -> tuple[int, str]:
        """Run one of the copy's own tools; return its exit status and what it printed."""
        environment = os.environ | {"PYTHONPATH": str(self.root / "contracts"), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run(
            [sys.executable, "-m", "schema_tools", command],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return run.returncode, run.stdout + run.stderr

    def replace(self, file: str, old: str, new: str, *, everywhere: bool = False) -> None:
        """Replace some text of a file; it must be there."""
        path = self.root / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, -1 if everywhere else 1))

    def faults(self) -> list[str]:
        """Return the lines in which the check names what it found; none if it found nothing."""
        status, printed = self.run("check")
        lines = printed.splitlines()
        assert status == (0 if lines == ["the schema holds, and so does all that is made from it"] else 1), printed
        return [] if status == 0 else lines


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Return a fresh copy of the tree."""
    return Copy(tmp_path)


def test_untouched_tree_has_no_fault(copy: Copy) -> None:
    """The tree as it is passes every check: what is committed is what the tools write."""
    assert copy.faults() == []


def test_breaking_change_is_found(copy: Copy) -> None:
    """A field that gets another number breaks what was released, also when all else follows the change."""
    copy.replace(CONTRACT, "positions = 4", "positions = 24")
    copy.run("generate")
    copy.run("vectors")
    (fault,) = copy.faults()
    assert fault.startswith("breaking: ")
    assert 'Previously present field "4" with name "positions"' in fault


def test_deleted_file_is_found(copy: Copy) -> None:
    """A file of the schema that is deleted breaks what was released."""
    (copy.root / "proto/tokenbus/v1/stream.proto").unlink()
    assert any(fault.startswith("breaking: ") and "stream.proto" in fault for fault in copy.faults())


def test_added_field_breaks_nothing(copy: Copy) -> None:
    """A minor version's new field passes, once everything that is made from the schema follows."""
    last = "uint64 last_sequence = 3;"
    new = "// How busy the sender is, in requests. Zero: idle. Never invalid.\n  uint64 load = 4;"
    copy.replace(
        "proto/tokenbus/v1/stream.proto",
        last + "\n}\n\n// Its sender leaves",
        f"{last}\n  {new}\n}}\n\n// Its sender leaves",
    )
    copy.run("generate")
    assert copy.faults() == []


def test_stale_generated_code_is_found(copy: Copy) -> None:
    """A schema that changed without its generated code is found, and the file is named."""
    copy.replace(
        CONTRACT, "uint32 schema_minor = 2;", "uint32 schema_minor = 2;\n  // New. Never invalid.\n  bool new = 20;"
    )
    faults = copy.faults()
    assert any(fault.startswith("generated: ") and "logprob_batch_pb2.py" in fault for fault in faults)


def test_edited_generated_code_is_found(copy: Copy) -> None:
    """Generated code that was edited by hand is found."""
    copy.replace("contracts/tokenbus_contracts/generated/enums.py", "TARGET = 1", "TARGET = 7")
    (fault,) = copy.faults()
    assert fault.startswith("generated: ")
    assert "enums.py" in fault


def test_bound_changed_in_one_place_is_found(copy: Copy) -> None:
    """One bound that is stated for several fields cannot be changed for one of them."""
    copy.replace(CONTRACT, "max: 127\n    default_max: 20", "max: 100\n    default_max: 20")
    copy.run("generate")
    faults = copy.faults()
    assert any("Generate.top_logprobs.max: 127" in fault and "they are one bound" in fault for fault in faults)
    assert any("alternative_token_ids.max_items" in fault for fault in faults)
    assert any(fault.startswith("vectors: ") and "limits.json" in fault for fault in faults)


def test_bound_changed_everywhere_but_in_the_baseline_is_found(copy: Copy) -> None:
    """A bound that was released holds for its major version, however consistently it is changed."""
    for old, new in (("max_items: 1024", "max_items: 512"), ("max_items: 16384", "max_items: 8192")):
        copy.replace(CONTRACT, f" {old}", f" {new}", everywhere=True)
    copy.run("generate")
    copy.run("vectors")
    faults = copy.faults()
    released = "bounds: LogprobBatch.request_keys.max_items: 1024 was released, 512 is in the schema"
    assert any(fault.startswith(released) for fault in faults)


def test_missing_bound_is_found(copy: Copy) -> None:
    """A repeated field without a bound is refused: nothing in the schema is unbounded."""
    copy.replace("proto/tokenbus/v1/stream.proto", "    max_items: 65536\n", "")
    assert any("Gap.request_keys: repeated without max_items" in fault for fault in copy.faults())


def test_field_without_comment_is_found(copy: Copy) -> None:
    """A field that nobody explained does not pass the linter."""
    copy.replace(CONTRACT, "uint32 schema_minor = 2;", "uint32 schema_minor = 2;\n  bool new = 20;")
    assert any(fault.startswith("lint: ") and "comment" in fault for fault in copy.faults())


def test_unformatted_schema_is_found(copy: Copy) -> None:
    """A schema that is not in the formatter's form is found."""
    copy.replace(CONTRACT, "  uint32 schema_minor", "    uint32 schema_minor")
    assert any(fault.startswith("format: ") for fault in copy.faults())


def test_edited_and_added_vectors_are_found(copy: Copy) -> None:
    """A golden message that was edited, and one that the script does not write, are both found."""
    vectors = copy.root / "contracts/vectors/v1/valid"
    (vectors / "one_row.binpb").write_bytes(b"")
    (vectors / "smuggled.binpb").write_bytes(b"")
    (fault,) = copy.faults()
    assert fault.startswith("vectors: ")
    assert "valid/one_row.binpb" in fault
    assert "valid/smuggled.binpb" in fault


def test_missing_baseline_is_found(copy: Copy) -> None:
    """Without the released schema there is nothing to compare with, and that is said."""
    (copy.root / "contracts/baseline/v1.binpb").unlink()
    assert any("contracts/baseline/v1.binpb is missing" in fault for fault in copy.faults())


def test_schema_that_does_not_compile_is_one_error(copy: Copy) -> None:
    """A schema with a syntax error ends the tools with the compiler's own line, not with a traceback."""
    copy.replace(CONTRACT, "message BatchHeader {", "message BatchHeader")
    status, printed = copy.run("generate")
    assert status == 1
    assert "logprob_batch.proto" in printed
    assert "Traceback" not in printed

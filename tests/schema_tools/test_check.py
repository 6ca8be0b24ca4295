"""The schema's guards: each change is made in a copy of the tree, and the check must find it there."""

import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from schema_tools.__main__ import main
from schema_tools.compiled import REPOSITORY, Tree, write_baseline

CONTRACT = "proto/tokenbus/v1/logprob_batch.proto"
STREAM = "proto/tokenbus/v1/stream.proto"
REQUEST = "proto/tokenbus/v1/request.proto"
BASELINE = "contracts/baseline/v1.binpb"
GENERATED = "contracts/tokenbus_contracts/generated"
VECTORS = "contracts/vectors/v1"


class Copy:
    """A copy of the schema and of all that is made from it, in which the tools can be run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.has_own_process = False
        """The tools import what the copy's schema gives, and not what ours does."""
        for name in ("proto", "contracts"):
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, command: str) -> tuple[int, str]:
        """Run one of the tools in the copy; return its exit status and what it printed."""
        if not self.has_own_process:
            with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
                status = main([command], self.root)
            return status, printed.getvalue()
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
    return Copy(tmp_path)


@pytest.fixture
def released(copy: Copy) -> Copy:
    """Return a copy whose schema was released as it is."""
    write_baseline(Tree(copy.root))
    return copy


def test_untouched_tree_has_no_fault(copy: Copy) -> None:
    copy.has_own_process = True
    assert copy.faults() == []


def test_breaking_change_is_found(released: Copy) -> None:
    """A field that gets another number breaks what was released, also when all else follows the change."""
    released.replace(STREAM, "uint32 tp_rank = 10", "uint32 tp_rank = 30")
    released.run("generate")
    released.run("vectors")
    (fault,) = released.faults()
    assert fault.startswith("breaking: ")
    assert 'Previously present field "10" with name "tp_rank"' in fault


def test_deleted_file_is_found(released: Copy) -> None:
    (released.root / "proto/tokenbus/v1/client.proto").unlink()
    assert any(fault.startswith("breaking: ") and "client.proto" in fault for fault in released.faults())


def test_added_field_breaks_nothing(released: Copy) -> None:
    """A minor version's new field passes, once everything that is made from the schema follows."""
    last = "bool takes_no_more = 4;"
    new = "// How busy the sender is, in requests. Zero: idle. Never invalid.\n  uint64 load = 5;"
    released.replace(
        STREAM,
        last + "\n}\n\n// The sender leaves",
        f"{last}\n  {new}\n}}\n\n// The sender leaves",
    )
    released.run("generate")
    assert released.faults() == []


def test_stale_generated_code_is_found(copy: Copy) -> None:
    copy.replace(
        CONTRACT, "uint32 schema_minor = 2;", "uint32 schema_minor = 2;\n  // New. Never invalid.\n  bool new = 21;"
    )
    faults = copy.faults()
    assert any(fault.startswith("generated: ") and "logprob_batch_pb2.py" in fault for fault in faults)


def test_edited_generated_code_is_found(copy: Copy) -> None:
    copy.replace("contracts/tokenbus_contracts/generated/enums.py", "TARGET = 1", "TARGET = 7")
    (fault,) = copy.faults()
    assert fault.startswith("generated: ")
    assert "enums.py" in fault


def test_what_does_not_belong_among_generated_code_is_found(copy: Copy) -> None:
    for name in ("code/module.py", "data/deeper/data.bin", "notes.txt", "py.typed"):
        path = copy.root / GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff")
    found = "generated: not what the schema gives now: code, data, notes.txt, py.typed; run `make proto`"
    assert copy.faults() == [found]
    assert copy.run("generate") == (0, "code\ndata\nnotes.txt\npy.typed\n")
    assert copy.faults() == []


def test_empty_folder_and_folder_in_a_files_place_are_found(copy: Copy) -> None:
    """A folder is stale also where it is empty, or has the name of a file that is generated."""
    (copy.root / GENERATED / "empty").mkdir()
    (copy.root / GENERATED / "enums.pyi").mkdir()
    (fault,) = copy.faults()
    assert "empty, enums.pyi;" in fault
    stubs = copy.root / GENERATED / "stream_pb2.pyi"
    stubs.unlink()
    stubs.mkdir()
    assert copy.run("generate") == (0, "empty\nenums.pyi\nstream_pb2.pyi\n")
    assert copy.faults() == []


def test_pythons_cache_among_generated_code_is_ignored(copy: Copy) -> None:
    cache = copy.root / GENERATED / "__pycache__"
    cache.mkdir()
    (cache / "enums.cpython-311.pyc").write_bytes(b"\0")
    assert copy.faults() == []


def test_bound_changed_in_one_place_is_found(copy: Copy) -> None:
    copy.has_own_process = True
    copy.replace(CONTRACT, "max: 127\n    default_max: 20", "max: 100\n    default_max: 20")
    copy.run("generate")
    faults = copy.faults()
    assert any("Generate.top_logprobs.max: 127" in fault and "they are one bound" in fault for fault in faults)
    assert any("alternative_token_ids.max_items" in fault for fault in faults)
    assert any(fault.startswith("vectors: ") and "limits.json" in fault for fault in faults)


def test_bound_changed_everywhere_but_in_the_baseline_is_found(released: Copy) -> None:
    released.has_own_process = True
    for old, new in (("max_items: 1024", "max_items: 512"), ("max_items: 16384", "max_items: 8192")):
        released.replace(CONTRACT, f" {old}", f" {new}", everywhere=True)
    released.run("generate")
    released.run("vectors")
    faults = released.faults()
    expected = "bounds: LogprobBatch.request_keys.max_items: 1024 was released, 512 is in the schema"
    assert any(fault.startswith(expected) for fault in faults)


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        (
            STREAM,
            "uint32 schema_minor = 2;",
            "uint32 schema_minor = 2 [(bounds) = {max: 9}];",
            "Hello.schema_minor.max: 9 is in the schema, and Hello.schema_minor was released without",
        ),
        (
            CONTRACT,
            "repeated fixed32 positions = 4 [(bounds) = {",
            "repeated fixed32 positions = 4 [(bounds) = {\n    unique: true",
            "LogprobBatch.positions.unique: 1 is in the schema, and LogprobBatch.positions was released without",
        ),
        (
            CONTRACT,
            "ROW_STATUS_IDLE = 2 [(status_rule) = {tokens: TOKEN_RULE_NONE}];",
            "ROW_STATUS_IDLE = 2 [(status_rule) = {tokens: TOKEN_RULE_NONE proposals: true}];",
            "ROW_STATUS_IDLE.proposals: 1 is in the schema, and ROW_STATUS_IDLE was released without",
        ),
        (
            STREAM,
            "message Refusal {",
            "message Refusal {\n  option (message_bounds) = {max_bytes: 2048};",
            "Refusal.max_bytes: 2048 is in the schema, and Refusal was released without",
        ),
        (
            STREAM,
            "uint32 max_top_k = 5 [(bounds) = {max: 127}];",
            "uint32 max_top_k = 5;",
            "StreamLimits.max_top_k.max: 127 was released, and the schema has no such bound",
        ),
        (
            CONTRACT,
            "ROW_STATUS_IDLE = 2 [(status_rule) = {tokens: TOKEN_RULE_NONE}];",
            "ROW_STATUS_IDLE = 2;",
            "ROW_STATUS_IDLE.tokens: 1 was released, and the schema has no such bound",
        ),
    ],
)
def test_bound_gained_or_lost_since_the_release_is_found(
    released: Copy, file: str, old: str, new: str, fault: str
) -> None:
    released.replace(file, old, new)
    assert any(line.startswith(f"bounds: {fault}") for line in released.faults())


def test_new_field_may_have_bounds(released: Copy) -> None:
    new = "// How busy the sender is, in requests. Zero: idle. Invalid above the bound.\n"
    released.replace(
        STREAM, "message Heartbeat {\n", f"message Heartbeat {{\n  {new}  uint32 load = 5 [(bounds) = {{max: 9}}];\n"
    )
    released.run("generate")
    assert released.faults() == []


def test_field_with_two_smallest_values_is_found(copy: Copy) -> None:
    copy.replace(REQUEST, "    least: -100\n", "    least: -100\n    min: 1\n")
    assert "bounds: TokenBias.bias: least -100 beside min 1, and they say the same" in copy.faults()


def test_nested_message_is_checked_as_any_other(copy: Copy) -> None:
    """A message inside a message is no place where bounds may be left out."""
    nested = "  // Inner.\n  message Inner {\n    // Text.\n    string text = 1;\n  }\n"
    copy.replace(STREAM, "message Heartbeat {\n", f"message Heartbeat {{\n{nested}")
    assert "bounds: Heartbeat.Inner.text: text or bytes without max_bytes" in copy.faults()


def test_missing_bound_is_found(copy: Copy) -> None:
    copy.replace(STREAM, "    max_items: 65536\n", "")
    assert any("Hello.request_keys: repeated without max_items" in fault for fault in copy.faults())


def test_field_without_comment_is_found(copy: Copy) -> None:
    copy.replace(CONTRACT, "uint32 schema_minor = 2;", "uint32 schema_minor = 2;\n  bool new = 21;")
    assert any(fault.startswith("lint: ") and "comment" in fault for fault in copy.faults())


def test_unformatted_schema_is_found(copy: Copy) -> None:
    copy.replace(CONTRACT, "  uint32 schema_minor", "    uint32 schema_minor")
    assert any(fault.startswith("format: ") for fault in copy.faults())


def test_golden_bytes_stay(copy: Copy) -> None:
    """Golden bytes that were edited, or removed with their JSON, are named, and `vectors` does not hide that."""
    valid, invalid = (copy.root / VECTORS / name for name in ("valid/one_row", "invalid/empty"))
    written = valid.with_suffix(".binpb").read_bytes()
    valid.with_suffix(".binpb").write_bytes(b"")
    (fault,) = copy.faults()
    assert fault.startswith("vectors: valid/one_row.binpb: sha256 ")
    assert copy.run("vectors")[0] == 1
    valid.with_suffix(".binpb").write_bytes(written)
    for suffix in (".binpb", ".json"):
        invalid.with_suffix(suffix).unlink()
    assert copy.faults() == ["vectors: invalid/empty.binpb: in SHA256SUMS, and has no JSON; a golden message stays"]


def test_what_follows_from_golden_bytes_is_written_again(copy: Copy) -> None:
    """A valid message's JSON, and a message's bytes, are written from one another; what is neither is named."""
    json_file, bytes_file = (copy.root / VECTORS / f"valid/one_row{suffix}" for suffix in (".json", ".binpb"))
    written = json_file.read_text(), bytes_file.read_bytes()
    json_file.write_text(written[0].replace('"step": "40"', '"step": "41"'))
    assert copy.run("vectors") == (0, "valid/one_row.json\n")
    bytes_file.unlink()
    assert copy.run("vectors") == (0, "valid/one_row.binpb\n")
    assert (json_file.read_text(), bytes_file.read_bytes()) == written
    (copy.root / VECTORS / "valid/smuggled.binpb").write_bytes(b"")
    assert copy.faults() == ["vectors: valid/smuggled.binpb: neither a golden message nor its JSON"]


def test_new_golden_message_is_written_from_its_json(copy: Copy) -> None:
    """A message is added as JSON with its header and columns; JSON that no message can have is one line."""
    given = (copy.root / VECTORS / "valid/one_row.json").read_text()
    new = copy.root / VECTORS / "valid/new.json"
    new.write_text(given.replace('"step": "40"', '"step": "41"'))
    assert copy.run("vectors") == (0, "SHA256SUMS\nvalid/new.binpb\n")
    assert copy.faults() == []
    (copy.root / VECTORS / "valid/wrong.json").write_text("{}")
    status, printed = copy.run("vectors")
    assert (status, printed.count("\n")) == (1, 1)
    assert printed.startswith("error: valid/wrong.json: no header and columns that a message can have")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("uint32 tp_rank = 10", "uint32 tp_rank = 30", "breaking: "),
        (
            "uint32 schema_minor = 2;",
            "uint32 schema_minor = 2 [(bounds) = {max: 9}];",
            "bounds: Hello.schema_minor",
        ),
    ],
)
def test_baseline_is_not_overwritten_by_what_breaks_it(released: Copy, old: str, new: str, fault: str) -> None:
    """A schema that breaks the released one is not released in its place, and what it breaks is named."""
    released.replace(STREAM, old, new)
    released.run("generate")
    baseline = (released.root / BASELINE).read_bytes()
    status, printed = released.run("baseline")
    assert status == 1
    assert any(line.startswith(fault) for line in printed.splitlines())
    assert "a released schema can only grow" in printed
    assert (released.root / BASELINE).read_bytes() == baseline


def test_baseline_grows(released: Copy) -> None:
    """A schema that only grew becomes the released one, and from then on its new field is kept too."""
    new = "  // How busy the sender is, in requests. Zero: idle. Never invalid.\n  uint64 load = 5;\n"
    released.replace(STREAM, "message Heartbeat {\n", "message Heartbeat {\n" + new)
    released.run("generate")
    assert released.run("baseline") == (0, f"wrote {BASELINE}\n")
    assert released.faults() == []
    released.replace(STREAM, new, "")
    released.run("generate")
    assert any(fault.startswith("breaking: ") and '"load"' in fault for fault in released.faults())
    assert released.run("baseline")[0] == 1


def test_first_baseline_may_be_made(copy: Copy) -> None:
    copy.replace(CONTRACT, "schema_minor = 2;", "schema_minor = 22;")
    copy.run("generate")
    assert copy.run("baseline") == (0, f"wrote {BASELINE}\n")
    assert not any(fault.startswith(("breaking: ", "bounds: ")) for fault in copy.faults())


def test_schema_that_does_not_compile_is_one_error(copy: Copy) -> None:
    copy.replace(CONTRACT, "message BatchHeader {", "message BatchHeader")
    status, printed = copy.run("generate")
    assert status == 1
    assert "logprob_batch.proto" in printed
    assert "Traceback" not in printed

"""The schema's guards: each change is made in a copy of the tree, and the check must find it there.

`make check` runs the check on the tree itself. buf and protoc are processes of their own.
"""

import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from schema_tools.__main__ import main
from schema_tools.check import faults
from schema_tools.compiled import REPOSITORY, SchemaError, Tree, write_baseline
from schema_tools.generate import stale_files, write_generated
from schema_tools.vectors import vector_faults

CONTRACT = "proto/tokenbus/v1/logprob_batch.proto"
STREAM = "proto/tokenbus/v1/stream.proto"
REQUEST = "proto/tokenbus/v1/request.proto"
BASELINE = "contracts/baseline/v1.binpb"
GENERATED = "contracts/tokenbus_contracts/generated"
VECTORS = "contracts/vectors/v1"
LOAD = "  // How busy the sender is, in requests. Zero: idle. Invalid above the bound.\n  uint32 load = 99"
NESTED = "  // Inner.\n  message Inner {\n    // Text.\n    string text = 1;\n  }\n"
CHANGES = {
    "bounds: Hello.schema_minor.max: 9 is in the schema, and Hello.schema_minor was released without": (STREAM, "uint32 schema_minor = 2;", "uint32 schema_minor = 2 [(bounds) = {max: 9}];"),  # noqa: E501
    "bounds: LogprobBatch.positions.unique: 1 is in the schema, and LogprobBatch.positions was released without": (
        CONTRACT,
        "repeated fixed32 positions = 4 [(bounds) = {",
        "repeated fixed32 positions = 4 [(bounds) = {\n    unique: true",
    ),
    "bounds: Refusal.max_bytes: 2048 is in the schema, and Refusal was released without": (STREAM, "message Refusal {", "message Refusal {\n  option (message_bounds) = {max_bytes: 2048};"),  # noqa: E501
    "bounds: StreamLimits.max_top_k.max: 127 was released, and the schema has no such bound": (STREAM, "uint32 max_top_k = 5 [(bounds) = {max: 127}];", "uint32 max_top_k = 5;"),  # noqa: E501
    "bounds: ROW_STATUS_IDLE.tokens: 1 was released, and the schema has no such bound": (
        CONTRACT,
        "ROW_STATUS_IDLE = 2 [(status_rule) = {tokens: TOKEN_RULE_NONE}];",
        "ROW_STATUS_IDLE = 2;",
    ),
    "bounds: LogprobBatch.top_ks.max: 127 was released, 100 is in the schema": (CONTRACT, "max: 127\n    default_max: 20", "max: 100\n    default_max: 20"),  # noqa: E501
    "bounds: Generate.top_logprobs.max: 127, but LogprobBatch.top_ks.max is 100; both must be the same bound": None,
    "bounds: LogprobBatch.alternative_token_ids.max_items: ": None,
    "bounds: TokenBias.bias: least -100 with min 1, but they mean the same": (REQUEST, "    least: -100\n", "    least: -100\n    min: 1\n"),  # noqa: E501
    "bounds: Hello.request_ids: repeated without max_items": (STREAM, "    max_items: 65536\n", ""),
    "bounds: Heartbeat.Inner.text: text or bytes without max_bytes": (STREAM, "message Heartbeat {\n", f"message Heartbeat {{\n{NESTED}"),  # noqa: E501
    'breaking: proto/tokenbus/v1/stream.proto:*Previously present field "10" with name "tp_rank"': (STREAM, "uint32 tp_rank = 10", "uint32 tp_rank = 99"),  # noqa: E501
    "lint: proto/tokenbus/v1/logprob_batch.proto:*comment": (CONTRACT, "uint32 schema_minor = 2;", "uint32 schema_minor = 2;\n  bool new = 21;"),  # noqa: E501
    "format: *": (CONTRACT, "  uint32 schema_minor", "    uint32 schema_minor"),
    "generated: out of date with the schema: *logprob_batch_pb2.py": None,
}  # fmt: skip
"""By how a fault's line begins (and, behind a star, what it has too): the file, its text, and another in its place."""


class Copy:
    """A copy of the schema and of all that is made from it, in which the tools can be run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in ("proto", "contracts"):
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def tree(self) -> Tree:
        return Tree(self.root)

    def run(self, command: str) -> tuple[int, str]:
        with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
            status = main([command], self.root)
        return status, printed.getvalue()

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.fixture
def released(copy: Copy) -> Copy:
    write_baseline(copy.tree)
    return copy


def test_each_change_is_found(released: Copy) -> None:
    """One check names every fault: what breaks the released schema, missing and contradicting bounds, bad form."""
    for change in filter(None, CHANGES.values()):
        released.replace(*change)
    status, printed = released.run("check")
    assert status == 1
    lines = printed.replace(f"{released.root}/", "").splitlines()
    for fault in CHANGES:
        begin, _, rest = fault.partition("*")
        assert any(line.startswith(begin) and rest in line for line in lines), (fault, printed)
    assert released.run("baseline")[0] == 1, "what breaks the released schema takes its place"


def test_released_schema_can_only_grow(released: Copy) -> None:
    released.replace(STREAM, "message Heartbeat {\n", f"message Heartbeat {{\n{LOAD} [(bounds) = {{max: 9}}];\n")
    write_generated(released.tree)
    assert list(faults(released.tree)) == []
    assert released.run("baseline") == (0, f"wrote {BASELINE}\n")
    released.replace(STREAM, f"{LOAD} [(bounds) = {{max: 9}}];\n", "")
    (released.root / "proto/tokenbus/v1/client.proto").unlink()
    baseline = (released.root / BASELINE).read_bytes()
    *found, refusal = released.run("baseline")[1].splitlines()
    assert "a released schema can only grow" in refusal
    for name in ('"load"', "client.proto"):
        assert any(line.startswith("breaking: ") and name in line for line in found)
    assert (released.root / BASELINE).read_bytes() == baseline


def test_what_does_not_belong_among_generated_code_is_found(copy: Copy) -> None:
    generated = copy.root / GENERATED
    copy.replace(f"{GENERATED}/enums.py", "TARGET = 1", "TARGET = 7")
    for name in ("__pycache__/enums.cpython-311.pyc", "code/module.py", "notes.txt"):
        path = generated / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff")
    (generated / "empty").mkdir()
    (generated / "stream_pb2.pyi").unlink()
    (generated / "stream_pb2.pyi").mkdir()
    stale = ["code", "empty", "enums.py", "notes.txt", "stream_pb2.pyi"]
    assert stale_files(copy.tree) == stale
    assert copy.run("generate") == (0, "\n".join(stale) + "\n")
    assert stale_files(copy.tree) == []


def test_golden_bytes_stay(copy: Copy) -> None:
    valid, invalid = (copy.root / VECTORS / name for name in ("valid/one_row", "invalid/empty"))
    written = valid.with_suffix(".binpb").read_bytes()
    valid.with_suffix(".binpb").write_bytes(b"")
    status, printed = copy.run("vectors")
    assert (status, printed.startswith("error: valid/one_row.binpb: sha256 ")) == (1, True)
    with pytest.raises(SchemaError, match=r"valid/one_row\.binpb: sha256 .*; golden messages must not change"):
        list(vector_faults(copy.tree))
    valid.with_suffix(".binpb").write_bytes(written)
    for suffix in (".binpb", ".json"):
        invalid.with_suffix(suffix).unlink()
    with pytest.raises(SchemaError, match=r"invalid/empty\.binpb: in SHA256SUMS, but has no JSON; golden messages"):
        list(vector_faults(copy.tree))


def test_what_follows_from_golden_bytes_is_written_again(copy: Copy) -> None:
    json_file, bytes_file = (copy.root / VECTORS / f"valid/one_row{suffix}" for suffix in (".json", ".binpb"))
    written = json_file.read_text(), bytes_file.read_bytes()
    json_file.write_text(written[0].replace('"step": "40"', '"step": "41"'))
    assert copy.run("vectors") == (0, "valid/one_row.json\n")
    bytes_file.unlink()
    assert copy.run("vectors") == (0, "valid/one_row.binpb\n")
    assert (json_file.read_text(), bytes_file.read_bytes()) == written
    (copy.root / VECTORS / "valid/smuggled.binpb").write_bytes(b"")
    assert list(vector_faults(copy.tree)) == ["valid/smuggled.binpb: neither a golden message nor its JSON"]


def test_new_golden_message_is_written_from_its_json(copy: Copy) -> None:
    given = (copy.root / VECTORS / "valid/one_row.json").read_text()
    (copy.root / VECTORS / "valid/new.json").write_text(given.replace('"step": "40"', '"step": "41"'))
    assert copy.run("vectors") == (0, "SHA256SUMS\nvalid/new.binpb\n")
    assert list(vector_faults(copy.tree)) == []
    (copy.root / VECTORS / "valid/wrong.json").write_text("{}")
    status, printed = copy.run("vectors")
    assert (status, printed.count("\n")) == (1, 1)
    assert printed.startswith("error: valid/wrong.json: its header and columns do not form a message")


def test_schema_that_does_not_compile_is_one_error(copy: Copy) -> None:
    copy.replace(CONTRACT, "message BatchHeader {", "message BatchHeader")
    status, printed = copy.run("generate")
    assert status == 1
    assert "logprob_batch.proto" in printed
    assert "Traceback" not in printed

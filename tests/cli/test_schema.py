"""`tokenbus schema` and what `tokenbus check` says of recordings: as users and their CI run them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from ruamel.yaml import YAML

from tests.cli.helpers import payloads, recording
from tests.cli.test_cli import COMMAND
from tests.pages import ROOT, blocks
from tests.support import processes
from tokenbus.cli import main
from tokenbus_contracts.published.descriptors import Schema

STREAM = "tokenbus/v1/stream.proto"


def printed(capsysbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, bytes, str]:
    status = main(["schema", *arguments])
    out, error = capsysbinary.readouterr()
    assert b"Traceback" not in error
    return status, out, error.decode().strip()


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    folder = tmp_path / "proto"
    shutil.copytree(ROOT / "proto" / "tokenbus", folder / "tokenbus")
    path = folder / STREAM
    text = path.read_text()
    for old, new in (
        (
            "string worker_id = 3 [(bounds) = {\n    min_bytes: 1\n    max_bytes: 64",
            "string worker_id = 3 [(bounds) = {\n    min_bytes: 1\n    max_bytes: 32",
        ),
        ("message Heartbeat {\n", "message Heartbeat {\n  // New.\n  uint32 load = 77;\n"),
    ):
        text = text.replace(old, new, 1)
    path.write_text(text)
    return folder


def test_forms(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    status, text, _ = printed(capsysbinary, "proto", "stream.proto")
    assert (status, text) == (0, (ROOT / "proto" / STREAM).read_bytes())
    assert printed(capsysbinary, "proto", "--output", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out" / STREAM).read_bytes() == text
    _, data, _ = printed(capsysbinary, "descriptor")
    assert FileDescriptorSet.FromString(data).file[0].name == "google/protobuf/descriptor.proto"
    _, data, _ = printed(capsysbinary, "json", "tokenbus.v1.Heartbeat")
    assert json.loads(data)["$ref"] == "#/$defs/Heartbeat"
    _, data, _ = printed(capsysbinary, "asyncapi")
    assert json.loads(data)["asyncapi"] == "3.0.0"


def test_diff_says_what_breaks(capsysbinary: pytest.CaptureFixture[bytes], changed: Path, tmp_path: Path) -> None:
    status, out, _ = printed(capsysbinary, "diff", "installed", str(changed))
    first, *_, last = out.decode().splitlines()
    assert status == 1
    assert first.startswith("breaks  Hello.worker_id: max_bytes: 32 instead of 64: ")
    assert last.startswith("adds    Heartbeat.load: the field is new: ")
    status, out, _ = printed(capsysbinary, "diff", "--json", "installed", str(changed))
    assert (status, json.loads(out)["breaks"]) == (1, True)
    image = tmp_path / "image.binpb"
    assert printed(capsysbinary, "descriptor", "--output", str(image))[0] == 0
    assert printed(capsysbinary, "diff", str(image)) == (0, b"the same schema\n", "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["diff"], "schema diff: error: the following arguments are required: OLD"),
        (["diff", "nowhere"], "tokenbus: nowhere: no such file or directory"),
        (["diff", str(ROOT / "README.md")], "README.md: not a valid FileDescriptorSet: "),
        (["diff", ""], "tokenbus: diff: expected a file or a folder, got an empty name"),
        (["diff", "a\0b"], "tokenbus: diff: expected a file or a folder, got an empty name or one with a null"),
        (["diff", "/dev/zero"], "tokenbus: /dev/zero: neither a file nor a folder"),
        (["diff", "--output", "x", "installed"], "error: unrecognized arguments: --output"),
        (["diff", str(ROOT / "docs")], "has no files tokenbus/v1/*.proto"),
        (["diff", "installed", "installed", "installed"], "error: unrecognized arguments: installed"),
        (["json", "Nonsense"], "tokenbus: json: a message of the schema, got Nonsense"),
        (["proto", "nonsense.proto"], "tokenbus: proto: one of bounds.proto, client.proto"),
        (["asyncapi", "--json"], "error: unrecognized arguments: --json"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    capsysbinary: pytest.CaptureFixture[bytes], arguments: list[str], reason: str
) -> None:
    status, out, error = printed(capsysbinary, *arguments)
    assert (status, out) == (2, b"")
    assert reason in error.splitlines()[-1]


def test_descriptor_set_that_contradicts_itself_is_refused(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    files = Schema.installed().descriptor_set()
    frame = next(each for file in files.file for each in file.message_type if each.name == "ClientFrame")
    frame.field[0].oneof_index = 7
    (tmp_path / "broken.desc").write_bytes(files.SerializeToString())
    other = FileDescriptorSet()
    other.file.add(name="other.proto", package="tokenbus.v2").message_type.add(name="Hello")
    (tmp_path / "other.desc").write_bytes(other.SerializeToString())
    for name, reason in (
        ("broken", "not a valid FileDescriptorSet: "),
        ("other", "has no messages of the package tokenbus.v1"),
    ):
        status, out, error = printed(capsysbinary, "diff", str(tmp_path / f"{name}.desc"))
        assert (status, out) == (2, b"")
        assert reason in error


def test_proto_that_does_not_compile_is_told(capsysbinary: pytest.CaptureFixture[bytes], changed: Path) -> None:
    (changed / STREAM).write_text('syntax = "proto3";\nmessage {')
    status, _, error = printed(capsysbinary, "diff", str(changed))
    assert status == 2
    assert "stream.proto" in error


def test_recordings_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recording gets one line; a cut or damaged one says where, and what of which item breaks the contract."""
    whole = recording(payloads(requests=2, tokens=4))
    contents = {"whole": whole, "cut": whole[:-5], "flipped": whole[:-9] + bytes([whole[-9] ^ 0xFF]) + whole[-8:]}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert main(["check", *contents]) == 1
    held, cut, flipped = capsys.readouterr().out.splitlines()
    assert held.startswith("ok       whole: worker-0/7 recording, ")
    assert "0 missing" in held
    assert cut.startswith("refused  cut: byte ")
    assert "the file ends within the entry" in cut
    assert flipped.startswith("refused  flipped: byte ")
    assert "CRC-32" in flipped


def test_item_that_breaks_the_contract_is_found_in_its_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = list(payloads(requests=2, tokens=4))
    sequence, kind, payload = next(each for each in sound if each[1] == 1)
    broken = [(number, each, data[:-2] if number == sequence else data) for number, each, data in sound]
    (tmp_path / "stream.tokenbus").write_bytes(recording(iter(broken)))
    assert main(["check", "--json", str(tmp_path / "stream.tokenbus")]) == 1
    report = json.loads(capsys.readouterr().out)["files"][0]
    assert (report["ok"], report["item"], kind) == (False, str(sequence), 1)
    begin = (tmp_path / "stream.tokenbus").read_bytes().index(payload[:-2])
    assert begin <= report["offset"] < begin + len(payload)
    assert {"field", "limit", "actual", "rule"} <= report.keys()


def action() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load((ROOT / "action.yml").read_text())
    return found


@pytest.mark.parametrize(("files", "status"), [("good/*.binpb", 0), ("**/*.binpb", 1), ("good/* none/*", 1)])
def test_action_checks_the_files_that_it_is_given(tmp_path: Path, files: str, status: int) -> None:
    """The step of action.yml, as a runner runs it, with Tokenbus where the step before installs it."""
    vectors = ROOT / "contracts" / "vectors" / "v1"
    for kind, name in (("good", "valid/one_row"), ("bad", "invalid/nan_logprob")):
        (tmp_path / kind).mkdir()
        shutil.copy(vectors / f"{name}.binpb", tmp_path / kind)
    (tmp_path / "tokenbus" / "bin").mkdir(parents=True)
    (tmp_path / "tokenbus" / "bin" / "tokenbus").symlink_to(COMMAND)
    (step,) = (each for each in action()["runs"]["steps"] if each["name"] == "tokenbus check")
    variables = {"FILES": files, "LIMITS": "default", "RUNNER_TEMP": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = processes.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=variables)
    assert run.returncode == status, run.stderr


def test_action_and_hooks_name_what_is_there() -> None:
    """The action installs from locks of ours alone, and each hook runs a command of ours; the page has their names."""
    install = action()["runs"]["steps"][0]["run"]
    for name in ("gateway", "build"):
        assert f"$GITHUB_ACTION_PATH/requirements/{name}.txt" in install
    assert "--require-hashes" in install
    assert not [step for step in action()["runs"]["steps"] if "uses" in step]
    hooks = YAML(typ="safe").load((ROOT / ".pre-commit-hooks.yaml").read_text())
    shown, steps = (YAML(typ="safe").load(block.text) for block in blocks("yaml", of="docs/contract.md"))
    assert {hook["id"] for hook in shown["repos"][0]["hooks"]} == {hook["id"] for hook in hooks}
    assert steps[0]["with"].keys() <= action()["inputs"].keys()
    assert [hook["entry"].split()[:2] for hook in hooks] == [["tokenbus", "check"], ["tokenbus", "schema"]]

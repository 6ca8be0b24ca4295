"""tokenbus schema."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from tokenbus.cli.arguments import Parser
from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import styled
from tokenbus.printable import printable, reason_of
from tokenbus_contracts.published.asyncapi import asyncapi
from tokenbus_contracts.published.compatibility import changes
from tokenbus_contracts.published.descriptors import Schema, proto_files
from tokenbus_contracts.published.json_schema import json_schema

_DESCRIPTION = """\
Print the schema in another format, or compare two schemas.

OLD and NEW are a FileDescriptorSet (from `tokenbus schema descriptor` or `buf build`), a folder of .proto files, or
`installed`, the schema of this version, which is the default of NEW.

examples:
  tokenbus schema proto --output proto              files from which protoc or buf generates code
  tokenbus schema descriptor > tokenbus-0.1.desc    the schema of one version
  tokenbus schema diff tokenbus-0.1.desc            later: the changes since then
"""
_MOST_BYTES = 16_777_216


def declare(parser: Parser) -> None:
    parser.description = _DESCRIPTION
    proto, descriptor, message, channels, diff = parser.actions(
        proto="the .proto files, or one of them",
        descriptor="a FileDescriptorSet with comments and imports",
        json="the JSON Schema of a message in protobuf's JSON form",
        asyncapi="an AsyncAPI 3 document: channels, messages, bounds, examples",
        diff="show what a change breaks, and for whom; status 1 if it breaks something",
    )
    proto.add_argument("name", nargs="?", metavar="FILE", help="one file; by default all")
    message.add_argument("name", nargs="?", default="LogprobBatch", metavar="MESSAGE", help="LogprobBatch by default")
    diff.add_argument("old", metavar="OLD", help="the schema to compare with")
    diff.add_argument("new", nargs="?", default="installed", metavar="NEW", help="the new schema")
    diff.add_argument("--json", action="store_true", help="print one JSON document")
    proto.add_argument("--output", type=Path, metavar="FOLDER", help="the folder to write the files into")
    for each in (descriptor, message, channels):
        each.add_argument("--output", type=Path, metavar="PATH", help="the file to write")


def run(options: argparse.Namespace) -> int:
    schema = Schema.installed()
    match options.action:
        case "proto":
            _write_protos(options.name, options.output)
        case "descriptor":
            _write(schema.descriptor_set().SerializeToString(deterministic=True), options.output)
        case "json":
            name = options.name.removeprefix("tokenbus.v1.")
            if name not in schema.messages:
                raise CommandError(f"json: a message of the schema, got {name}", WRONG_USE)
            _write(_json(json_schema(schema, name)), options.output)
        case "asyncapi":
            _write(_json(asyncapi(schema)), options.output)
        case _:
            return _diff(_schema(options.old), _schema(options.new), as_json=options.json)
    return 0


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:
        output.write_bytes(data)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _write_protos(name: str | None, output: Path | None) -> None:
    files = {path: text for path, text in proto_files().items() if not name or f"/{path}".endswith(f"/{name}")}
    if not files:
        short = ", ".join(path.rpartition("/")[2] for path in proto_files())
        raise CommandError(f"proto: one of {short}, got {name}", WRONG_USE)
    if output is None:
        _write("\n".join(files.values()).encode(), None)
        return
    for path, text in files.items():
        target = output / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _diff(old: Schema, new: Schema, *, as_json: bool) -> int:
    found = changes(old, new)
    breaks = any(change.breaks for change in found)
    if as_json:
        print(json.dumps({"breaks": breaks, "changes": [change._asdict() for change in found]}, indent=2))
    else:
        print("\n".join(_lines(found)) or "the same schema")
    return int(breaks)


def _lines(found: list[Any]) -> Iterator[str]:
    for change in found:
        verdict = styled("breaks", "red") if change.breaks else styled("adds", "green") + "  "
        yield f"{verdict}  {printable(change.subject)}: {printable(change.sentence)}"


def _schema(name: str) -> Schema:
    if name == "installed":
        return Schema.installed()
    if not name or "\0" in name:
        raise CommandError("diff: expected a file or a folder, got an empty name or one with a null", WRONG_USE)
    path = Path(name)
    if path.is_dir():
        return _compiled(path)
    try:
        if path.exists() and not path.is_file():
            raise CommandError(f"{name}: neither a file nor a folder", WRONG_USE)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise CommandError(f"{name}: at most {_MOST_BYTES} bytes, got {size}", WRONG_USE)
        return _checked(name, path.read_bytes())
    except OSError as error:
        raise CommandError(f"{name}: {reason_of(error)}", WRONG_USE) from None


def _checked(name: str, data: bytes) -> Schema:
    try:
        files = FileDescriptorSet.FromString(data)
        pool = DescriptorPool()
        pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
        for file in files.file:
            if file.name != descriptor_pb2.DESCRIPTOR.name:
                pool.AddSerializedFile(file.SerializeToString())
    except (DecodeError, TypeError) as error:
        raise CommandError(f"{name}: not a valid FileDescriptorSet: {str(error).splitlines()[0]}", WRONG_USE) from None
    schema = Schema(files)
    if not schema.messages:
        raise CommandError(f"{name}: has no messages of the package tokenbus.v1", WRONG_USE)
    return schema


def _compiled(folder: Path) -> Schema:
    files = sorted(str(path.relative_to(folder)) for path in (folder / "tokenbus" / "v1").rglob("*.proto"))
    if not files:
        raise CommandError(f"{folder}: has no files tokenbus/v1/*.proto", WRONG_USE)
    command = [sys.executable, "-m", "grpc_tools.protoc"] if find_spec("grpc_tools") else [shutil.which("protoc") or ""]
    if not command[0]:
        raise CommandError(f"{folder}: needs protoc, or pip install 'tokenbus[schema]'", WRONG_USE)
    with tempfile.TemporaryDirectory() as temporary:
        image = Path(temporary, "image.binpb")
        command += ["--proto_path=.", f"--descriptor_set_out={image}", *files]
        compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - protoc
        if compiled.returncode:
            lines = [line for line in compiled.stderr.splitlines() if line and "warning:" not in line]
            raise CommandError(f"{folder}: {(lines or [f'protoc ended with {compiled.returncode}'])[0]}", WRONG_USE)
        return _checked(str(folder), image.read_bytes())

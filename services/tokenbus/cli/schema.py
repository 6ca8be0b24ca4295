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

from tokenbus.cli.errors import WRONG_USE, CommandError
from tokenbus.cli.terminal import styled
from tokenbus.printable import printable, reason_of
from tokenbus_contracts.published.asyncapi import asyncapi
from tokenbus_contracts.published.compatibility import changes
from tokenbus_contracts.published.descriptors import Schema, proto_files
from tokenbus_contracts.published.json_schema import json_schema

_DESCRIPTION = """\
Print the schema in another format, or compare two schemas.

  proto [FILE]        the .proto files, or one of them; with --output into a folder
  descriptor          a FileDescriptorSet with comments and imports
  json [MESSAGE]      the JSON Schema of a message in protobuf's JSON form (default: LogprobBatch)
  asyncapi            an AsyncAPI 3 document: channels, messages, bounds, examples
  diff OLD [NEW]      show what a change breaks, and for whom; status 1 if it breaks something

OLD and NEW are a FileDescriptorSet (from `tokenbus schema descriptor` or `buf build`), a folder of .proto files, or
`installed`, the schema of this version, which is the default of NEW.

examples:
  tokenbus schema proto --output proto              files from which protoc or buf generates code
  tokenbus schema descriptor > tokenbus-0.1.desc    the schema of one version
  tokenbus schema diff tokenbus-0.1.desc            later: the changes since then
"""
_MOST_BYTES = 16_777_216


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("form", choices=("proto", "descriptor", "json", "asyncapi", "diff"), help="what to print")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file, a message, or the schemas to compare")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the file to write, for proto a folder")
    parser.add_argument("--json", action="store_true", help="diff: print one JSON document")


def run(options: argparse.Namespace) -> int:
    if options.json and options.form != "diff":
        raise CommandError("--json: only with diff", WRONG_USE)
    if options.output and options.form == "diff":
        raise CommandError("--output: not with diff, which prints its result", WRONG_USE)
    most = {"proto": 1, "json": 1, "diff": 2}.get(options.form, 0)
    if len(options.names) > most:
        raise CommandError(f"{options.form}: at most {most} names, got {len(options.names)}", WRONG_USE)
    match options.form:
        case "proto":
            _write_protos(options.names, options.output)
        case "descriptor":
            _write(Schema.installed().descriptor_set().SerializeToString(deterministic=True), options.output)
        case "json":
            _write(_json(json_schema(Schema.installed(), _message(options.names))), options.output)
        case "asyncapi":
            _write(_json(asyncapi(Schema.installed())), options.output)
        case _:
            return _diff(options.names, as_json=options.json)
    return 0


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:
        output.write_bytes(data)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _write_protos(names: list[str], output: Path | None) -> None:
    files = proto_files()
    if names:
        chosen = {path: text for path, text in files.items() if path == names[0] or path.endswith(f"/{names[0]}")}
        if not chosen:
            short = ", ".join(path.rpartition("/")[2] for path in files)
            raise CommandError(f"proto: one of {short}, got {names[0]}", WRONG_USE)
        files = chosen
    if output is None:
        _write("\n".join(files.values()).encode(), None)
        return
    for path, text in files.items():
        target = output / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _message(names: list[str]) -> str:
    name = names[0].removeprefix("tokenbus.v1.") if names else "LogprobBatch"
    if name not in Schema.installed().messages:
        raise CommandError(f"json: a message of the schema, got {name}", WRONG_USE)
    return name


def _diff(names: list[str], *, as_json: bool) -> int:
    if not names:
        raise CommandError("diff: OLD is missing: the schema to compare with", WRONG_USE)
    old, new = (_schema(name) for name in (names[0], names[1] if len(names) > 1 else "installed"))
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

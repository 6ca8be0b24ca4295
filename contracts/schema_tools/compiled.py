"""The descriptors of the current schema, compiled by protoc, and of the released baseline."""

import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

REPOSITORY = Path(__file__).resolve().parents[2]


class Tree:
    """The folders and files of a checkout that the schema tools read and write."""

    def __init__(self, root: Path = REPOSITORY) -> None:
        self.root = root
        self.proto = root / "proto"
        """The folder with buf.yaml, from which imports in .proto files start."""
        self.generated = root / "contracts" / "tokenbus_contracts" / "generated"
        self.vectors = root / "contracts" / "vectors" / "v1"
        self.baseline = root / "contracts" / "baseline" / "v1.binpb"
        """The descriptor image of the last released schema."""

    @cached_property
    def compiled(self) -> list[FileDescriptorProto]:
        """The descriptors of the schema's files with their comments, compiled once."""
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder, "image.binpb")
            protoc(self, f"--descriptor_set_out={image}", "--include_source_info")
            return list(FileDescriptorSet.FromString(image.read_bytes()).file)


class SchemaError(Exception):
    """Raised when a schema tool fails. The message states the reason."""


def protoc(tree: Tree, *outputs: str) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={tree.proto}"),
            *outputs,
            *(str(path) for path in sorted(tree.proto.glob("tokenbus/v1/*.proto"))),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise SchemaError(run.stderr.strip())


def baseline(tree: Tree) -> list[FileDescriptorProto]:
    """Return the descriptors of the last released schema, or an empty list before the first release."""
    image = tree.baseline.read_bytes() if tree.baseline.exists() else b""
    return list(FileDescriptorSet.FromString(image).file)


def write_baseline(tree: Tree) -> None:
    """Write the current schema as the baseline for later changes."""
    tree.baseline.parent.mkdir(parents=True, exist_ok=True)
    image = FileDescriptorSet(file=tree.compiled)
    for file in image.file:
        file.ClearField("source_code_info")
    tree.baseline.write_bytes(image.SerializeToString(deterministic=True))

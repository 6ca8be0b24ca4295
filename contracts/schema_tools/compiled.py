"""The descriptors of the schema as protoc compiles it, and of the released baseline."""

import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

REPOSITORY = Path(__file__).resolve().parents[2]


class Tree:
    """The folders and files of one checkout (or of a copy) that the schema tools read and write."""

    def __init__(self, root: Path = REPOSITORY) -> None:
        self.root = root
        self.proto = root / "proto"
        """The folder that imports in .proto files start from; it also has buf.yaml."""
        self.generated = root / "contracts" / "tokenbus_contracts" / "generated"
        self.vectors = root / "contracts" / "vectors" / "v1"
        self.baseline = root / "contracts" / "baseline" / "v1.binpb"
        """The image of the last released schema."""

    @cached_property
    def compiled(self) -> list[FileDescriptorProto]:
        """The schema's files with their comments, compiled once."""
        with tempfile.TemporaryDirectory() as folder:
            image = Path(folder, "image.binpb")
            protoc(self, f"--descriptor_set_out={image}", "--include_source_info")
            return list(FileDescriptorSet.FromString(image.read_bytes()).file)


class SchemaError(Exception):
    """A schema tool cannot go on; the message says why."""


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
    """Return the schema's files as they were last released; none before the first release."""
    image = tree.baseline.read_bytes() if tree.baseline.exists() else b""
    return list(FileDescriptorSet.FromString(image).file)


def write_baseline(tree: Tree) -> None:
    """Make the current schema the baseline for later changes."""
    tree.baseline.parent.mkdir(parents=True, exist_ok=True)
    image = FileDescriptorSet(file=tree.compiled)
    for file in image.file:
        file.ClearField("source_code_info")
    tree.baseline.write_bytes(image.SerializeToString(deterministic=True))

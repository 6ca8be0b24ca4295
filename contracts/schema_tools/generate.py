"""Generates protoc's classes and stubs, Python enums, and descriptors with comments from the schema."""

import re
import shutil
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet, SourceCodeInfo

from schema_tools.compiled import Tree, protoc
from tokenbus_contracts.published.descriptors import Schema
from tokenbus_contracts.schema import DTYPES

BANNER = "# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.\n"

_PACKAGE = "tokenbus_contracts.generated"


def generated_files(tree: Tree) -> dict[str, bytes]:
    """Return the contents of all generated files by file name."""
    contract = Schema(FileDescriptorSet(file=[each for each in tree.compiled if each.name.endswith("batch.proto")]))
    files = {"__init__.py": f'{BANNER}"""Code generated from the schema."""\n', **_classes(tree)}
    files |= {"enums.py": _enums(contract), "columns.py": _columns(contract)}
    return {name: text.encode() for name, text in files.items()} | {"schema.binpb": _described(tree)}


def write_generated(tree: Tree) -> list[str]:
    """Write the generated files, remove all other files, and return the names of the changed files."""
    files = generated_files(tree)
    tree.generated.mkdir(parents=True, exist_ok=True)
    changed = _stale(tree, files)
    for name in changed:
        path = tree.generated / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if name in files:
            path.write_bytes(files[name])
    return changed


def stale_files(tree: Tree) -> list[str]:
    """Return the names of files in the generated folder that are outdated, missing or not generated."""
    return _stale(tree, generated_files(tree))


def _stale(tree: Tree, files: dict[str, bytes]) -> list[str]:
    # The folder contains only generated files, because any other file would be shipped unchecked.
    entries = tree.generated.iterdir() if tree.generated.is_dir() else ()
    present = {
        path.name: path.read_bytes() if path.is_file() else None for path in entries if path.name != "__pycache__"
    }
    return sorted(
        name
        for name in files.keys() | present.keys()
        if name not in present or name not in files or files[name] != present[name]
    )


def _described(tree: Tree) -> bytes:
    """Return the schema's descriptors with their leading comments, without line numbers."""
    files = FileDescriptorSet(file=tree.compiled)
    for file in files.file:
        commented = [
            SourceCodeInfo.Location(path=each.path, leading_comments=" ".join(each.leading_comments.split()))
            for each in file.source_code_info.location
            if each.leading_comments
        ]
        file.source_code_info.CopyFrom(SourceCodeInfo(location=commented))
    return files.SerializeToString(deterministic=True)


def _classes(tree: Tree) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        protoc(tree, f"--python_out={folder}", f"--pyi_out={folder}")
        texts = {path.name: path.read_text() for path in sorted(Path(folder).rglob("*.py*"))}
    # protoc writes imports from tokenbus.v1, but the modules are in the generated package.
    return {
        name: BANNER + re.sub(r"^from tokenbus\.v1 import", f"from {_PACKAGE} import", text, flags=re.MULTILINE)
        for name, text in texts.items()
    }


def _columns(contract: Schema) -> str:
    """Return the module that declares the columns of LogprobBatch as constructor arguments and as attributes."""
    given, arrays, names = [], [], []
    for field in contract.messages["LogprobBatch"].fields:
        if field.bounds.length:
            name, comment = field.proto.name, f'    """{field.comment}"""'
            given += [f"    {name}: npt.ArrayLike", comment]
            arrays += [f"    {name}: npt.NDArray[np.{DTYPES[field.proto.type].name}]", comment]
            names.append(name)
    return "\n".join(
        [
            BANNER + '"""The columns of a LogprobBatch: the arguments of its constructor, and its attributes."""\n',
            "from typing import TypedDict\n\nimport numpy as np\nimport numpy.typing as npt\n\n",
            'class ColumnArguments(TypedDict, total=False):\n    """The columns as a caller gives them."""\n',
            *given,
            '\n\nclass ColumnArrays:\n    """The columns as arrays."""\n',
            f"    __slots__ = {tuple(names)!r}\n",
            *arrays,
            "",
        ]
    )


def _enums(contract: Schema) -> str:
    """Return the enums of the data contract as IntEnums with the schema's comments."""
    lines = [BANNER + '"""The data contract\'s enums."""\n', "from enum import IntEnum"]
    for enum in contract.enums.values():
        lines.append(f'\n\nclass {enum.name}(IntEnum):\n    """{enum.comment}"""\n')
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
        for value, comment in enum.values:
            lines += [f"    {value.name.removeprefix(prefix)} = {value.number}", f'    """{comment}"""']
    return "\n".join(lines) + "\n"

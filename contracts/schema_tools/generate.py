"""The files generated from the schema: protoc's classes and stubs, Python enums, and descriptors with comments."""

import re
import shutil
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, SourceCodeInfo

from schema_tools.compiled import Tree, protoc
from tokenbus_contracts.published.descriptors import comments_in, messages_in
from tokenbus_contracts.schema import DTYPES, bounds_in

BANNER = "# Generated from proto/tokenbus/v1 by `make proto`. Do not edit: CI refuses a stale or edited copy.\n"

_PACKAGE = "tokenbus_contracts.generated"
# The numbers of enums, their values and fields in a descriptor, which lead to their comments.
_ENUM_PATH, _VALUE_PATH, _FIELD_PATH = 5, 2, 2


def generated_files(tree: Tree) -> dict[str, bytes]:
    """Return the files of the generated folder: contents by name."""
    files = {"__init__.py": f'{BANNER}"""Code generated from the schema."""\n'}
    files.update(_classes(tree))
    files["enums.py"] = _enums(_contract(tree))
    files["columns.py"] = _columns(_contract(tree))
    return {name: text.encode() for name, text in files.items()} | {"schema.binpb": _described(tree)}


def write_generated(tree: Tree) -> list[str]:
    """Write the generated files, remove all others, and return the names that changed."""
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
    """Return the names of outdated, missing and foreign files in the generated folder."""
    return _stale(tree, generated_files(tree))


def _stale(tree: Tree, files: dict[str, bytes]) -> list[str]:
    # The folder is flat and holds nothing else: any other file or folder would be shipped unchecked.
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
        commented = [each for each in file.source_code_info.location if each.leading_comments]
        file.source_code_info.CopyFrom(
            SourceCodeInfo(
                location=[
                    SourceCodeInfo.Location(path=each.path, leading_comments=" ".join(each.leading_comments.split()))
                    for each in commented
                ]
            )
        )
    return files.SerializeToString(deterministic=True)


def _classes(tree: Tree) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        protoc(tree, f"--python_out={folder}", f"--pyi_out={folder}")
        return {path.name: BANNER + _relocate(path.read_text()) for path in sorted(Path(folder).rglob("*.py*"))}


def _relocate(text: str) -> str:
    """Let the classes import one another from this package."""
    return re.sub(r"^from tokenbus\.v1 import", f"from {_PACKAGE} import", text, flags=re.MULTILINE)


def _contract(tree: Tree) -> FileDescriptorProto:
    return next(file for file in tree.compiled if file.name.endswith("logprob_batch.proto"))


def _columns(contract: FileDescriptorProto) -> str:
    """Return the columns of LogprobBatch, as the arguments of its constructor and as its attributes."""
    comments = comments_in(contract)
    path, message = next((path, message) for name, path, message in messages_in(contract) if name == "LogprobBatch")
    given, arrays, names = [], [], []
    for place, field in enumerate(message.field):
        if bounds_in(field.options).length:
            comment = f'    """{comments[(*path, _FIELD_PATH, place)]}"""'
            given += [f"    {field.name}: npt.ArrayLike", comment]
            arrays += [f"    {field.name}: npt.NDArray[np.{DTYPES[field.type].name}]", comment]
            names.append(field.name)
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


def _enums(contract: FileDescriptorProto) -> str:
    """Return the enums of the data contract, which users handle, as IntEnums with the schema's comments."""
    comments = comments_in(contract)
    lines = [BANNER + '"""The data contract\'s enums."""\n', "from enum import IntEnum"]
    for index, enum in enumerate(contract.enum_type):
        lines.append(f'\n\nclass {enum.name}(IntEnum):\n    """{comments[_ENUM_PATH, index]}"""\n')
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
        for place, value in enumerate(enum.value):
            lines.append(f"    {value.name.removeprefix(prefix)} = {value.number}")
            lines.append(f'    """{comments[_ENUM_PATH, index, _VALUE_PATH, place]}"""')
    return "\n".join(lines) + "\n"

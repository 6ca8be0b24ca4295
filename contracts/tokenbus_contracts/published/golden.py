"""The golden messages, with the result that every reader of the contract must produce."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenbus_contracts.published.descriptors import PACKAGE


class GoldenMessage(NamedTuple):
    """A golden message, with the result that every reader of the contract must produce."""

    name: str
    """The name of the message, such as `valid/two_rows`."""
    data: bytes
    """The encoded message."""
    expected: dict[str, Any]
    """The header and columns of a valid message, or the error's field, rule, limit and value for an invalid message."""

    @property
    def is_valid(self) -> bool:
        """Whether a reader must accept the message."""
        return self.name.startswith("valid/")


def golden_messages() -> Iterator[GoldenMessage]:
    """Yield all golden messages, valid and invalid, in the order of their names.

    Example:
        for message in tokenbus.testing.golden_messages():
            if message.is_valid:
                tokenbus.decode(message.data, tokenbus.Limits.schema())
    """
    # An installed package and a clone have the golden messages in different folders.
    folder = next(each for each in (PACKAGE / "vectors", PACKAGE.parent / "vectors" / "v1") if each.is_dir())
    for path in sorted(folder.glob("*valid/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        yield GoldenMessage(name, path.with_suffix(".binpb").read_bytes(), json.loads(path.read_bytes()))

"""The golden messages: what every reader of the contract must say of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenbus_contracts.published.descriptors import PACKAGE


class GoldenMessage(NamedTuple):
    """A message of the contract's golden ones, and what a reader of it must say."""

    name: str
    """As `valid/two_rows`."""
    data: bytes
    """The message."""
    expected: dict[str, Any]
    """Of a valid one, its header and columns; of another, the field, rule, limit and value that it is refused for."""

    @property
    def is_valid(self) -> bool:
        """Whether a reader must take it."""
        return self.name.startswith("valid/")


def golden_messages() -> Iterator[GoldenMessage]:
    """Yield every golden message, valid and invalid, in the order of their names.

    Example:
        for message in tokenbus.testing.golden_messages():
            if message.is_valid:
                tokenbus.decode(message.data, tokenbus.Limits.schema())
    """
    for path in sorted(_golden_folder().glob("*valid/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        yield GoldenMessage(name, path.with_suffix(".binpb").read_bytes(), json.loads(path.read_bytes()))


def _golden_folder() -> Path:
    """Return where the golden messages are: in the package, or in a clone beside it."""
    return next(each for each in (PACKAGE / "vectors", PACKAGE.parent / "vectors" / "v1") if each.is_dir())

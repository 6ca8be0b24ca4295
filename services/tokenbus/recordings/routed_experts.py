"""RoutedExperts: locates an array in a file of an engine, and reads and checks the array."""

import os
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenbus.recordings.items import RecordingError
from tokenbus_contracts.generated import request_pb2

_TYPES = ("uint8", "uint16", "uint32", "int16", "int32")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that computed a request's tokens, as an array in a file."""

    file: str
    """The name of the file in the engine's folder."""
    offset: int
    length: int
    """The size of the array, in bytes."""
    dtype: str
    shape: tuple[int, ...]
    """The number of tokens, of layers, and of experts per token in each layer."""
    position: int
    """The position of the first row's token in the branch."""
    digest: str
    """The SHA-256 of the array."""

    @classmethod
    def of(cls, event: request_pb2.RoutedExperts) -> "RoutedExperts":
        """Return the location of the array that an event names."""
        return cls(
            file=event.file,
            offset=event.offset,
            length=event.length,
            dtype=event.dtype,
            shape=tuple(event.shape),
            position=event.position,
            digest=event.digest.hex(),
        )

    def read(self, folder: str | os.PathLike[str]) -> npt.NDArray[Any]:
        """Read the array from its file in a folder.

        Raises:
            OSError: the file cannot be read, for example because it was removed.
            RecordingError: the file does not have this array.
        """
        path = Path(folder, self.file)
        size = prod(self.shape) * np.dtype(self.dtype).itemsize if self.dtype in _TYPES else None
        if self.file != path.name or size != self.length:  # both come from another process, and may be wrong
            raise self._error("not the place of an array", self.file)
        with path.open("rb") as file:
            there = max(0, os.fstat(file.fileno()).st_size - self.offset)
            if there < self.length:
                raise self._error(f"an array of {self.length} bytes, got {there}", str(path))
            file.seek(self.offset)
            data = file.read(self.length)
        if (digest := sha256(data).hexdigest()) != self.digest:
            raise self._error(f"an array with the SHA-256 {self.digest}, got {digest}", str(path))
        return np.frombuffer(data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)

    def _error(self, reason: str, file: str) -> RecordingError:
        return RecordingError(self.offset, reason, file)

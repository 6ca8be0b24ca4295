"""Routed experts: writes an array of experts for each request of a session, and publishes the array's file and offset.

With `--enable-return-routed-experts`, vLLM returns an array for each request. The array contains the experts that
computed each token except the last one, in each layer. vLLM may return the array in several parts.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from tokenbus.engines.vllm.columns import Rows
from tokenbus.logs import DeduplicatedLog, logger
from tokenbus.settings import Settings
from tokenbus.settings.sections import WorkerSettings
from tokenbus_contracts import RowStatus
from tokenbus_contracts.generated.request_pb2 import Generate, RequestEvent, RoutedExperts

_FOLDER = "worker.routed_experts_folder"
_OPTION = "--enable-return-routed-experts"
_ANY_EPOCH = "[0-9a-f]" * 16
"""Pattern that matches any incarnation in a file's name."""
_FILE_BYTES = 1 << 26
"""Size in bytes at which a file is full, and the next file begins."""
_STOP, _LENGTH = int(RowStatus.FINISHED_STOP), int(RowStatus.FINISHED_LENGTH)
_log = logger("worker")


def returns_routed_experts(config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether vLLM's options turn routed experts on."""
    # Before vLLM 0.32, the option belonged to the model's configuration.
    owner = getattr(config, "aux_output_config", config.model_config)
    return bool(getattr(owner, "enable_return_routed_experts", False))


def check_routed_experts(config: Any, settings: Settings) -> None:  # noqa: ANN401 - as above
    """Raise ValueError if a folder for routed experts is set, but vLLM returns no routed experts."""
    folder = settings.worker.routed_experts_folder
    if folder and not returns_routed_experts(config):
        raise ValueError(f"{_FOLDER}: only with vLLM's {_OPTION}, got {folder}")


def refuse_routed_experts(config: Any) -> None:  # noqa: ANN401 - as above
    """Raise ValueError if vLLM returns routed experts, which the engine vllm does not publish."""
    if returns_routed_experts(config):
        raise ValueError(f"{_OPTION}: only with vLLM's own server and Tokenbus's scheduler, got it with this engine")


class Spool:
    """Appends arrays to files in a folder, up to a limit on their total size. Readers remove the files."""

    def __init__(self, settings: WorkerSettings, epoch: int) -> None:
        """Create the folder and the first file, or raise ValueError."""
        self._folder = Path(settings.routed_experts_folder)
        self._most = settings.routed_experts_bytes
        self._worker = quote(settings.id, safe="")
        self._epoch = epoch
        self._number = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            self._used = self._measured()
        except OSError as error:
            raise ValueError(f"{_FOLDER}: a folder in which files can be made, got {error}") from None

    def append(self, data: bytes | bytearray) -> tuple[str, int]:
        """Append an array, and return its file's name and its offset. Raises OSError, for example at the size limit."""
        if self._used + len(data) > self._most:
            self._used = self._measured()  # readers may have removed files
        if self._used + len(data) > self._most:
            raise OSError(errno.ENOSPC, f"{self._used} of {self._most} bytes (worker.routed_experts_bytes) are in use")
        with self._path.open("ab") as file:
            name, offset = self._path.name, file.tell()
            file.write(data)
        self._used += len(data)
        if offset + len(data) >= _FILE_BYTES:
            self._number += 1
        return name, offset

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._worker}.{self._epoch:016x}.{self._number}.experts"

    def _measured(self) -> int:
        """Return the total size of this worker's files, including files of earlier incarnations."""
        size = 0
        # Another worker's id may begin with this worker's id and a dot.
        for path in self._folder.glob(f"{self._worker}.{_ANY_EPOCH}.*.experts"):
            with suppress(FileNotFoundError):  # a reader has just removed the file
                size += path.stat().st_size
        return size


class _Request:
    """The received part of an open request's array, with one row per token."""

    def __init__(self, session: Generate, first_row: int) -> None:
        self.request_id = session.request_id
        self.prompt_tokens = len(session.tokens.token_ids)
        self.position = min(first_row, self.prompt_tokens)
        """Index of the first row's token, counted from the start of the prompt."""
        self.data = bytearray()  # copied, because a part is a view of a larger array
        self.dtype = np.dtype(np.uint8)
        self.shape: tuple[int, ...] = (0, 0)
        """Number of layers, and number of experts per layer and token."""
        self.last_tokens = 0
        """Number of tokens in vLLM's last output."""

    def add(self, output: Any) -> None:  # noqa: ANN401 - vLLM's EngineCoreOutput
        self.last_tokens = len(output.new_token_ids)
        if (part := output.routed_experts) is not None:
            self.dtype, self.shape = part.dtype, part.shape[1:]
            self.data += part.tobytes()

    def complete(self, tokens: int, last_tokens: int) -> int:
        """Return a request's number of rows. `tokens` counts its output tokens, `last_tokens` only its last step's.

        Removes rows of tokens that a stop string cut off. Raises ValueError if vLLM returned another number of rows.
        """
        rows = max(0, self.prompt_tokens + tokens - 1 - self.position)
        row_bytes = self.dtype.itemsize * int(np.prod(self.shape))
        returned, expected = len(self.data) // max(1, row_bytes), rows + self.last_tokens - last_tokens
        if returned != expected:
            raise ValueError(f"vLLM returned {returned} rows instead of {expected}")
        del self.data[rows * row_bytes :]
        return rows


class SessionExperts:
    """Collects the routed experts of all open requests that belong to sessions."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._requests: dict[str, _Request] = {}
        """Open requests, with vLLM's names of the requests as keys."""
        self._repeated_log = DeduplicatedLog()

    def add(self, name: str, session: Generate, sampling: Any) -> None:  # noqa: ANN401 - vLLM's SamplingParams
        """Add a new request."""
        self._requests[name] = _Request(session, getattr(sampling, "routed_experts_prompt_start", 0))

    def remove(self, names: Iterable[str]) -> None:
        """Remove requests that vLLM has ended. Unknown names are ignored."""
        for name in names:
            self._requests.pop(name, None)

    def collect(self, outputs: Iterable[Any]) -> None:
        """Append the rows that vLLM returned with a step's outputs to the arrays of the requests."""
        for output in outputs:
            if output.request_id in self._requests:
                self._requests[output.request_id].add(output)

    def ended(self, rows: Rows) -> Iterator[RequestEvent]:
        """Write the arrays of the requests that a step completes, and yield an event for each request."""
        places = np.flatnonzero((rows.statuses == _STOP) | (rows.statuses == _LENGTH))
        if not places.size:
            return
        place_of = dict(zip(rows.request_ids[places].tolist(), places.tolist(), strict=True))
        for name in [name for name, request in self._requests.items() if request.request_id in place_of]:
            request = self._requests.pop(name)
            place = place_of[request.request_id]
            written = self._written(request, int(rows.positions[place]), int(rows.token_counts[place]))
            yield RequestEvent(routed_experts=written)

    def _written(self, request: _Request, position: int, last_tokens: int) -> RoutedExperts:
        """Write a request's array, and return the event, which contains the reason if writing fails."""
        try:
            rows = request.complete(position + last_tokens, last_tokens)
            file, offset = self._spool.append(request.data)
        except (ValueError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            name = f"{request.request_id:016x}"
            self._repeated_log.begin("lost", _log.error, "routed experts lost", request=name, reason=reason)
            return RoutedExperts(request_id=request.request_id, missing=reason)
        return RoutedExperts(
            request_id=request.request_id,
            file=file,
            offset=offset,
            length=len(request.data),
            dtype=request.dtype.name,
            shape=(rows, *request.shape),
            position=request.position,
            digest=sha256(request.data).digest(),
        )

"""Dead letters: refused messages, kept in a bounded folder for people to look at."""

import json
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tokenbus_contracts import ContractError, Rule
from tokenbus_services.logs import DeduplicatedLog, logger
from tokenbus_services.logs.values import safe_text
from tokenbus_services.settings import DeadLetterSettings

_log = logger("processor")
_MESSAGE, _NOTE, _PART = ".binpb", ".json", ".part"
# Each message that is found must have its note, so the message comes last and goes first.
_SUFFIXES = (_MESSAGE, _NOTE, _MESSAGE + _PART, _NOTE + _PART)
_NAME = re.compile(r"([0-9]{8}T[0-9]{6}\.[0-9]{6}Z-([0-9]{8,18})-[a-z]+)\.(?:binpb|json)(?:\.part)?")


class DeadLetters:
    """Counts every refused message, and keeps as many as the folder and the rate allow.

    A message is kept as it came, for `tokenbus check`; the note beside it says why it was refused, which may also be
    for what came before it. Nothing here ever raises because of the disk.
    """

    def __init__(
        self,
        settings: DeadLetterSettings,
        *,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without touching the disk; `wall` dates letters, `now` measures their rate, both in seconds."""
        self._settings = settings
        self._folder = _Folder(Path(settings.directory), settings.max_files, settings.max_bytes)
        self._wall = wall
        self._now = now
        self._repeated_log = DeduplicatedLog(now=now)
        self._tries: deque[float] = deque(maxlen=settings.per_second)
        self.kept = 0
        self.dropped = 0
        """How many were only counted: too large, too many in a second, or not to be written."""
        self.by_rule: dict[str, int] = {}

    def keep(self, payload: bytes, error: ContractError, stream: str, sequence: int = 0) -> None:
        """Count a refused message, and write it down if it may be; zero is no sequence."""
        rule = str(error.rule)
        self.by_rule[rule] = self.by_rule.get(rule, 0) + 1
        if self._is_kept(payload, error, stream, sequence):
            self.kept += 1
        else:
            self.dropped += 1

    def _is_kept(self, payload: bytes, error: ContractError, stream: str, sequence: int) -> bool:
        now = self._now()
        if len(self._tries) == self._tries.maxlen and now - self._tries[0] < 1:
            return False
        when = datetime.fromtimestamp(self._wall(), UTC)
        note = _note(payload, error, stream, sequence, when)
        if len(payload) + len(note) > self._settings.max_bytes:
            return False
        self._tries.append(now)
        try:
            self._folder.put(payload, note, when, error.rule)
        except (OSError, ValueError) as failure:  # a ValueError is a directory with a NUL in its name
            event = "dead letters cannot be written"
            self._repeated_log.begin(
                event, _log.warning, event, directory=self._settings.directory, reason=str(failure)
            )
            return False
        # Not `end`: a disk that is full for large letters alone would have two lines for each of them.
        self._repeated_log.expire()
        return True


class _Folder:
    """Letters in a directory, at most so many and so many bytes; the oldest go first. Other files are left alone."""

    def __init__(self, path: Path, most: int, most_bytes: int) -> None:
        self._path = path
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self._number = 0
        self._is_known = False

    def put(self, payload: bytes, note: bytes, when: datetime, rule: Rule) -> None:
        """Write a letter, or raise an OSError and leave nothing of it that is not counted."""
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_known:
            self._look()
        most_bytes = self._most_bytes - len(payload) - len(note)
        while self._sizes and (len(self._sizes) >= self._most or self._bytes > most_bytes):
            self._remove(next(iter(self._sizes)))
        self._number += 1
        name = f"{when:%Y%m%dT%H%M%S.%fZ}-{self._number:08}-{rule}"
        try:
            self._write(name, _NOTE, note)
            self._write(name, _MESSAGE, payload)
        except OSError:
            with suppress(OSError):
                self._remove(name)
            raise

    def _look(self) -> None:
        """Count what earlier runs left, and go on from their numbers: a clock that is set back changes no order."""
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # an operator may have removed it
                        found.append((int(match[2]), match[1], entry.stat(follow_symlinks=False).st_size))
        for number, name, size in sorted(found):
            self._count(name, size)
            self._number = number
        self._is_known = True

    def _write(self, name: str, suffix: str, data: bytes) -> None:
        # Nothing is synced: a power cut may cost a letter, where a sync would cost every request milliseconds.
        part = self._path / f"{name}{suffix}{_PART}"
        # For its owner alone: a message holds prompts or answers, and a refused hello a proof.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._count(name, len(data))
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        part.rename(self._path / f"{name}{suffix}")

    def _count(self, name: str, size: int) -> None:
        self._sizes[name] = self._sizes.get(name, 0) + size
        self._bytes += size

    def _remove(self, name: str) -> None:
        for suffix in _SUFFIXES:
            (self._path / f"{name}{suffix}").unlink(missing_ok=True)
        self._bytes -= self._sizes.pop(name, 0)


def _note(payload: bytes, error: ContractError, stream: str, sequence: int, when: datetime) -> bytes:
    """Return the note beside a message as JSON; integers of 64 bits are text, as in `tokenbus check --json`."""
    note = {
        "stream": safe_text(stream),
        "sequence": str(sequence),
        "time": f"{when:%Y-%m-%dT%H:%M:%S.%fZ}",
        "field": safe_text(error.field),
        "rule": str(error.rule),
        "limit": _shown(error.limit),
        "actual": _shown(error.actual),
        "error": _shown(error),
        "bytes": len(payload),
    }
    return (json.dumps(note, indent=2) + "\n").encode()


def _shown(value: object) -> str:
    try:
        return safe_text(str(value))
    except ValueError:  # an integer of thousands of digits
        return "a number of too many digits to print"

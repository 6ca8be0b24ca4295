"""The options and the queue id from the engine's environment."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenbus.engines.fastdeploy import native
from tokenbus.engines.fastdeploy_switch import SWITCH, read_switch
from tokenbus.settings import ENTRIES, Settings, SettingsError
from tokenbus_contracts import Limits, SpeculativeMethod, ValueKind

_QUEUE, _MESSAGE = "INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"
_MOST = 2**31 - 1
_RESERVED = 2
_IPC = "ipc://"
_MOST_PATH = 96
"""Maximum number of bytes of a queue's path.

A Unix socket's path has at most 107 bytes, and the path of an id's second queue is 11 bytes longer.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options that FastDeploy does not pass to the ops."""

    settings: Settings | None = None
    """Settings, or None to read the environment."""
    form: str | None = None
    """Name of a form in `forms.FORMS`. If None, the environment or the installed FastDeploy decides."""
    method: SpeculativeMethod = SpeculativeMethod.MTP
    """Speculative method in the published steps, because the save ops do not report a method."""
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """Kind of the engine's logprobs, as the published steps report it."""


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment selects FastDeploy's own ops."""
    found = environment.get(SWITCH, "on")
    is_on, fault = read_switch(found)
    if fault:
        raise SettingsError(SWITCH, "on or off", found)
    return not is_on


def queue_id(environment: Mapping[str, str] | None = None) -> int:
    """Return the id of this process's queue. Each data-parallel rank has its own queue."""
    return _whole(_QUEUE, environment, 0)


def message_id(environment: Mapping[str, str] | None = None) -> int:
    """Return the number that messages carry as their stop flag. The negated number means that no work remains."""
    found = _whole(_MESSAGE, environment, 1)
    if found == _RESERVED:
        raise SettingsError(_MESSAGE, "any number except 2, which means that nothing was read", found)
    return found


def queue_path(settings: Settings, queue: int) -> str:
    """Return the path of a queue's socket. If the bus's address is a path, the socket's path begins with it."""
    address = settings.bus.workers_address
    if is_published(settings) and address.startswith(_IPC):
        setting, path = "bus.workers_address", f"{address.removeprefix(_IPC)}.queue-{queue}"
    else:
        folder = Path(tempfile.gettempdir()) / f"tokenbus-{os.getuid()}"
        _make_private(folder)
        setting, path = "TMPDIR", str(folder / f"fastdeploy-{queue}")
    if len(os.fsencode(path)) > _MOST_PATH:
        raise SettingsError(setting, f"at most {_MOST_PATH} bytes for the path of the queue's socket", path)
    return path


def is_published(settings: Settings) -> bool:
    """Return whether messages also go to a processor, whose address must be set."""
    return bool(settings.bus.workers_address != ENTRIES["bus.workers_address"].default)


def settings_for(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return Tokenbus's settings, with defaults that suit this engine."""
    found = Settings.load(environment=environment)
    here: dict[str, object] = {
        "worker.id": f"fastdeploy-{queue_id(environment)}",
        "worker.max_requests": 0,  # requests still reach the engine through FastDeploy
        "limits.max_rows": Limits.schema().max_rows,  # a step has extra rows for ended requests
    }
    overrides = {key: value for key, value in here.items() if ENTRIES[key].value_in(found) == ENTRIES[key].default}
    return Settings.load(environment=environment, overrides=overrides)


def _make_private(folder: Path) -> None:
    """Make a folder that only this user may write to, because anyone can guess the folder's name."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not folder.is_dir() or folder.is_symlink():
        raise SettingsError("TMPDIR", "a folder in which our subfolder belongs only to this user", str(folder))


def _whole(name: str, environment: Mapping[str, str] | None, least: int) -> int:
    if environment is None:  # reading os.environ would cost each call of an op some microseconds
        found: int = native.library().number(name.encode(), 1)
        if found >= least:
            return found
        environment = os.environ
    given = environment.get(name, "1")
    if not (given.isascii() and given.isdigit() and least <= int(given[:11]) <= _MOST):
        raise SettingsError(name, f"a whole number from {least} to {_MOST}", given)
    return int(given)

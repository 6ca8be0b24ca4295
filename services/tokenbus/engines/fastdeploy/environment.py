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
"""The maximum number of bytes of a queue's path.

A Unix socket's path has at most 107, and the name of the other queue with the same id is 11 bytes longer.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Options that the engine's ops do not pass."""

    settings: Settings | None = None
    """The settings; None: read from the environment."""
    form: str | None = None
    """The form of the ops, a name in `forms.FORMS`; None: the environment's, or else the installed FastDeploy's."""
    method: SpeculativeMethod = SpeculativeMethod.MTP
    """The speculative method, for the bus: the save ops are the same for all methods."""
    value_kind: ValueKind = ValueKind.RAW_LOGPROBS
    """The kind of the engine's logprobs, for the bus."""


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the engine's own ops are to be used again."""
    found = environment.get(SWITCH, "on")
    is_on, fault = read_switch(found)
    if fault:
        raise SettingsError(SWITCH, "on or off", found)
    return not is_on


def queue_id(environment: Mapping[str, str] | None = None) -> int:
    """Return the id of this process's queue; each data-parallel rank has its own queue."""
    return _whole(_QUEUE, environment, 0)


def message_id(environment: Mapping[str, str] | None = None) -> int:
    """Return a message's stop flag for "more work to do"; a negative flag means that there is none."""
    found = _whole(_MESSAGE, environment, 1)
    if found == _RESERVED:
        raise SettingsError(_MESSAGE, "any number except 2, which means that nothing was read", found)
    return found


def queue_path(settings: Settings, queue: int) -> str:
    """Return the path at which the get side of a queue listens: next to the bus's address, if that is set to a path."""
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
    """Return whether messages also go to a processor: they do if its address is set."""
    return bool(settings.bus.workers_address != ENTRIES["bus.workers_address"].default)


def settings_for(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return Tokenbus's settings; settings that are not set get values that suit this engine."""
    found = Settings.load(environment=environment)
    here: dict[str, object] = {
        "worker.id": f"fastdeploy-{queue_id(environment)}",
        "worker.max_requests": 0,  # requests still reach the engine through FastDeploy
        "limits.max_rows": Limits.schema().max_rows,  # ended requests have rows in addition to the slots'
    }
    overrides = {key: value for key, value in here.items() if ENTRIES[key].value_in(found) == ENTRIES[key].default}
    return Settings.load(environment=environment, overrides=overrides)


def _make_private(folder: Path) -> None:
    """Make the folder. Only this user may write to it, because anyone can guess its name."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not folder.is_dir() or folder.is_symlink():
        raise SettingsError("TMPDIR", "a folder in which our subfolder belongs only to this user", str(folder))


def _whole(name: str, environment: Mapping[str, str] | None, least: int) -> int:
    if environment is None:  # this runs at each call of an op, and os.environ would take microseconds
        found: int = native.library().number(name.encode(), 1)
        if found >= least:
            return found
        environment = os.environ
    given = environment.get(name, "1")
    if not (given.isascii() and given.isdigit() and least <= int(given[:11]) <= _MOST):
        raise SettingsError(name, f"a whole number from {least} to {_MOST}", given)
    return int(given)

"""What the engine's environment says: which queue it means, and so where on this bus its messages go."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tokenbus_contracts import Limits
from tokenbus_services.settings import Settings, SettingsError
from tokenbus_services.settings.entries import ENTRIES

_QUEUE, _MESSAGE = "INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"
_MOST = 2**31 - 1
_RESERVED = 2
_LONGEST_REQUEST_MS = 86_400_000


def queue_id(environment: Mapping[str, str] = os.environ) -> int:
    """Return which queue this process means; each data-parallel rank has one of its own."""
    return _whole(_QUEUE, environment, least=0)


def message_id(environment: Mapping[str, str] = os.environ) -> int:
    """Return the stop flag of a message when there is something left to do; it is negative when there is not."""
    found = _whole(_MESSAGE, environment, least=1)
    if found == _RESERVED:
        raise SettingsError(_MESSAGE, "another number than 2, which says that nothing was read", found)
    return found


def settings_for(rank: int, environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of Tokenbus, where they are not set with what the engine's queue means here."""
    queue = queue_id(environment)
    found = Settings.load(environment=environment)
    folder = Path(tempfile.gettempdir()) / f"tokenbus-{os.getuid()}"
    here: dict[str, object] = {
        "bus.workers_address": f"ipc://{folder}/fastdeploy-{queue}.workers",
        "bus.clients_address": f"ipc://{folder}/fastdeploy-{queue}.clients",
        "worker.id": f"fastdeploy-{queue}" + (f"-rank-{rank}" if rank else ""),
        "worker.max_requests": 0,  # requests come to the engine as they always did
        "limits.max_rows": Limits.schema().max_rows,  # what ends in a step has a row beside the slots'
        "processor.request_timeout_ms": _LONGEST_REQUEST_MS,  # how long a request takes is the engine's affair
        "processor.drain_timeout_ms": 0,
    }
    overrides = {key: value for key, value in here.items() if ENTRIES[key].value_in(found) == ENTRIES[key].default}
    if "bus.workers_address" in overrides or "bus.clients_address" in overrides:
        _make_private(folder)
    return Settings.load(environment=environment, overrides=overrides)


def _make_private(folder: Path) -> None:
    """Make the folder, which nobody else may write to: it has a name that anybody can guess."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not folder.is_dir() or folder.is_symlink():
        raise SettingsError(
            "bus.workers_address", "a folder that is this user's alone, or another address", str(folder)
        )


def _whole(name: str, environment: Mapping[str, str], *, least: int) -> int:
    text = environment.get(name, "1").strip()
    if not (text.isascii() and text.isdigit() and least <= int(text[:11]) <= _MOST):
        raise SettingsError(name, f"a whole number from {least} to {_MOST}", text)
    return int(text)

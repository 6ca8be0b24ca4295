"""LoRA adapters: `--lora-modules` as in `vllm serve`, validated before the model is loaded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenbus_contracts.generated.stream_pb2 import Hello
from tokenbus_contracts.schema import bounds_in

_OPTION = "--lora-modules"
_BOUNDS = bounds_in(Hello.DESCRIPTOR.fields_by_name["lora_adapters"].GetOptions())
_FILE = "adapter_config.json"
_FIELDS = frozenset({"name", "path", "base_model_name", "is_3d_lora_weight"})
"""Fields of the JSON form. The field `base_model_name` has no effect."""


class Adapter(NamedTuple):
    """A LoRA adapter."""

    name: str
    path: str
    is_3d_lora_weight: bool = False
    """Whether a mixture of experts uses vLLM's 3D layout of weights."""

    def request(self, vllm: Any, number: int) -> Any:  # noqa: ANN401 - vLLM's names, and its LoRARequest
        """Return vLLM's LoRARequest, where `number` is the adapter's unique id, at least 1."""
        further = {"is_3d_lora_weight": True} if self.is_3d_lora_weight else {}
        return vllm.LoRARequest(lora_name=self.name, lora_int_id=number, lora_path=self.path, **further)


def adapters_of(given: Sequence[str], model: str) -> list[Adapter]:
    """Parse `--lora-modules`. Raise ValueError for an invalid value, or for an adapter with the model's name."""
    if len(given) > _BOUNDS.max_items:
        raise ValueError(f"{_OPTION}: at most {_BOUNDS.max_items} adapters, got {len(given)}")
    adapters: dict[str, Adapter] = {}
    for value in given:
        adapter = _adapter(value)
        name = adapter.name
        if not 1 <= len(name.encode()) <= _BOUNDS.max_bytes:
            raise ValueError(f"{_OPTION}: a name of 1 to {_BOUNDS.max_bytes} bytes, got {len(name.encode())}: {value}")
        if name in adapters or name == model:
            raise ValueError(f"{_OPTION}: a name that neither the model nor another adapter has, got {name!r}")
        adapters[name] = checked(f"{_OPTION}: {name}", adapter)
    return list(adapters.values())


def checked(where: str, adapter: Adapter) -> Adapter:
    """Return the adapter with an absolute path. If its folder is invalid, raise ValueError with the prefix `where`."""
    folder = Path(adapter.path).expanduser()
    if not (folder / _FILE).is_file():
        got = f"a folder without {_FILE}" if folder.is_dir() else "no folder"
        raise ValueError(f"{where}: the folder of an adapter, got {got}: {folder}")
    return adapter._replace(path=str(folder.resolve()))


def _adapter(value: str) -> Adapter:
    """Parse `name=path` or a JSON object. As in vLLM, a value with a comma is JSON."""
    if "=" in value and "," not in value:
        before, _, behind = value.partition("=")
        return Adapter(before, behind)
    try:
        fields = dict(json.loads(value).items())
    except (ValueError, AttributeError):
        raise ValueError(f"{_OPTION}: name=path, or an object in JSON, got {value!r}") from None
    if unknown := sorted(fields.keys() - _FIELDS):
        raise ValueError(f"{_OPTION}: {', '.join(sorted(_FIELDS))}, got {unknown[0]!r}")
    name, path = fields.get("name"), fields.get("path")
    if not (isinstance(name, str) and isinstance(path, str)):
        raise ValueError(f"{_OPTION}: name and path, each a text, got {value!r}")  # noqa: TRY004 - of a text
    return Adapter(name, path, fields.get("is_3d_lora_weight") is True)

"""The switch: with TOKENBUS_FASTDEPLOY=on FastDeploy's ops are replaced where FastDeploy loads them.

Every Python of the environment imports this module as it starts, where that variable is set (tokenbus_fastdeploy.pth).
So it imports only what the interpreter has loaded already; numpy and the ops come when FastDeploy loads its own.
"""

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SWITCH = "TOKENBUS_FASTDEPLOY"
ENGINE = "fastdeploy"
OPS_PACKAGE = "fastdeploy.model_executor.ops"
"""Its subpackages have the ops: one for each kind of hardware."""
_NO_SAVE_OPS = {"cpu", "cute_dsl_ops", "triton_ops"}
"""Those that have no ops that save or get."""


def chosen(value: str) -> tuple[bool, str]:
    """Return whether a value of the variable means on, and what is wrong with it, or nothing."""
    read = value.strip().lower()
    return read == "on", "" if read in {"on", "off"} else f"{SWITCH}: on or off, got {value!r}"


def install() -> None:
    """Replace FastDeploy's ops from now on if the environment says on; a misspelt value lets no FastDeploy start."""
    is_on, fault = chosen(os.environ.get(SWITCH, "off"))
    if (is_on or fault) and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(fault))


def state() -> str:
    """Return `on` where the switch is on and FastDeploy has what it replaces, `off`, or what is wrong."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        return "off"
    from importlib.util import find_spec  # noqa: PLC0415 - it costs every start, and `tokenbus fastdeploy` alone asks

    spec = find_spec(ENGINE)
    return fault_of(None if spec is None else spec.submodule_search_locations or ()) or "on"


def fault_of(folders: "Iterable[str] | None") -> str:
    """Return what an installed FastDeploy lacks, or nothing; its files are looked at and not imported."""
    if folders is None:
        return f"{SWITCH}: on needs FastDeploy, got no package {ENGINE} on the path of {sys.executable}"
    looked_at = [os.path.join(folder, "model_executor", "ops") for folder in folders]  # noqa: PTH118 - pathlib costs
    found = [(ops, name) for ops in looked_at if os.path.isdir(ops) for name in sorted(os.listdir(ops))]  # noqa: PTH112, PTH208
    packages = [name for ops, name in found if os.path.isfile(os.path.join(ops, name, "__init__.py"))]  # noqa: PTH113, PTH118
    if set(packages) - _NO_SAVE_OPS:
        return ""
    got = ", ".join(packages) or "nothing"
    return f"{SWITCH}: on needs FastDeploy's ops, such as gpu or xpu in {' or '.join(looked_at)}, got {got}"


class Finder:
    """Finds FastDeploy's modules as Python does, and has the ops replaced as soon as they are loaded."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return where a module is, with a loader of ours if it is FastDeploy or has its ops."""
        package, _, last = name.rpartition(".")
        if name != ENGINE and (package != OPS_PACKAGE or last in _NO_SAVE_OPS):
            return None
        asking = get_ident(), name
        if asking in self._asking:  # a finder that asks all others, as those of tracers do, asked this one
            return None
        self._asking.add(asking)
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asking.discard(asking)
        if spec is None:
            return None
        fault = self._fault or (fault_of(spec.submodule_search_locations or ()) if name == ENGINE else "")
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader, fault, has_ops=name != ENGINE)  # type: ignore[assignment]
        elif fault:  # a package without __init__.py
            raise ImportError(fault, name=name)
        return spec


class _Loader:
    """FastDeploy's own loader, and what is done before and after it."""

    def __init__(self, loader: "Loader", fault: str, *, has_ops: bool) -> None:
        self._loader, self._fault, self._has_ops = loader, fault, has_ops

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Create the module as FastDeploy's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Load the module with its own loader, which it keeps; then replace its ops."""
        if self._fault:
            raise ImportError(self._fault, name=module.__name__)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._has_ops:
            from tokenbus_engines.fastdeploy.switch import replace_ops  # noqa: PLC0415 - not before it is needed

            replace_ops(module.__name__)

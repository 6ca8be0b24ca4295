"""The switch that replaces FastDeploy's ops when FastDeploy loads them, if TOKENBUS_FASTDEPLOY is `on`.

While the variable is set, tokenbus_fastdeploy.pth makes each Python of the environment import this module at its start.
So this module imports only modules that the interpreter has already loaded. numpy and our ops are imported when
FastDeploy loads its own ops.
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

SWITCH, FORM = "TOKENBUS_FASTDEPLOY", "TOKENBUS_FASTDEPLOY_FORM"
ENGINE = "fastdeploy"
OPS_PACKAGE = "fastdeploy.model_executor.ops"
"""Package with a subpackage of ops for each kind of hardware."""
_NO_SAVE_OPS = {"cpu", "cute_dsl_ops", "triton_ops"}


def read_switch(value: str) -> tuple[bool, str]:
    """Return whether the variable's value is `on`, and an error text, which is empty if the value is valid."""
    read = value.strip().lower()
    return read == "on", "" if read in {"on", "off"} else f"{SWITCH}: on or off, got {value!r}"


def install() -> None:
    """Replace FastDeploy's ops at its import if the variable is `on`. If the value is invalid, that import fails."""
    is_on, fault = read_switch(os.environ.get(SWITCH, "off"))
    if (is_on or fault) and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(fault))


def state() -> str:
    """Return `on` if FastDeploy's ops will be replaced, `off` if the switch is off, or an error."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        return "off"
    from importlib.util import find_spec  # noqa: PLC0415 - slow, and only `tokenbus fastdeploy` calls this

    try:
        spec = find_spec(ENGINE)
    except ImportError as error:  # our Finder raises this for a package without __init__.py
        return str(error)
    return fault_of(None if spec is None else spec.submodule_search_locations or ()) or "on"


def fault_of(folders: "Iterable[str] | None") -> str:
    """Return an error if the installed FastDeploy lacks its ops, or an empty string. FastDeploy is not imported."""
    if folders is None:
        return f"{SWITCH}: on needs FastDeploy, got no package {ENGINE} on the path of {sys.executable}"
    looked_at = [os.path.join(folder, "model_executor", "ops") for folder in dict.fromkeys(folders)]  # noqa: PTH118 - pathlib costs
    found = [(ops, name) for ops in looked_at if os.path.isdir(ops) for name in sorted(os.listdir(ops))]  # noqa: PTH112, PTH208
    packages = [name for ops, name in found if os.path.isfile(os.path.join(ops, name, "__init__.py"))]  # noqa: PTH113, PTH118
    if set(packages) - _NO_SAVE_OPS:
        return ""
    got = ", ".join(packages) or "nothing"
    return f"{SWITCH}: on needs FastDeploy's ops, such as gpu or xpu in {' or '.join(looked_at)}, got {got}"


class Finder:
    """Finds FastDeploy's modules through the other finders, and wraps the modules' loaders to replace ops."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return a spec with our loader for FastDeploy or a package of its ops, or None for any other module."""
        package, _, last = name.rpartition(".")
        if name != ENGINE and (package != OPS_PACKAGE or last in _NO_SAVE_OPS):
            return None
        asking = get_ident(), name
        if asking in self._asking:  # a finder that we asked, such as a tracer's, asks all finders again
            return None
        self._asking.add(asking)
        try:
            others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
            found = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._asking.discard(asking)
        if spec is None:
            return None
        fault = self._fault or (fault_of(spec.submodule_search_locations or ()) if name == ENGINE else "")
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader, fault, has_ops=name != ENGINE)  # type: ignore[assignment]
        elif fault:  # the package has no __init__.py
            raise ImportError(fault, name=name)
        return spec


class _Loader:
    """Wraps FastDeploy's own loader: replaces the ops after loading, or raises ImportError if there is a fault."""

    def __init__(self, loader: "Loader", fault: str, *, has_ops: bool) -> None:
        self._loader, self._fault, self._has_ops = loader, fault, has_ops

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Restore the module's own loader, load the module, and replace its ops."""
        if self._fault:
            raise ImportError(self._fault, name=module.__name__)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._has_ops:
            from tokenbus.engines.fastdeploy.switch import replace_ops  # noqa: PLC0415 - not before it is needed

            replace_ops(module.__name__)

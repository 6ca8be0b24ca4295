"""loader: a package's public names, each imported from the module that defines it when it is used first."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, homes: Mapping[str, str], names: dict[str, Any]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its name, for the error of a name that it does not have.
        homes: by module, the names that it defines, with spaces between.
        names: the package's `globals()`, which keep what was loaded.
    """
    modules = {name: module for module, defined in homes.items() for name in defined.split()}

    def load(name: str) -> Any:  # noqa: ANN401 - whatever has that name
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = value = getattr(import_module(modules[name]), name)
        return value

    return load

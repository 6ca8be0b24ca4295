"""loader: imports the public names of a package when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, homes: Mapping[str, str], names: dict[str, Any]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: the name of the package, for error messages. homes: the public names by module. Spaces separate the
        names. names: the `globals()` of the package, which cache the loaded names.
    """
    modules = {name: module for module, defined in homes.items() for name in defined.split()}

    def load(name: str) -> Any:  # noqa: ANN401 - any object
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = value = getattr(import_module(modules[name]), name)
        return value

    return load

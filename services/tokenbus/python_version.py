"""Refuses imports of packages that need Python 3.11. Workers and FastDeploy's ops also run on Python 3.10."""

import sys

_NEED_3_11 = {
    *(f"tokenbus.{name}" for name in ("client", "recordings", "gateway", "model_files", "processor")),
    *(f"tokenbus.engines.{name}" for name in ("ngram", "paddle", "vllm")),
}
_LIBRARY = sys.stdlib_module_names | {"tomllib"}


class PythonVersionError(ImportError):
    """The imported package needs a newer Python."""

    @classmethod
    def of(cls, name: str) -> "PythonVersionError":
        return cls(f"{name} needs Python 3.11 or newer; this is {sys.version.split()[0]}")

    @classmethod
    def instead_of(cls, error: ImportError, name: str) -> ImportError:
        """Return a PythonVersionError if this Python's standard library lacks the imported module, or else `error`."""
        lacking = (error.name or "").partition(".")[0]
        return cls.of(name) if sys.version_info < (3, 11) and lacking in _LIBRARY else error


class _Refusal:
    """An import finder that refuses packages that need a newer Python."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name in _NEED_3_11:
            raise PythonVersionError.of(name)


def refuse_what_needs_3_11() -> None:
    """On Python 3.10, make imports of packages that need 3.11 raise PythonVersionError."""
    if sys.version_info < (3, 11) and _Refusal not in sys.meta_path:
        sys.meta_path.insert(0, _Refusal)  # type: ignore[arg-type,unreachable,unused-ignore]

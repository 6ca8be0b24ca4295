"""What needs Python 3.11, and says so in one line where it is imported; workers and FastDeploy's ops run on 3.10."""

import sys

_NEED_3_11 = {
    *(
        f"tokenbus_services.{name}"
        for name in ("client", "durable_log", "gateway", "model_files", "offline", "processor")
    ),
    *(f"tokenbus_engines.{name}" for name in ("ngram", "paddle", "transformers", "vllm")),
}
_LIBRARY = sys.stdlib_module_names | {"tomllib"}


class PythonVersionError(ImportError):
    """What is imported needs a newer Python."""

    @classmethod
    def of(cls, name: str) -> "PythonVersionError":
        """Return the error that says so of a package, or whatever else, in one line."""
        return cls(f"{name} needs Python 3.11 or newer; this is {sys.version.split()[0]}")

    @classmethod
    def instead_of(cls, error: ImportError, name: str) -> ImportError:
        """Return the error of an import, or that Python is too old where its own library lacks what is imported."""
        lacking = (error.name or "").partition(".")[0]
        return cls.of(name) if sys.version_info < (3, 11) and lacking in _LIBRARY else error


class _Refusal:
    """Looks at each import, and refuses what this Python is too old for."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise a PythonVersionError of one line, or leave the import to others."""
        del path, target
        if name in _NEED_3_11:
            raise PythonVersionError.of(name)


def refuse_what_needs_3_11() -> None:
    """Have imports of what needs Python 3.11 say so, where this is an older one."""
    if sys.version_info < (3, 11) and _Refusal not in sys.meta_path:
        sys.meta_path.insert(0, _Refusal)  # type: ignore[arg-type,unreachable,unused-ignore]

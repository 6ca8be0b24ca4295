"""Which benchmarks there are: those beside the packages in a checkout, because they are not installed."""

import ast
from dataclasses import dataclass
from pathlib import Path

import tokenbus_services
from tokenbus_services.cli.errors import WRONG_USE, CommandError

_FOLDER = "benchmarks"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One module that `python -m` runs."""

    name: str
    title: str

    @property
    def module(self) -> str:
        """What `python -m` is given."""
        return f"{_FOLDER}.{self.name}"


def checkout() -> Path:
    """Return the folder that the packages are checked out in; raise a CommandError if they are installed."""
    root = Path(tokenbus_services.__file__).resolve().parents[2]
    if not (root / _FOLDER / "__init__.py").is_file() or not (root / "pyproject.toml").is_file():
        raise CommandError(
            "the benchmarks are not installed, they are in the source repository: clone it, and run `make setup` and "
            "`.venv/bin/tokenbus bench` there"
        )
    return root


def find(root: Path) -> list[Benchmark]:
    """Return the benchmarks of a checkout, by name: what says in its first line how it is run.

    Benchmarks start programs of their own, which lie beside them and are none.
    """
    folder = root / _FOLDER
    found = [(path.parent.name, path) for path in folder.glob("*/__main__.py")]
    found += [(path.stem, path) for path in folder.glob("*.py")]
    heads = [(name, (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]) for name, path in found]
    return [
        Benchmark(name, head.partition(": `")[0])
        for name, head in sorted(heads)
        if f"`python -m {_FOLDER}.{name}`" in head
    ]


def chosen(names: list[str], of: list[Benchmark]) -> list[Benchmark]:
    """Return those that were named, or all if none was."""
    known = {benchmark.name: benchmark for benchmark in of}
    for name in names:
        if name not in known:
            raise CommandError(f"NAME: one of {', '.join(known)}, got {name!r}", WRONG_USE)
    return [known[name] for name in dict.fromkeys(names or known)]

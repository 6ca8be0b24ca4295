"""Run benchmarks one after the other: `python -m benchmarks`."""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_DESCRIPTION = """\
Run the benchmarks one after the other; each prints its tables. One that cannot run here, as without a GPU, says why.

The status is 0 if every benchmark measured something, 1 if one did not.
"""
_EXAMPLES = """\
examples:
  python -m benchmarks --list                  which benchmarks there are
  python -m benchmarks --quick                 whether all of them work, in a few minutes
  python -m benchmarks codec bus > tables.md   two of them, in full
  python -m benchmarks.bus --help              what one of them measures, and its own options
"""


def main(arguments: Sequence[str] | None = None) -> int:
    known = titles()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (all)")
    parser.add_argument("--quick", action="store_true", help="short runs with rough figures")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and run none")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            parser.error(f"NAME: one of {', '.join(known)}, got {name!r}")
    if options.list:
        width = max(map(len, known))
        lines = [f"{name:{width}}  {title}" for name, title in known.items()]
        print(json.dumps(known, indent=2) if options.json else "\n".join(lines))
        return 0
    failed = [name for name in options.names or known if not _runs(name, quick=options.quick)]
    if failed:
        print(f"{parser.prog}: not measured: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def titles() -> dict[str, str]:
    """Return what each benchmark measures, by name: the modules whose first line says how they are run."""
    found = {}
    for path in sorted([*_FOLDER.glob("*/__main__.py"), *_FOLDER.glob("*/*/__main__.py"), *_FOLDER.glob("*.py")]):
        parts = path.relative_to(_FOLDER).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__main__")
        title, _, command = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].partition(": `")
        if command.startswith(f"python -m benchmarks.{name}`"):
            found[name] = title
    return found


def _runs(name: str, *, quick: bool) -> bool:
    print(f"# {name}\n", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    try:
        return not subprocess.run(command, cwd=_FOLDER.parent, check=False).returncode
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    sys.exit(main())

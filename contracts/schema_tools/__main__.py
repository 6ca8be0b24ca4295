"""The command `python -m schema_tools` with its subcommands generate, check, vectors and baseline."""

import argparse
import sys
from pathlib import Path

from schema_tools.check import faults
from schema_tools.compiled import REPOSITORY, SchemaError, Tree, write_baseline
from schema_tools.generate import write_generated
from schema_tools.vectors import write_vectors


def main(arguments: list[str] | None = None, root: Path = REPOSITORY) -> int:
    """Run one command in a checkout. Exit status 1 means that a check found a fault."""
    parser = argparse.ArgumentParser(prog="python -m schema_tools", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("generate", help="write the Python code that is generated from proto/")
    commands.add_parser(
        "check", help="list files that are stale or malformed, and changes that break the released schema"
    )
    commands.add_parser(
        "vectors", help="write the files derived from the golden messages, and the bytes of new messages"
    )
    commands.add_parser("baseline", help="release the schema; it must be compatible with the last release")
    command = parser.parse_args(arguments).command
    tree = Tree(root)
    try:
        return _run(command, tree)
    except SchemaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(command: str, tree: Tree) -> int:
    if command == "check":
        found = list(faults(tree))
        print("\n".join(found) or "the schema and all files generated from it are in order")
        return 1 if found else 0
    if command == "baseline":
        if broken := list(faults(tree, "breaking", "bounds")):
            print("\n".join(broken))
            print(
                f"error: {tree.baseline.relative_to(tree.root)} stays: a released schema can only grow", file=sys.stderr
            )
            return 1
        write_baseline(tree)
        print(f"wrote {tree.baseline.relative_to(tree.root)}")
        return 0
    changed = write_generated(tree) if command == "generate" else write_vectors(tree)
    print("\n".join(changed) or "nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

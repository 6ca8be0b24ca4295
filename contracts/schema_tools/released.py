"""The files of each release in contracts/baseline: its schema, and a stream that it recorded. They stay as they are."""

import hashlib
from collections.abc import Iterator

from schema_tools.compiled import Tree

_SUMS = "SHA256SUMS"


def released_faults(tree: Tree) -> Iterator[str]:
    """Yield a line for each file of a release that changed, is missing, or has no sum."""
    releases = sorted(path for path in tree.releases.iterdir() if path.is_dir()) if tree.releases.is_dir() else []
    if not releases:
        yield f"{tree.releases.relative_to(tree.root)}: no release"
    for folder in releases:
        recorded = (folder / _SUMS).read_text().splitlines() if (folder / _SUMS).is_file() else []
        sums = {name: known for known, _, name in (line.partition("  ") for line in recorded)}
        present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        present.pop(_SUMS, None)
        for name in sorted(sums.keys() | present):
            found = hashlib.sha256(present[name].read_bytes()).hexdigest() if name in present else "no file"
            if found != (known := sums.get(name, "no sum")):
                yield f"{folder.name}/{name}: sha256 {known} in {_SUMS}, got {found}; what was released stays"

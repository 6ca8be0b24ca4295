"""What each release keeps in contracts/baseline: its schema, a stream that it recorded, its golden messages' sums."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from schema_tools.compiled import Tree

_SUMS = "SHA256SUMS"
_VECTORS = "vectors.sha256"
"""The sums of a release's golden messages, which are in contracts/vectors still."""


def released_faults(tree: Tree) -> Iterator[str]:
    """Yield a line for each file of a release that changed, is missing, or has no sum."""
    releases = sorted(path for path in tree.releases.iterdir() if path.is_dir()) if tree.releases.is_dir() else []
    if not releases:
        yield f"{tree.releases.relative_to(tree.root)}: no release"
    for folder in releases:
        sums = _sums_in(folder / _SUMS)
        present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        present.pop(_SUMS, None)
        for name in sorted(sums.keys() | present):
            found = hashlib.sha256(present[name].read_bytes()).hexdigest() if name in present else "no file"
            if found != (known := sums.get(name, "no sum")):
                yield f"{folder.name}/{name}: sha256 {known} in {_SUMS}, got {found}; what was released stays"
        for name, known in _sums_in(folder / _VECTORS).items():
            path = tree.vectors / name
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
            if found != known:
                yield f"{name}: sha256 {known} in {folder.name}/{_VECTORS}, got {found}; what was released stays"


def _sums_in(path: Path) -> dict[str, str]:
    """Return the sum of each file that a list of sums names; none where there is no list."""
    recorded = path.read_text().splitlines() if path.is_file() else []
    return {name: known for known, _, name in (line.partition("  ") for line in recorded)}

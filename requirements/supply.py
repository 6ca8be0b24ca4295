"""What Tokenbus is made of, from the locks beside this file: `python requirements/supply.py sbom | audit`.

`sbom` writes a CycloneDX document for each lock into build/sbom. `audit` asks the package index's JSON pages whether
what is locked has known vulnerabilities; it fails where it has, and where the index does not say.
"""

import json
import os
import re
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_FOUND, _NOT_CHECKED = 1, 2
_SECONDS = 20


class Locked(NamedTuple):
    """One requirement of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        """What it is called everywhere."""
        return f"pkg:pypi/{self.name}@{self.version}"


def locked(path: Path) -> list[Locked]:
    """Return the requirements of a lock; one that has several versions, by platform, has an entry for each."""
    blocks = re.split(r"\n(?=\S)", path.read_text())
    found = []
    for block in blocks:
        if (first := re.match(r"([\w.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", block)) is not None:
            name = re.sub(r"[-_.]+", "-", first[1]).lower()
            found.append(Locked(name, first[2], tuple(re.findall(r"sha256:([0-9a-f]{64})", block))))
    return found


def sbom(lock: Path) -> dict[str, Any]:
    """Return a lock as a CycloneDX document, the same each time."""
    components = [
        {
            "type": "library",
            "bom-ref": each.purl,
            "name": each.name,
            "version": each.version,
            "purl": each.purl,
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": each.purl,
                    "hashes": [{"alg": "SHA-256", "content": value} for value in each.hashes],
                }
            ],
        }
        for each in locked(lock)
    ]
    main = {"type": "application", "bom-ref": "tokenbus", "name": "tokenbus", "description": f"with {lock.name}"}
    said = json.dumps([main, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, said)}",
        "version": 1,
        "metadata": {"component": main},
        "components": components,
        "dependencies": [{"ref": "tokenbus", "dependsOn": [each["bom-ref"] for each in components]}],
    }


def _write(locks: list[Path]) -> int:
    folder = ROOT / "build" / "sbom"
    folder.mkdir(parents=True, exist_ok=True)
    for lock in locks:
        path = folder / f"{lock.stem}.cdx.json"
        path.write_text(json.dumps(sbom(lock), indent=1) + "\n")
        sys.stdout.write(f"{path.relative_to(ROOT)}: {len(locked(lock))} packages\n")
    return 0


def _audit(locks: list[Path]) -> int:
    index = os.environ.get("TOKENBUS_AUDIT_INDEX", "").rstrip("/")
    if not index:
        sys.stderr.write("audit: not checked: set TOKENBUS_AUDIT_INDEX to an index with pages NAME/VERSION/json\n")
        return _NOT_CHECKED
    everything = sorted({(each.name, each.version) for lock in locks for each in locked(lock)})
    found = 0
    for name, version in everything:
        page = f"{index}/{name}/{version}/json"
        try:
            with urllib.request.urlopen(page, timeout=_SECONDS) as answer:  # noqa: S310 - https, as above
                vulnerabilities = json.load(answer)["vulnerabilities"]
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"audit: not checked: {name} {version}: the index does not say ({error})\n")
            return _NOT_CHECKED
        for each in vulnerabilities:
            if not each.get("withdrawn"):
                found += 1
                sys.stdout.write(f"{name} {version}: {each['id']}, mended in {', '.join(each['fixed_in']) or 'none'}\n")
    sys.stdout.write(f"{len(everything)} packages, {found} known vulnerabilities\n")
    return _FOUND if found else 0


def main(arguments: list[str]) -> int:
    """Run one of the two over every lock."""
    locks = sorted(ROOT.glob("requirements/*.txt"))
    commands = {"sbom": _write, "audit": _audit}
    if len(arguments) != 1 or arguments[0] not in commands:
        sys.stderr.write(f"usage: {Path(__file__).name} {' | '.join(commands)}\n")
        return _NOT_CHECKED
    return commands[arguments[0]](locks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

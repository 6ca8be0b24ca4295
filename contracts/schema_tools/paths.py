"""Where the schema and what is made from it lie, below one root, so that a check can run on a copy."""

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tree:
    """The places in one checkout that the schema tools read and write."""

    root: Path = REPOSITORY

    @property
    def proto(self) -> Path:
        """The folder that imports in .proto files start from, with buf.yaml in it."""
        return self.root / "proto"

    @property
    def schema_files(self) -> list[Path]:
        """Every .proto file of the current major version."""
        return sorted((self.proto / "tokenbus" / "v1").glob("*.proto"))

    @property
    def package(self) -> Path:
        """The import package."""
        return self.root / "contracts" / "tokenbus_contracts"

    @property
    def generated(self) -> Path:
        """What is generated from the schema."""
        return self.package / "generated"

    @property
    def vectors(self) -> Path:
        """The golden messages."""
        return self.root / "contracts" / "vectors" / "v1"

    @property
    def baseline(self) -> Path:
        """The image of the schema as last released."""
        return self.root / "contracts" / "baseline" / "v1.binpb"

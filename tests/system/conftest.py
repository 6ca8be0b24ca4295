"""What tests over several processes share."""

from tests.cli.conftest import folder
from tests.system.conftest import deployment

__all__ = ["deployment", "folder"]

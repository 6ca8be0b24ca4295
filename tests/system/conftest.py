"""What tests over several processes share."""

from tests.cli.conftest import folder
from tests.integration.conftest import deployment

__all__ = ["deployment", "folder"]

"""What tests over several processes share."""

from tests.integration.conftest import deployment
from tests.services.cli.conftest import folder

__all__ = ["deployment", "folder"]

"""What tests over several processes share."""

from tests.integration.conftest import deployment

__all__ = ["deployment"]

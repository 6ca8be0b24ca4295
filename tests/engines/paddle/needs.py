"""What the tests that compute with paddle say of themselves."""

from importlib.util import find_spec

import pytest

NEEDS_PADDLE = [
    pytest.mark.skipif(find_spec("paddle") is None, reason="paddlepaddle is not installed"),
    pytest.mark.process,  # importing it asks a shell which C library there is
    # Importing it takes seconds, and its threads take all cores: one process runs them all, beside the others.
    pytest.mark.xdist_group("paddle"),
]

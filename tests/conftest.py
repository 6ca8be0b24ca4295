"""What all tests share."""

from hypothesis import settings

# A failure must be everybody's, and the same again: the examples follow from the test, not from chance.
settings.register_profile("tokenbus", derandomize=True, deadline=None, database=None)
settings.load_profile("tokenbus")

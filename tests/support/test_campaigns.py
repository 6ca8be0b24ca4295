"""Examples of properties: the same in every run of the tests, new ones from a seed in `make soak`."""

from hypothesis import settings


def test_examples_are_new_in_the_long_form_alone() -> None:
    """By default examples follow from the test; in the profile of `make soak` from a seed, and a failure is printed."""
    soak = settings.get_profile("soak")
    assert settings.get_profile("tokenbus").derandomize
    assert (soak.derandomize, soak.print_blob, soak.database) == (False, True, None)

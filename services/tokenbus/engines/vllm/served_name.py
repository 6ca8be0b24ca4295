"""The name by which clients ask for the model, where vLLM's options say it."""

import argparse
from collections.abc import Sequence


def served_name(given: Sequence[str]) -> str:
    """Return the name that vLLM's options have; empty: none. A ValueError says that they have several.

    vLLM is not imported for this. Options that are wrong are left to the worker, which says what is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+", dest="names", default=[])
    try:
        names: list[str] = parser.parse_known_args(given)[0].names
    except argparse.ArgumentError:
        return ""
    if len(names) > 1:
        raise ValueError(f"--served-model-name: one name, as a worker's model has one, got {len(names)}")
    return names[0] if names else ""

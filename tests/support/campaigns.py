"""How long a campaign is: short in every run of the tests; SOAK is the share of the long form that a run has."""

import os

_SHARE = float(os.environ.get("SOAK") or 0)
IS_SOAK = _SHARE > 0


def many(long: int, short: int) -> int:
    return max(short, round(_SHARE * long))

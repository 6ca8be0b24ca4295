"""Engines that a worker runs, found by name, and the FastDeploy drop-in."""

import sys

if sys.version_info < (3, 11):  # else nothing is loaded: FastDeploy's switch is looked at by every Python that starts
    from tokenbus.python_version import refuse_what_needs_3_11

    refuse_what_needs_3_11()

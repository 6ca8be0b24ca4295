"""Engines that a worker runs, found by name, and the FastDeploy drop-in."""

from tokenbus_services.python_version import refuse_what_needs_3_11

refuse_what_needs_3_11()

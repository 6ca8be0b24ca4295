"""Names of Python 3.11's standard library that this module also provides on Python 3.10."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
    from asyncio import TaskGroup, Timeout, timeout
else:
    import tomli as tomllib
    from taskgroup import TaskGroup, Timeout, timeout

__all__ = ["TaskGroup", "Timeout", "timeout", "tomllib"]

"""Names that Python 3.11 added to its library, also for 3.10."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
    from asyncio import TaskGroup, timeout
else:
    import tomli as tomllib
    from taskgroup import TaskGroup, timeout

__all__ = ["TaskGroup", "timeout", "tomllib"]

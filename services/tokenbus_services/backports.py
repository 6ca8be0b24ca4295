"""What Python 3.11 brought, for the parts that run on 3.10 as well."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
    from asyncio import TaskGroup, timeout
else:
    import tomli as tomllib
    from taskgroup import TaskGroup, timeout

__all__ = ["TaskGroup", "timeout", "tomllib"]

"""A whole system on this machine: its services as child processes, which live no longer than this process."""

from tokenbus_services.cli.local.child import Child, News
from tokenbus_services.cli.local.plan import Plan, Service, plan_for
from tokenbus_services.cli.local.system import START_SECONDS, LocalSystem, StartError

__all__ = ["START_SECONDS", "Child", "LocalSystem", "News", "Plan", "Service", "StartError", "plan_for"]

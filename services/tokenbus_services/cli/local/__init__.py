"""A whole system on this machine: its services as child processes, which live no longer than this process."""

from tokenbus_services.cli.local.plan import Plan, plan_for
from tokenbus_services.cli.local.supervisor import START_SECONDS, Child, News, Service, StartError, Supervisor

__all__ = ["START_SECONDS", "Child", "News", "Plan", "Service", "StartError", "Supervisor", "plan_for"]

"""The processes that carry tokens: the bus, the worker, the processor, the gateway and the command line."""

from tokenbus.python_version import refuse_what_needs_3_11

refuse_what_needs_3_11()

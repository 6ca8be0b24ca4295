"""The processes that carry tokens: the bus, the worker, the processor, the gateway and the command line."""

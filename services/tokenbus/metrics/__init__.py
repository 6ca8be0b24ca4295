"""Metrics and health of a processor and a worker, over HTTP; a process imports the module of its own kind."""

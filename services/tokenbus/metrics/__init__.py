"""Metrics and health over HTTP; a process imports only the module of its kind."""

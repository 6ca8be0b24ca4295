"""Metrics and health over HTTP; a process imports only the module for its kind of service."""

"""Metrics and health over HTTP. A process imports only the module for its kind of service."""

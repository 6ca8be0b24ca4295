"""Tests over real sockets and real processes."""

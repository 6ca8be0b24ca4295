"""Tests of an engine and its bus in one process."""

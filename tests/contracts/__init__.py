"""Tests of tokenbus_contracts."""

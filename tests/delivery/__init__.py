"""Tests of what is handed to consumers."""

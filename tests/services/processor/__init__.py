"""Tests of the processor."""

"""Tests of the command line's services."""

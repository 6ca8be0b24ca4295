"""Tests of the services and of the command line."""

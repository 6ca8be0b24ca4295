"""Tests of the tools that guard the schema."""

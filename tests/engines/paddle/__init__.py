"""Tests of the paddle engine."""

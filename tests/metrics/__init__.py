"""Tests of the metrics and of how they are served."""

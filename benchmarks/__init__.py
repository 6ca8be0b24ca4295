"""Measurements of Tokenbus, each beside its peers in the same run."""

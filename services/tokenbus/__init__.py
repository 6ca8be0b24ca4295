"""Tokenbus: what an ordinary user imports."""

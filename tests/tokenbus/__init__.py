"""Tests of the door: the one package that users import."""

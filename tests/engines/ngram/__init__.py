"""Tests of the ngram engine."""

"""Benchmarks beside their peers: each folder is one, and `python -m` runs it; the modules beside them are shared."""

"""Developers' tools for the schema: they generate code, check the schema, and write vectors and the baseline."""

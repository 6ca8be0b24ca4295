"""The tools for developers of the schema: they generate code, check it, and write vectors and the baseline."""

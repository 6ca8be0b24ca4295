"""Small faults in the core, drawn by seed, each with the tests that notice it: see `__main__.py`."""

"""Files that type-check the public API by using it; mypy reads them, and pytest runs them."""

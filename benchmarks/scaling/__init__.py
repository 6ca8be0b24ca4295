"""Several processors beside one."""

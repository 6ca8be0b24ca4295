"""From save to get: the drop-in beside that engine's own queue."""

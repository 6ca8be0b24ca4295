"""How long requests pause when a processor goes, or a NATS server."""

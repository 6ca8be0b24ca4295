"""vLLM's own API server and Tokenbus, side by side: the same model, machine, client and requests."""

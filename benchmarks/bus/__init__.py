"""The bus beside its peers: from an engine's arrays in one process to every request's own buffer in another."""

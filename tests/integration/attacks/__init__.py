"""Peers that attack a running system over real sockets, and what must hold while they do."""

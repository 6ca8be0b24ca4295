"""How long a crowd of clients and workers takes to connect at once, and what that costs who was there before."""

"""How the paddle engine's committed weights were trained: a checkout's business, and not the wheel's."""

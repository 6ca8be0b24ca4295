"""Publishing in a process of its own: the engine's process hands steps over in shared memory, and goes on."""

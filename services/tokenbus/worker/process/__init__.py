"""Publishing in a separate process: the engine's process only writes its steps into shared memory."""

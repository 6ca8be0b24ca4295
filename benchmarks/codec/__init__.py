"""The codec beside what other engines use: from a step's arrays to every request's own queue."""

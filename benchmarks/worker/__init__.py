"""What a worker costs its engine, and what the ngram engine feeds through the whole system."""

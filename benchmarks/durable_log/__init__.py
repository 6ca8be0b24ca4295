"""The durable log beside bare nats-py, and what its readers cost its writer."""

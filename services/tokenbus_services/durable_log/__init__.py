"""The durable log: every worker's stream in a JetStream stream, written once and read by any number of readers."""

"""Tests of the durable log, with real NATS servers."""

"""Tests of the engine vllm: its own parts without vLLM, and the real one where it is installed (`make test-vllm`)."""

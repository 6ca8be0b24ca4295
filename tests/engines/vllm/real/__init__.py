"""Tests of the engine vllm with the real vLLM, which `make test-vllm` runs in an environment of its own."""

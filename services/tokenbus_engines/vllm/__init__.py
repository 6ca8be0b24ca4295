"""The engine vllm: vLLM's EngineCore as a worker's engine; vLLM itself is imported when one is made."""

from tokenbus_engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]

"""The engine vllm, and the scheduler plugin for an existing vLLM. vLLM is imported when an engine is created."""

from tokenbus.engines.vllm.engine import VllmEngine
from tokenbus.engines.vllm.published import scheduler
from tokenbus.engines.vllm.request_ids import request_id

__all__ = ["VllmEngine", "request_id", "scheduler"]

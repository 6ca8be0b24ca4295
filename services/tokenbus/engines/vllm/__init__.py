"""The engine vllm, and the scheduler of a vLLM that is deployed already; vLLM itself is imported when one is made."""

from tokenbus.engines.vllm.engine import VllmEngine
from tokenbus.engines.vllm.published import scheduler
from tokenbus.engines.vllm.request_ids import request_id

__all__ = ["VllmEngine", "request_id", "scheduler"]

"""Offline: an engine and its bus in this process, for batches of prompts whose outputs come back as arrays."""

from tokenbus_services.offline.llm import LLM
from tokenbus_services.offline.outputs import Output, Outputs

__all__ = ["LLM", "Output", "Outputs"]

"""The processor: consumes workers' streams, restores order, and delivers."""

from tokenbus.processor.processor import Processor

__all__ = ["Processor"]

"""The processor: reads workers' streams, restores their order, and delivers the rows."""

from tokenbus.processor.processor import Processor

__all__ = ["Processor"]

"""The processor: receives the streams of workers, restores their order, and delivers rows to clients."""

from tokenbus.processor.processor import Processor

__all__ = ["Processor"]

"""The paddle engine: a small transformer over bytes with multi-token-prediction heads, on a CPU or a GPU.

Importing this imports no framework: `PaddleEngine` does when it is made.
"""

from tokenbus.engines.paddle.engine import PaddleEngine, PaddleOptions
from tokenbus.engines.paddle.runner import DeviceError
from tokenbus.engines.paddle.tokenizer import ByteTokenizer
from tokenbus.engines.paddle.weights import WeightsError

__all__ = ["ByteTokenizer", "DeviceError", "PaddleEngine", "PaddleOptions", "WeightsError"]

"""The paddle engine: a small transformer over bytes with multi-token-prediction heads, on a CPU or a GPU.

Importing this imports no framework: `PaddleEngine` does when it is made.
"""

from tokenbus_engines.paddle.engine import PaddleEngine, PaddleOptions
from tokenbus_engines.paddle.runner import DeviceError
from tokenbus_engines.paddle.tokenizer import ByteTokenizer
from tokenbus_engines.paddle.weights import WeightsError

__all__ = ["ByteTokenizer", "DeviceError", "PaddleEngine", "PaddleOptions", "WeightsError"]

"""The paddle engine: a small transformer over bytes with multi-token-prediction heads, on a CPU or a GPU.

Importing this imports no framework: `PaddleEngine` does when it is made.
"""

from tokenbus_engines.paddle.engine import PaddleEngine
from tokenbus_engines.paddle.errors import DeviceError, WeightsError
from tokenbus_engines.paddle.options import PaddleOptions
from tokenbus_engines.paddle.tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "DeviceError", "PaddleEngine", "PaddleOptions", "WeightsError"]

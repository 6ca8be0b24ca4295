"""The paddle engine: a small transformer over bytes with draft heads. Creating the engine imports Paddle."""

from tokenbus.engines.paddle.engine import PaddleEngine, PaddleOptions
from tokenbus.engines.paddle.runner import DeviceError
from tokenbus.engines.paddle.tokenizer import ByteTokenizer
from tokenbus.engines.paddle.weights import WeightsError

__all__ = ["ByteTokenizer", "DeviceError", "PaddleEngine", "PaddleOptions", "WeightsError"]

"""The ngram engine: an n-gram language model with speculative decoding, in numpy."""

from tokenbus.engines.ngram.engine import NgramEngine, NgramOptions
from tokenbus.engines.ngram.tokenizer import Tokenizer, default_tokenizer

__all__ = ["NgramEngine", "NgramOptions", "Tokenizer", "default_tokenizer"]

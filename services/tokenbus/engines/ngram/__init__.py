"""The ngram engine: a language model of n-grams with speculative decoding, in numpy alone."""

from tokenbus.engines.ngram.engine import NgramEngine, NgramOptions
from tokenbus.engines.ngram.tokenizer import Tokenizer, default_tokenizer

__all__ = ["NgramEngine", "NgramOptions", "Tokenizer", "default_tokenizer"]

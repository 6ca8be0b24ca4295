"""The ngram engine: a language model of n-grams with speculative decoding, in numpy alone."""

from tokenbus_services.worker.ngram.engine import NgramEngine
from tokenbus_services.worker.ngram.options import NgramOptions
from tokenbus_services.worker.ngram.tokenizer import Tokenizer, taught

__all__ = ["NgramEngine", "NgramOptions", "Tokenizer", "taught"]

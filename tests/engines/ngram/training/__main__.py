"""Writes the ngram engine's tables anew: python -m tests.engines.ngram.training."""

import sys

from tests.engines.ngram.training.learning import Plain, documents, learned, save
from tokenbus.engines.ngram.tokenizer import COMMITTED

if __name__ == "__main__":
    tokenizer = learned(documents())
    save(COMMITTED, tokenizer, Plain(tokenizer, documents()).tables())
    sys.stdout.write(f"{COMMITTED}: {COMMITTED.stat().st_size} bytes\n")

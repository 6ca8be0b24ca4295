"""How the ngram engine's committed model was learned from the texts beside this: for a checkout, not for the wheel."""

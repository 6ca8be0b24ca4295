"""The ngram engine alone: what a step of it takes, and how many drafts are accepted."""

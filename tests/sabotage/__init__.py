"""Shows that tests test: each line that makes a claim of docs/security.md true is broken, and its test must fail."""

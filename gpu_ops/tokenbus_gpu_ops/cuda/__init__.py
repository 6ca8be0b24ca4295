"""The GPU path: compilation, launches and memory. The package is imported only if logits are on a GPU."""

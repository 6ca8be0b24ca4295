"""The GPU path: compilation, launches and memory. It is imported only when logits are on a GPU."""

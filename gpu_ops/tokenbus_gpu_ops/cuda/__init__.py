"""The GPU path: what compiles, launches and owns memory there. Nothing here is imported until logits are on a GPU."""

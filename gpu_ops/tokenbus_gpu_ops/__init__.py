"""From logits to logprob columns: CUDA kernels, their CPU twin and the bridges to GPU frameworks."""

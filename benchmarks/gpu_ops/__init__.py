"""From logits to columns, on a card and on the CPU, beside what engines do today."""

"""What is measured: sizes, types and kinds of logits."""

from typing import Any, NamedTuple

VOCABULARY = 151_936
ROWS = (1, 16, 256, 1536, 4096)
QUICK_ROWS = (1, 256)
TOP_KS = (0, 20)
DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("random", "peaked", "ascending", "descending")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FLOOR_BYTES_PER_US = 4.3e6
"""The bandwidth that the floor is counted from: what a large copy reaches on one H200."""


class Case(NamedTuple):
    """One size of one kind."""

    dtype: str
    kind: str
    rows: int
    top_k: int

    @property
    def floor_us(self) -> float:
        """How long reading the logits once takes at that bandwidth."""
        return self.rows * VOCABULARY * ITEM_BYTES[self.dtype] / FLOOR_BYTES_PER_US


def logits_on_card(torch: Any, dtype: str, kind: str, rows: int) -> Any:  # noqa: ANN401 - a module and its tensors
    generator = torch.Generator("cuda").manual_seed(1)
    if kind in ("ascending", "descending"):
        line = torch.linspace(-10, 10, VOCABULARY, device="cuda")
        line = line if kind == "ascending" else line.flip(0)
        return line.to(getattr(torch, dtype)).expand(rows, -1).contiguous()
    logits = torch.empty(rows, VOCABULARY, dtype=getattr(torch, dtype), device="cuda")
    for row in range(0, rows, 512):  # float32 beside the rest would take too much memory at once
        part = torch.randn(min(512, rows - row), VOCABULARY, device="cuda", generator=generator) * 2.5
        if kind == "peaked":
            # A trained model's logits: a few tokens have almost all of the probability, and fall off like 1 / rank.
            places = torch.rand(part.shape[0], 200, device="cuda", generator=generator).mul(VOCABULARY).long()
            heights = 22 - 2.2 * torch.arange(1, 201, device="cuda").log()
            part.scatter_(1, places, heights.expand(part.shape[0], -1))
        logits[row : row + part.shape[0]] = part
    return logits


def sampled_ids(torch: Any, logits: Any) -> Any:  # noqa: ANN401
    generator = torch.Generator("cuda").manual_seed(2)
    ids = [torch.softmax(part.float(), -1).multinomial(1, generator=generator)[:, 0] for part in logits.split(256)]
    return torch.cat(ids)

"""Train the paddle engine's weights: `python -m tests.engines.paddle.training` writes them anew."""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.engines.paddle.training.prose import stories, tokens_of
from tokenbus.engines.paddle.runner import Tensor, framework
from tokenbus.engines.paddle.tokenizer import VOCABULARY_SIZE
from tokenbus.engines.paddle.weights import COMMITTED, FORMAT, STORED, Shape

if TYPE_CHECKING:
    from tokenbus.engines.paddle.network import Network

_LINE = 256
_WARM_UP = 40
_HIGHEST_RATE = 4e-3
_LOWEST_RATE = 1e-4
_DECAY = 0.05
_DRAFT_WEIGHT = 0.5
"""How much a draft head counts, beside the target's one."""
_SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save, and say how long it took; tests/engines/paddle/test_training.py says how good the weights are."""
    options = _parser().parse_args(arguments)
    paddle = framework(options.device)
    paddle.seed(options.seed)
    began = time.monotonic()
    network = trained(paddle, options.steps, options.lines, options.seed, began)
    _save(options.output, network)
    size = options.output.stat().st_size
    sys.stdout.write(f"{options.output}: {size} bytes, after {time.monotonic() - began:.0f} s\n")
    return 0


def trained(paddle: Any, steps: int, lines: int, seed: int, began: float) -> "Network":  # noqa: ANN401 - a module
    from tokenbus.engines.paddle.network import Network  # noqa: PLC0415 - it imports paddle

    network = Network(Shape())
    rate = paddle.optimizer.lr.LambdaDecay(1.0, lambda step: _rate(step, steps))
    parameters, clip = network.layers.parameters(), paddle.nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(rate, 0.9, 0.98, parameters=parameters, weight_decay=_DECAY, grad_clip=clip)
    batches = _batches(seed, lines)
    for step in range(steps):
        losses = _losses(network, paddle.to_tensor(next(batches)))
        total = losses[0] + sum(losses[1:]) * _DRAFT_WEIGHT
        total.backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        if step % _SHOWN == _SHOWN - 1:
            shown = "  ".join(f"{float(loss):.3f}" for loss in losses)
            sys.stdout.write(f"step {step + 1}/{steps}, {time.monotonic() - began:.0f} s: {shown} nats\n")
            sys.stdout.flush()
    return network


def _losses(network: "Network", tokens: Tensor) -> list[Tensor]:
    """Return how surprised the target's head is by each next token, and each draft head by those further on."""
    return [_surprise(logits, wanted) for logits, wanted in _predictions(network, tokens)]


def _predictions(network: "Network", tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each head's logits, and the tokens that they should foresee: the target's, then the draft heads'."""
    from paddle import arange

    further = network.shape.draft_heads
    size = tokens.shape[1] - further - 1
    positions = arange(size, dtype="int64").unsqueeze(0).expand([tokens.shape[0], size])
    state = network.hidden(tokens[:, :size], positions, size)
    found = [(network.logits(state), tokens[:, 1 : size + 1])]
    for place in range(further):
        state, logits = network.further(place, state, tokens[:, place + 1 : place + 1 + size])
        found.append((logits, tokens[:, place + 2 : place + 2 + size]))
    return found


def _surprise(logits: Tensor, tokens: Tensor) -> Tensor:
    from paddle.nn.functional import cross_entropy

    return cross_entropy(logits.reshape([-1, VOCABULARY_SIZE]), tokens.reshape([-1]))


def _batches(seed: int, lines: int) -> Iterator[npt.NDArray[np.int64]]:
    stream: list[int] = []
    wanted = lines * _LINE
    for text in stories(seed, held_out=False):
        stream += tokens_of(text)
        while len(stream) >= wanted:
            yield np.array(stream[:wanted], np.int64).reshape(lines, _LINE)
            del stream[:wanted]


def _rate(step: int, steps: int) -> float:
    if step < _WARM_UP:
        return _HIGHEST_RATE * (step + 1) / _WARM_UP
    done = (step - _WARM_UP) / max(1, steps - _WARM_UP)
    return _LOWEST_RATE + (_HIGHEST_RATE - _LOWEST_RATE) * (1 + math.cos(math.pi * done)) / 2


def _save(path: Path, network: "Network") -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415 - of the extra, as paddle is

    arrays = {name: each.numpy().astype(STORED) for name, each in network.layers.state_dict().items()}
    sizes = {name: str(size) for name, size in asdict(network.shape).items()}
    save_file(arrays, path, metadata={"format": FORMAT} | sizes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.paddle.training", description=__doc__)
    parser.add_argument("--output", type=Path, default=COMMITTED, metavar="FILE", help="where the weights go")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="how many batches to train on (400)")
    parser.add_argument("--lines", type=int, default=16, metavar="N", help=f"lines of {_LINE} tokens a batch (16)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="fixes weights and text (1)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, gpu, gpu:1 (cpu)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

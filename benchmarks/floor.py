"""The floor of a step: its matrix products alone, at the speed of this machine's fastest product.

Products counted: one forward of every prompt (once a group) and of every generated token, three (forward, two
gradients) of the same tokens in training, the output layer for generated tokens only. Attention, all between the
products, optimizer, rewards and records are left out, so no trainer reaches it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from whet.config.sizes import Shape, folder_shape
from whet.models import products

ROWS, TRIES = 5000, 20
PROMPTS = 16


def floor_s(case: Path, *, generated: float, rate: float) -> float:
    """Seconds of a step with so many generated tokens. rate: floating-point operations a second."""
    shape = folder_shape(case / "model", {})
    head = (shape.vocab_size or 0) * shape.hidden
    layers = (shape.parameters or 0) - head * (1 if shape.tied else 2)
    rows = json.loads((case / "prompts.json").read_text())
    tokens = PROMPTS * sum(len(row["prompt"]) for row in rows) / len(rows) + generated
    return 2 * (1 + 3) * (layers * tokens + head * generated) / rate


def rate(case: Path, dtype: str) -> tuple[float, str]:
    """(operations a second, whose): the fastest of torch's, oneDNN's and our products of this dtype, on one thread, for
    this model's feed-forward layer over many rows."""
    shape = folder_shape(case / "model", {})
    torch.set_num_threads(1)
    found = {name: _rate(name, shape, getattr(torch, dtype)) for name in ("whet", "torch", "onednn")}
    best = max(found, key=lambda name: found[name])
    return found[best], best


@torch.no_grad()
def _rate(name: str, shape: Shape, dtype: torch.dtype) -> float:
    x, weight = (torch.randn(n, shape.hidden).to(dtype) for n in (ROWS, shape.ffn))

    def multiply() -> Tensor:
        if name == "onednn":
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            return found
        return products.linear(x, weight) if name == "whet" else torch.nn.functional.linear(x, weight)

    seconds = []
    for _ in range(TRIES):
        begin = time.process_time()
        multiply()
        seconds.append(time.process_time() - begin)
    return 2 * ROWS * shape.hidden * shape.ffn / min(seconds)

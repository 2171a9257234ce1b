"""Run by `test_paged` under TRITON_INTERPRET=1: prints the largest difference between the kernel and the exact twin."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

from whet.models import paged
from whet.models.kernels import load
from whet.models.segments import Bounds

CASES = (
    (4, 2, 16, None, None, False),
    (14, 2, 64, None, None, True),
    (4, 1, 48, 7, None, True),
    (6, 3, 32, 40, 5.0, False),
)
"""Query heads, key/value heads, head size, window, soft-cap, sinks."""
SHAPES = paged.shapes


def in_parts(*given: Any, **how: Any) -> torch.Tensor:
    """A decode step in parts of 64 keys, that of the longest row in three."""
    with mock.patch.object(paged, "SPLIT", 64), mock.patch.object(paged, "shapes", few_keys):
        return paged.attended(*given, **how)


def few_keys(*given: Any, **how: Any) -> tuple[int, dict[str, int]]:
    queries, sizes = SHAPES(*given, **how)
    return queries, sizes | {"KEYS": 32}


def worst() -> float:
    """Rows of 1 to 150 keys, decode steps and parts of histories, over pages in random order."""
    draw, ops, found = torch.Generator().manual_seed(0), load("torch"), 0.0
    for heads, kv, size, window, cap, sunk in CASES:
        sinks = torch.randn(heads, generator=draw) if sunk else None
        k = torch.randn(40, kv, size, 16, generator=draw)
        v = torch.randn(40, kv, 16, size, generator=draw)
        table_BP = torch.randperm(40, generator=draw).view(4, 10).int()
        how: dict[str, Any] = {"table_BP": table_BP, "keys_B": torch.tensor([1, 17, 150, 64])}
        how |= {"scale": size**-0.5, "window": window, "softcap": cap, "sinks": sinks}
        for queries_B in (None, torch.tensor([1, 17, 70, 3])):
            q = torch.randn(4 if queries_B is None else int(queries_B.sum()), heads, size, generator=draw)
            exact = ops.attend_cached(q, k, v, queries_B=queries_B, **how)
            bounds = None
            if queries_B is not None:
                bounds = Bounds.of(queries_B, how["keys_B"], torch.device("cpu"))
            seen = paged.attended(q, k, v, bounds=bounds, **how)
            found = max(found, float((seen - exact).abs().max()))
            if queries_B is None:
                parts = in_parts(q, k, v, bounds=None, **how)
                found = max(found, float((parts - exact).abs().max()))
                assert torch.equal(parts[0], seen[0]), "a row of one part has the same bits"
    return found


if __name__ == "__main__":
    print(worst())
    sys.exit(0)

"""Names of the modes that reduce token losses to one number."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "token-sum-norm",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]

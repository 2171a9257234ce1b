"""Frozen weights on the grid of a 4-bit checkpoint.

A model that is served with its experts in INT4 (compressed-tensors: a scale for each group of inputs) has these
numbers, and so has the model that adapters are trained beside.

With w the weights of GROUP inputs of one output, all in bfloat16, the dtype of such checkpoints:

    scale = max |w| / divisor        rounded once
    code  = w / scale                rounded to a whole number, from `lowest` to 7
    w'    = code * scale

A group of zeros stays 0. As SkyRL of 21 August 2026 (a956457), fake_int4_qat.py.

Shape letters: X experts, O out features, I in features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from whet.config.learns import is_stack
from whet.models.experts import is_turned
from whet.types import ConfigError

GROUP = 32
HIGHEST = 7
GRIDS = {"int4_rtn": (7.5, -8), "int4_kimi": (7.0, -7)}
"""Divisor of the scale and lowest code: of llm-compressor's rounding to nearest; of Kimi K2."""


def on_grid(weight: Tensor, grid: str) -> Tensor:
    """[..., O, I] the nearest numbers of the grid, in the dtype of the weight. A row's last group may be shorter."""
    divisor, lowest = GRIDS[grid]
    columns = weight.shape[-1]
    short = -columns % GROUP
    groups = F.pad(weight.to(torch.bfloat16), (0, short)).unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True).float() / divisor).to(torch.bfloat16)
    codes = (groups / torch.where(scale == 0, 1, scale)).round().clamp(lowest, HIGHEST)
    return (codes * scale).flatten(-2)[..., :columns].to(weight.dtype)


@torch.no_grad()
def put_experts_on(model: PreTrainedModel, grid: str) -> None:
    """Round the matrices of all experts, in place. Raises ConfigError for a model without stacks of them."""
    key = f"model.expert_grid={grid}"
    stacks = {name: p for name, p in model.named_parameters() if is_stack(name)}
    if not stacks:
        raise ConfigError(f"{key}: {type(model).__name__} has no experts; leave it out")
    for name, stack in stacks.items():
        if is_turned(model.get_submodule(name.rpartition(".")[0])):
            raise ConfigError(
                f"{key}: {name} has the inputs of an expert in another dimension than the last; leave it out"
            )
        for matrix_OI in stack:
            matrix_OI.copy_(on_grid(matrix_OI, grid))

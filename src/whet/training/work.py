"""The arithmetic that a model needs for rollouts.

Only necessary work counts: recomputed activations count once, as does a prompt that a group shares; weights without a
gradient save that third of the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.batch import Batch
from whet.config.sizes import config_sizes


@dataclass(frozen=True)
class Work:
    """FLOPs of a forward and a backward pass."""

    layers: float
    """Of a computed token, in the matrices of all layers."""
    output: float
    """Of a sampled token, in the output layer; 0 for a critic."""
    attention: float
    """Of a pair of a token and one that it sees."""


def work_of(model: PreTrainedModel, *, output: bool) -> Work:
    """Of this model as it learns now: 2 a parameter forward, 2 for the gradient of its input, 2 for its own."""
    sizes = config_sizes(model.config.get_text_config().to_dict())
    active = sizes["experts_per_token"] / sizes["experts"] if sizes["experts"] else 1.0
    layers = sum(
        _flops(p) * (active if ".experts." in name else 1.0)
        for name, p in model.named_parameters()
        if ".layers." in name and p.ndim > 1
    )
    head = model.get_output_embeddings()
    return Work(
        layers=layers,
        output=_flops(head.weight) if output and isinstance(head, nn.Linear) else 0.0,
        attention=12.0 * sizes["layers"] * sizes["heads"] * sizes["head_dim"],
    )


def _flops(p: Tensor) -> float:
    return (6.0 if p.requires_grad else 4.0) * prod(p.shape)


def rollout_flops(work: Work, batch: Batch) -> tuple[Tensor, Tensor]:
    """([R] of each rollout's prompt, [R] of its reply), float64."""
    prompt_R, reply_R = batch.prompt_R.double(), (batch.length_R - batch.prompt_R).double()
    sampled_R = batch.sum_R(torch.ones(batch.tokens, dtype=torch.float64, device=prompt_R.device))
    pairs_R = reply_R * prompt_R + reply_R.square() / 2
    return (
        work.layers * prompt_R + work.attention * prompt_R.square() / 2,
        work.layers * reply_R + work.output * sampled_R + work.attention * pairs_R,
    )


def batch_flops(work: Work, batch: Batch, *, shared: bool) -> float:
    """Of one pass over a batch. shared: the rollouts of a group have one prompt between them."""
    prompt_R, reply_R = rollout_flops(work, batch)
    first_R = torch.ones_like(batch.group_R, dtype=torch.bool)
    if shared:
        first_R[1:] = batch.group_R[1:] != batch.group_R[:-1]
    return float((prompt_R * first_R + reply_R).sum())

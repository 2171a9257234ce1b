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
from whet.config.mtp import is_mtp
from whet.config.sizes import config_sizes


@dataclass(frozen=True)
class BatchFlops:
    """FLOPs of a forward and a backward pass."""

    layers: float
    """Of a computed token, in the matrices of all layers."""
    output: float
    """Of a sampled token, in the output layer; 0 for a critic."""
    attention: float
    """Of a pair of a token and one that it sees."""


def work_of(model: PreTrainedModel, *, output: bool) -> BatchFlops:
    """Of this model as it learns now: 2 a parameter forward, 2 for the gradient of its input, 2 for its own. Layers of
    multi-token prediction, which only an update computes, are left out."""
    sizes = config_sizes(model.config.get_text_config().to_dict())
    active = sizes["experts_per_token"] / sizes["experts"] if sizes["experts"] else 1.0
    layers = sum(
        _flops(p) * (active if ".experts." in name else 1.0)
        for name, p in model.named_parameters()
        if ".layers." in name and p.ndim > 1 and not is_mtp(name, sizes["layers"])
    )
    head = model.get_output_embeddings()
    return BatchFlops(
        layers=layers,
        output=_flops(head.weight) if output and isinstance(head, nn.Linear) else 0.0,
        attention=12.0 * sizes["layers"] * sizes["heads"] * sizes["head_dim"],
    )


def _flops(p: Tensor) -> float:
    return (6.0 if p.requires_grad else 4.0) * prod(p.shape)


def rollout_flops(work: BatchFlops, batch: Batch) -> tuple[Tensor, Tensor]:
    """([R] of the prompt of each rollout's first segment, [R] of all else in it), float64."""
    prompt_S, reply_S = batch.prompt_S.double(), (batch.length_S - batch.prompt_S).double()
    sampled_S = torch.zeros_like(prompt_S).index_add(0, batch.segment_N, batch.mask_N.double())
    pairs_S = reply_S * prompt_S + reply_S.square() / 2
    first_S = work.layers * prompt_S + work.attention * prompt_S.square() / 2
    rest_S = work.layers * reply_S + work.output * sampled_S + work.attention * pairs_S
    prompt_R = first_S[batch.first_R]
    both_R = prompt_R.new_zeros(batch.rollouts)
    first_S = first_S.index_fill(0, batch.first_R, 0.0)
    return prompt_R, both_R.index_add(0, batch.rollout_S, first_S + rest_S)


def batch_flops(work: BatchFlops, batch: Batch, *, shared: bool) -> float:
    """Of one pass over a batch. shared: the rollouts of a group have one prompt between them."""
    prompt_R, reply_R = rollout_flops(work, batch)
    first_R = torch.ones_like(batch.group_R, dtype=torch.bool)
    if shared:
        first_R[1:] = batch.group_R[1:] != batch.group_R[:-1]
    return float((prompt_R * first_R + reply_R).sum())

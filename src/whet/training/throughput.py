"""How much of a GPU's arithmetic an update uses: model FLOPs utilisation (arXiv:2204.02311 appendix B).

Counted is what the model needs, not what is done: recomputed activations count once, as does a prompt that a group
shares; weights without a gradient save its third of the work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.batch import Batch
from whet.config.schema import Train
from whet.config.sizes import config_sizes
from whet.training.torch import TorchEngine

PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250e12, 75e12),
    ("H200 NVL", 835e12, 60e12),
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("H800", 989e12, 67e12),
    ("H20", 148e12, 44e12),
    ("A100", 312e12, 19.5e12),
    ("A800", 312e12, 19.5e12),
    ("A40", 149.7e12, 37.4e12),
    ("A30", 165e12, 10.3e12),
    ("A10G", 70e12, 31.5e12),
    ("A10", 125e12, 31.2e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("RTX 4090", 165.2e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
)
"""FLOP/s by a word of the device's name: half precision without sparsity, float32 without TF32, as the maker's data
sheets say. More special names come first."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device; None if it is not in the table."""
    for word, half, single in PEAKS:
        if re.search(rf"\b{re.escape(word)}\b", device_name):
            return single if dtype == torch.float32 else half
    return None


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


def batch_flops(work: Work, batch: Batch, *, shared: bool) -> float:
    """Of one pass over a batch. shared: the rollouts of a group have one prompt between them."""
    prompt_R, reply_R = batch.prompt_R.double(), (batch.length_R - batch.prompt_R).double()
    first_R = torch.ones_like(batch.group_R, dtype=torch.bool)
    if shared:
        first_R[1:] = batch.group_R[1:] != batch.group_R[:-1]
    tokens = float((prompt_R * first_R + reply_R).sum())
    pairs = float((prompt_R.square() / 2 * first_R + reply_R * prompt_R + reply_R.square() / 2).sum())
    return work.layers * tokens + work.output * int(batch.mask_N.sum()) + work.attention * pairs


@dataclass(frozen=True)
class Meter:
    """What one step's update of a run needs, on a device of known speed."""

    peak: float
    """FLOP/s, of all devices together."""
    policy: Work
    critic: Work | None
    shared: bool
    passes: int
    critic_passes: int
    devices: int = 1

    def flops(self, batch: Batch, *, policy_learns: bool) -> float:
        """All passes of policy and critic over a step's batch."""
        out = 0.0
        if policy_learns:
            out += self.passes * batch_flops(self.policy, batch, shared=self.shared)
        if self.critic is not None:
            out += self.critic_passes * batch_flops(self.critic, batch, shared=self.shared)
        return out


def meter_of(
    policy: TorchEngine,
    critic: TorchEngine | None,
    *,
    train: Train,
    of_critic: Train | None,
    devices: int = 1,
) -> Meter | None:
    """None where the speed of the device is not known, as on a CPU. devices: that update together, all alike."""
    if policy.device.type != "cuda":
        return None
    dtype = next(policy.module.parameters()).dtype
    peak = peak_flops(torch.cuda.get_device_name(policy.device), dtype)
    if peak is None:
        return None
    return Meter(
        peak=peak * devices,
        devices=devices,
        policy=work_of(policy.module, output=True),
        critic=None if critic is None else work_of(critic.module, output=False),
        shared=train.share_prompts,
        passes=train.passes,
        critic_passes=of_critic.passes if of_critic else 0,
    )

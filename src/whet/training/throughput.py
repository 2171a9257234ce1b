"""How much of a GPU's arithmetic an update uses: model FLOPs utilisation (arXiv:2204.02311 appendix B)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from whet.algos.demonstration import without_experts
from whet.batch import Batch, computed
from whet.config.schema import TrainConfig
from whet.training.engine import TrainEngine
from whet.training.work import BatchFlops, batch_flops, work_of

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
class Meter:
    """What one step's update of a run needs, on a device of known speed."""

    peak: float
    """FLOP/s, of all devices together."""
    policy: BatchFlops
    critic: BatchFlops | None
    shared: bool
    passes: int
    critic_passes: int
    devices: int = 1

    def flops(self, batch: Batch, *, policy_learns: bool) -> float:
        """All passes of policy and critic over a step's batch: the policy's skip what is skipped, the critic's have
        no demonstrations."""
        out = 0.0
        if policy_learns:
            out += self.passes * batch_flops(self.policy, computed(batch), shared=self.shared)
        if self.critic is not None:
            out += self.critic_passes * batch_flops(self.critic, without_experts(batch), shared=self.shared)
        return out


def meter_of(
    policy: TrainEngine,
    critic: TrainEngine | None,
    *,
    device: torch.device,
    train: TrainConfig,
    of_critic: TrainConfig | None,
    critic_is_model: bool = False,
    devices: int = 1,
) -> Meter | None:
    """None where the speed of the device is not known, as on a CPU. critic_is_model: it has an output layer. devices:
    that update together, all alike."""
    if device.type != "cuda":
        return None
    dtype = next(policy.structure.parameters()).dtype
    peak = peak_flops(torch.cuda.get_device_name(device), dtype)
    if peak is None:
        return None
    return Meter(
        peak=peak * devices,
        devices=devices,
        policy=work_of(policy.structure, output=True),
        critic=None if critic is None else work_of(critic.structure, output=critic_is_model),
        shared=train.share_prompts,
        passes=train.update_epochs,
        critic_passes=of_critic.update_epochs if of_critic else 0,
    )

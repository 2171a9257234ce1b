"""Section about demonstrations mixed with the policy's own rollouts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from whet.config.sections.base import Count, Fraction, Section


class MixConfig(Section):
    """Training on demonstrations (`data.demonstrations`) and own rollouts in one step."""

    demonstration_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the tasks of a step (train.tasks_per_step, rounded up) whose reply is a demonstration, one per task."""
    loss: str | dict[str, Any] | None = None
    """Loss of the demonstrations: sft, sft_is, sft_phi, or a table of its settings, as algorithm.loss: {name: sft_phi,
    phi_cutoff: 0.5}. Default: the recipe's (mix: sft; mix_chord: sft_phi)."""
    mu: Fraction = 0.1
    """Weight of the loss of the demonstrations; the loss of the policy, with its KL and entropy terms, has weight 1 -
    mu."""
    mu_warmup_steps: Count = 0
    """Training steps of a linear warm-up of mu from 0. 0: no warm-up."""
    mu_valley: Fraction | None = None
    """Final value of mu after a cosine decay over mu_decay_steps, which follows the warm-up. None: no decay."""
    mu_decay_steps: Count = 0
    """Training steps of this decay. 0: mu drops at once."""

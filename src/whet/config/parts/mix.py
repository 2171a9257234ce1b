"""The section about demonstrations among the policy's own rollouts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from whet.config.parts.base import Count, Fraction, Section


class Mix(Section):
    """Learning from demonstrations (`data.demonstrations`) and own rollouts in one step."""

    demonstration_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of a step's tasks (train.tasks_per_step, rounded up) whose reply is a demonstration, one each."""
    loss: str | dict[str, Any] | None = None
    """Loss of the demonstrations: sft, sft_is, sft_phi, or a table of its settings, as algorithm.loss: {name: sft_phi,
    phi_cutoff: 0.5}. Default: the recipe's (mix: sft; mix_chord: sft_phi)."""
    mu: Fraction = 0.1
    """Weight of the demonstrations' loss; the policy's, its KL and entropy terms included, has 1 - mu."""
    mu_warmup_steps: Count = 0
    """Training steps in which mu rises on a line from 0. 0: it is there from the first step."""
    mu_valley: Fraction | None = None
    """What mu falls to after the warm-up, as a cosine over mu_decay_steps. None: it stays."""
    mu_decay_steps: Count = 0
    """Training steps of that fall. 0: at once."""

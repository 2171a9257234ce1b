"""The section about low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config.parts.base import Above0, BelowOne, Positive, Section


class Lora(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): W + scale B A stands for W, and only A and B learn. Names and
    meanings are peft's. A learning rate about ten times that of full training is usual."""

    rank: Positive = 16
    """Rows of A, columns of B."""
    alpha: Above0 = 32.0
    """Numerator of the scale: alpha / rank. At a fixed alpha the best learning rate hardly depends on the rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732): adapters of high rank keep the size of their effect."""
    dropout: BelowOne = 0.0
    """Share of the features that an adapter does not see of a token, while it learns. What was sampled is then not
    exactly what is trained."""
    targets: str | tuple[str, ...] = "all-linear"
    """What gets adapters: all-linear (every linear layer but the output), a list of names (`q_proj` is that of every
    layer), or a regular expression for the whole name. Experts and routers of a mixture are no linear layers."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Another rank for layers whose name ends with a regular expression; the first that fits counts."""
    alpha_pattern: dict[str, Above0] = Field(default_factory=dict)
    """Another alpha for such layers."""
    modules_to_save: tuple[str, ...] = ()
    """Modules without adapters that learn in full, by the end of their name, e.g. `lm_head` or `norm`."""
    init: Literal["default", "random", "gaussian", "orthogonal", "olora", "pissa"] = "default"
    """How A and B begin. default: A uniform (Kaiming), B 0, so that nothing is changed; gaussian: A normal, B 0;
    random: B random too; orthogonal: both random with B A = 0; olora (arXiv:2406.01775), pissa (arXiv:2404.02948): from
    a decomposition of the weights."""
    pissa_iterations: Positive | None = None
    """Find pissa's singular vectors by so many rounds of subspace iteration instead of the whole decomposition."""
    path: str | None = None
    """Begin with the adapters of this folder, as peft writes them (adapter_model.safetensors)."""

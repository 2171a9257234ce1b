"""Section about low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config.sections.base import Above0, BelowOne, Positive, Section


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): W + scale B A replaces W, and only A and B are trained. Names and
    meanings are those of peft. A learning rate about ten times that of full fine-tuning is usual."""

    rank: Positive = 16
    """Number of rows of A and of columns of B."""
    alpha: Above0 = 32.0
    """Numerator of the scale: alpha / rank. At a fixed alpha the best learning rate hardly depends on the rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732), so that the effect of adapters of high rank does not
    shrink."""
    dropout: BelowOne = 0.0
    """Dropout on the input features of an adapter, in training. Sampling has no dropout, so sampled and trained
    log-probs differ."""
    targets: str | tuple[str, ...] = "all-linear"
    """Layers with adapters: all-linear (every linear layer except the output layer), a list of names (`q_proj` matches
    this layer in every block), or a regular expression for the whole name. Experts and routers of a mixture of experts
    are not linear layers."""
    exclude_modules: str | tuple[str, ...] = ()
    """Layers without adapters, even if `targets` matches them: a list of names, or a regular expression for the whole
    name. Such an expression may match nothing."""
    fused: bool = False
    """One A for the layers that Megatron-LM computes as one (queries, keys and values; gate and up), each with its own
    B, as LoRA of Megatron-Bridge. Exports for peft repeat A for each layer."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Ranks of single layers, by a regular expression for the end of the name; the first match counts."""
    alpha_pattern: dict[str, Above0] = Field(default_factory=dict)
    """Values of alpha for single layers, by the same patterns."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full, without adapters, by the end of their name, e.g. `lm_head` or `norm`."""
    init: Literal["default", "random", "gaussian", "orthogonal", "olora", "pissa", "xavier"] = "default"
    """Initial values of A and B. default: A uniform (Kaiming), B 0, so that the model is unchanged; gaussian, xavier: A
    normal with deviation 1 / rank, or sqrt(2 / (rank + inputs)), and B 0; random: B random too; orthogonal: both random
    with B A = 0; olora (arXiv:2406.01775), pissa (arXiv:2404.02948): from a decomposition of the weights."""
    pissa_iterations: Positive | None = None
    """Compute the singular vectors of pissa by this many iterations of subspace iteration. Default: the full
    decomposition."""
    path: str | None = None
    """Start from the adapters in this folder, in the format of peft (adapter_model.safetensors)."""

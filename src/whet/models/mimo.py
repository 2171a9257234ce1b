"""MiMo (XiaomiMiMo/MiMo-7B, arXiv:2505.07608): Qwen2's decoder. transformers has no class for it, and the code in the
published folders is never run. Its layers of multi-token prediction are `mtp.MIMO`."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    """Qwen2's, with num_nextn_predict_layers."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's, under its own name."""

    config_class = MiMoConfig


def register() -> None:
    """Make the family known to transformers; safe to call again."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)

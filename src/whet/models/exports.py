"""Exports of a policy: the full model, or its adapters only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.config.schema import Config
from whet.models.load import export
from whet.models.lora import export_adapter, merged


def writer(cfg: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[[Path], None]:
    """Writes the model in its current state: a Hugging Face folder, or one of peft's (`checkpoint.export_as`)."""
    lora, base = cfg.model.lora, cfg.model.path

    def write(path: Path) -> None:
        if lora is not None and cfg.checkpoint.export_as == "adapter":
            export_adapter(model, path, cfg=lora, base=base)
        else:
            export(merged(model), tokenizer, path)

    return write

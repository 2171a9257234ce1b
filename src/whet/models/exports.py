"""Exports of a policy: the full model, or its adapters only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.config.schema import Config
from whet.models.load import export
from whet.models.lora import export_adapter, merged
from whet.track.files import RUN_DIR


def write_export(
    cfg: Config,
    make: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    other: str = RUN_DIR,
) -> None:
    """Write a model: a Hugging Face folder, or one of peft's (`checkpoint.export_as`). other: as for `file_error`."""
    model, lora = make(), cfg.model.lora
    if lora is not None and cfg.checkpoint.export_as == "adapter":
        export_adapter(model, path, cfg=lora, base=cfg.model.path, other=other)
    else:
        origin = None if cfg.model.path is None else Path(cfg.model.path).expanduser()
        export(merged(model), tokenizer, path, origin=origin, other=other)

"""What `auto` in the section `sync` stands for."""

from __future__ import annotations

from typing import Literal

from whet.config.recipes import resolve
from whet.config.schema import Config


def content_of(cfg: Config) -> Literal["full", "delta", "adapters"]:
    """The effective value of sync.content."""
    if cfg.sync.content != "auto":
        return cfg.sync.content
    apart = cfg.sync.dtype == "auto" and cfg.rollout.quantization is None
    return "adapters" if cfg.model.lora is not None and apart else "full"


def has_adapters(cfg: Config) -> bool:
    """Whether the model of this process has adapters: an explorer that receives merged weights has none."""
    explores = cfg.mode == "explore" and resolve(cfg.algorithm).kind == "online"
    return cfg.model.lora is not None and not (explores and content_of(cfg) != "adapters")

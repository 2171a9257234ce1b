"""Problems of the section `sync`, and the values that auto stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from whet.config.recipes import resolve
from whet.config.schema import Config

WAYS = {
    "files": "processes of mode=train and mode=explore",
    "object_store": "engine replicas (rollout.replicas)",
}
WAYS["collective"] = WAYS["object_store"]
"""The receivers of a method."""


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of the section in one stage's config."""
    method = cfg.sync.method
    if method == "ipc":
        yield (
            "sync.method",
            "ipc: needs memory of a GPU, but machine.device is cpu; use auto"
            if cfg.machine.device == "cpu"
            else "ipc: is not tested yet; use auto",
        )
    elif method != "auto":
        apart = cfg.mode != "both"
        if apart != (method == "files"):
            there = f"mode={cfg.mode}" if apart else f"rollout.replicas={cfg.rollout.replicas}"
            fits = "files" if apart else "object_store or collective"
            yield "sync.method", f"{method} is for {WAYS[method]}; with {there} use {fits}, or auto"


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

"""What cannot work in the section `sync`, and what its values of auto come to."""

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
"""Whom a method serves."""


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of the section in one stage's config."""
    sync = cfg.sync
    yield from _method(cfg)
    if sync.content == "adapters" and cfg.model.lora is None:
        yield "sync.content", "adapters: model.lora is not given; use delta, which sends what has changed"
    elif sync.content == "adapters" and cfg.rollout.quantization is not None:
        yield (
            "sync.content",
            f"adapters: with rollout.quantization={cfg.rollout.quantization} engines keep no weights under them that "
            "they could be merged with; use full, which sends them merged",
        )
    elif sync.content == "adapters" and sync.dtype != "auto":
        yield (
            "sync.dtype",
            f"{sync.dtype}: adapters are proved to make the trainer's weights, so they travel as they are; leave it "
            "out, or use sync.content=full",
        )
    apart = cfg.mode == "train" or (cfg.mode == "both" and cfg.rollout.replicas)
    if cfg.machine.logprob_parity == "on" and apart and sync.dtype != "auto":
        yield (
            "sync.dtype",
            f"{sync.dtype}: machine.logprob_parity=on wants rollouts of the very weights that are trained; use auto",
        )


def _method(cfg: Config) -> Iterator[tuple[str, str]]:
    method = cfg.sync.method
    if method == "ipc":
        yield (
            "sync.method",
            "ipc: it hands over memory of a GPU, and machine.device is cpu; use auto"
            if cfg.machine.device == "cpu"
            else "ipc: handing over memory of a GPU is not tried yet; use auto",
        )
    elif method != "auto":
        apart = cfg.mode != "both"
        if apart != (method == "files"):
            there = f"mode={cfg.mode}" if apart else f"rollout.replicas={cfg.rollout.replicas}"
            fits = "files" if apart else "object_store or collective"
            yield "sync.method", f"{method} is for {WAYS[method]}; with {there} use {fits}, or auto"


def content_of(cfg: Config) -> Literal["full", "delta", "adapters"]:
    """What sync.content comes to."""
    if cfg.sync.content != "auto":
        return cfg.sync.content
    apart = cfg.sync.dtype == "auto" and cfg.rollout.quantization is None
    return "adapters" if cfg.model.lora is not None and apart else "full"


def has_adapters(cfg: Config) -> bool:
    """Whether the model of this process has them: an explorer that is sent merged weights has not."""
    explores = cfg.mode == "explore" and resolve(cfg.algorithm).kind == "online"
    return cfg.model.lora is not None and not (explores and content_of(cfg) != "adapters")

"""Problems of the keys that select trained parameters: adapters, patterns of names, optimizer groups."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from whet.config.schema import Config, LoraConfig
from whet.config.urls import is_remote


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in one stage's config."""
    for at, lora in (("model.lora", cfg.model.lora), ("critic.lora", cfg.critic.lora)):
        if lora is not None:
            yield from _lora(at, lora)
    yield from _patterns("train.trainable", cfg.train.trainable)
    for at, optimizer in (("train", cfg.train.optimizer), ("critic", cfg.critic.optimizer)):
        yield from _patterns(f"{at}.optimizer.param_groups", optimizer.param_groups)


def _lora(at: str, lora: LoraConfig) -> Iterator[tuple[str, str]]:
    if importlib.util.find_spec("peft") is None:
        yield (
            at,
            "adapters need peft, which is not installed; pip install 'whet[lora]', or leave the section out",
        )
    if lora.targets in ("", ()):
        yield f"{at}.targets", "is empty; give all-linear, names of layers or a regular expression"
    if isinstance(lora.targets, str):
        yield from _patterns(f"{at}.targets", [lora.targets])
    if isinstance(lora.exclude_modules, str):
        yield from _patterns(f"{at}.exclude_modules", [lora.exclude_modules])
    yield from _patterns(f"{at}.rank_pattern", lora.rank_pattern)
    yield from _patterns(f"{at}.alpha_pattern", lora.alpha_pattern)
    local = lora.path is not None and not is_remote(lora.path)
    if local and not (Path(lora.path or "").expanduser() / "adapter_model.safetensors").is_file():
        yield (
            f"{at}.path",
            f"{lora.path!r} has no adapter_model.safetensors; give a folder written by peft",
        )


def _patterns(key: str, patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield key, f"{pattern!r} is not a regular expression: {error}"

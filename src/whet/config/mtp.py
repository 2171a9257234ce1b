"""What `model.mtp` says of layers of multi-token prediction. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from whet.config.chosen import Chosen, setting_problems
from whet.config.functions import MTP_LOSSES
from whet.config.recipes import elsewhere
from whet.config.schema import ModelConfig
from whet.types import Json

KEY = "model.mtp"
COUNT = "num_nextn_predict_layers"
"""How many such layers a model has, in its config.json."""
COPIES = ("embed_tokens", "shared_head.head")
"""Of embedding and output layer, beside each such layer in checkpoints of DeepSeek's kind."""
MOST = 64
"""Layers, in a config.json that is believed."""
_NAMED = re.compile(r"(?:^|\.)mtp(?:_layers|_block)?\.")
_NUMBERED = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def is_mtp(name: str, layers: int) -> bool:
    """Whether a parameter of a model belongs to such layers. layers: those of its decoder."""
    return bool(_NAMED.search(name)) or _number(name) >= layers


def names_of(names: Iterable[str], layers: int) -> set[str]:
    """The tensors of a checkpoint that belong to such layers. One after the decoder's own is such a layer if it has a
    projection; without one it is a decoder layer that the config does not count."""
    names = list(names)
    ahead = {_number(name) for name in names if ".eh_proj." in name and _number(name) >= layers}
    return {name for name in names if _NAMED.search(name) or _number(name) in ahead}


def _number(name: str) -> int:
    """Of the layer that a tensor belongs to; -1: to none."""
    numbered = _NUMBERED.match(name)
    return -1 if numbered is None else int(numbered[1])


def mtp_of(model: ModelConfig) -> Chosen | None:
    """What the layers learn; None: the model has none."""
    return None if model.mtp is None else elsewhere(KEY, model.mtp)


def wanted(model: ModelConfig, config: Mapping[str, Json]) -> int:
    """How many layers a model of this config.json is to have. ValueError for a number of layers that is none."""
    made = mtp_of(model)
    return 0 if made is None else int(made.settings.get("layers") or said(config) or 1)


def said(config: Mapping[str, Json]) -> int:
    """How many layers a config.json says that its model has. ValueError as `wanted`."""
    count = config.get(COUNT) or 0
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST:
        raise ValueError(f"{COUNT} is {repr(count)[:40]}, expected a whole number from 0 to {MOST}")
    return count


def problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it)."""
    made = mtp_of(model)
    if made is not None:
        yield from setting_problems(KEY, made, MTP_LOSSES)

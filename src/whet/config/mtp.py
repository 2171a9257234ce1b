"""What `model.mtp` says of layers of multi-token prediction. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from whet.config.chosen import Chosen, chosen, setting_problems, unknown
from whet.config.functions import MTP_LOSSES
from whet.config.recipes import ELSEWHERE
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
    """Whether a tensor of a checkpoint belongs to such layers. layers: those of the decoder."""
    numbered = _NUMBERED.match(name)
    return bool(_NAMED.search(name)) or (numbered is not None and int(numbered[1]) >= layers)


def mtp_of(model: ModelConfig) -> Chosen | None:
    """What the layers learn; None: the model has none."""
    return None if model.mtp is None else chosen(model.mtp, MTP_LOSSES, ELSEWHERE[KEY][0])


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
    if made is not None and made.is_own:
        yield KEY, unknown(made.name, MTP_LOSSES)
    elif made is not None:
        yield from setting_problems(KEY, made, MTP_LOSSES)

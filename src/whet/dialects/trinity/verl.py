"""The rows of the veRL section of a Trinity-RFT file, trainer.trainer_config."""

from __future__ import annotations

from collections.abc import Mapping

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.presets import preset
from whet.dialects.trinity.values import (
    ACTOR,
    CRITIC,
    MODEL,
    given,
    known_as,
    whole,
)
from whet.types import Json


def backends(values: Values) -> Mapping[str, Json]:
    """Which kernels veRL takes."""
    key = f"{MODEL}.fused_kernel_options.impl_backend"
    if given(values[key]) is not None:
        known_as(str(values[key]), dict.fromkeys(("triton", "torch")), key=key)
    return {}


def together(values: Values) -> Mapping[str, Json]:
    """What is saved and loaded of the critic: as of the actor."""
    for way in ("load", "save") if preset(values).recipe == "ppo" else ():
        key, own = f"{CRITIC}.checkpoint.{way}_contents", values[f"{ACTOR}.checkpoint.{way}_contents"]
        if sorted(values[key] or []) != sorted({*(own or [])} - {"hf_model"}):
            raise NotSupportedYet(f"{key}: {values[key]} beside the actor's {own} is coming, not built yet.")
    return {}


def seeded(values: Values) -> Mapping[str, Json]:
    """A seed that nothing reads."""
    whole(values, f"{ACTOR}.data_loader_seed", least=0)
    return {}

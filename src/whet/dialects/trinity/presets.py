"""What Trinity-RFT's algorithm_type stands for: a native recipe, and the functions it picks where a file names none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.values import whole
from whet.tables import near
from whet.types import ConfigError

Kind = Literal["online", "sft", "dpo"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What an algorithm_type stands for where its functions are not named."""

    recipe: str
    """The native recipe."""
    advantage: str = "none"
    loss: str = "ppo"
    kl_loss: str = "k2"
    entropy: str = "default"
    repeat_times: int = 2
    kind: Kind = "online"
    in_trainer: bool = False
    """Advantages are computed in the trainer, so a KL penalty in the rewards has an effect."""

    @property
    def mixes(self) -> bool:
        """Demonstrations stand among the own rollouts."""
        return self.loss in ("mix", "mix_chord")


PRESETS: dict[str, Preset] = {
    "ppo": Preset(recipe="ppo", advantage="ppo", repeat_times=1, in_trainer=True),
    "grpo": Preset(recipe="grpo", advantage="grpo"),
    "rloo": Preset(recipe="rloo", advantage="rloo", in_trainer=True),
    "reinforceplusplus": Preset(recipe="reinforce_pp", advantage="reinforceplusplus", in_trainer=True),
    "opmd": Preset(recipe="opmd", advantage="opmd", loss="opmd"),
    "asymre": Preset(recipe="asymre", advantage="asymre", loss="opmd", kl_loss="none", entropy="none"),
    "topr": Preset(recipe="topr", advantage="reinforce", loss="topr"),
    "cispo": Preset(recipe="cispo", advantage="grpo", loss="cispo"),
    "gspo": Preset(recipe="gspo", advantage="grpo", loss="gspo"),
    "sapo": Preset(recipe="sapo", advantage="grpo", loss="sapo"),
    "sppo": Preset(recipe="sppo", advantage="opmd", loss="sppo", kl_loss="none", entropy="none"),
    "rec": Preset(recipe="rec", advantage="rec", loss="rec"),
    "raft": Preset(recipe="raft", loss="sft", kl_loss="none", entropy="none", repeat_times=1),
    "multi_step_grpo": Preset(recipe="step_wise_grpo", advantage="step_wise_grpo", repeat_times=8),
    "on_policy_distill": Preset(
        recipe="distill",
        advantage="on_policy_distill",
        kl_loss="none",
        entropy="none",
        repeat_times=8,
        in_trainer=True,
    ),
    "mix": Preset(recipe="mix", advantage="grpo", loss="mix", entropy="mix", repeat_times=8),
    "mix_chord": Preset(
        recipe="mix_chord", advantage="grpo", loss="mix_chord", entropy="mix", repeat_times=8
    ),
    "sft": Preset(recipe="sft", loss="sft", kl_loss="none", entropy="none", repeat_times=1, kind="sft"),
    "dpo": Preset(recipe="dpo", loss="dpo", kl_loss="none", kind="dpo"),
}

NEWER = ("cpt", "dapo", "gigpo", "jsd", "grpo_verl")
"""Those of versions after the document."""


def preset(values: Values) -> Preset:
    """The preset of algorithm.algorithm_type. NotSupportedYet for a newer one, ConfigError for an unknown one."""
    name = str(values["algorithm.algorithm_type"])
    if name in PRESETS:
        return PRESETS[name]
    known = f"here: {', '.join(PRESETS)}"
    if name in NEWER:
        raise NotSupportedYet(
            f"algorithm.algorithm_type: {name}, of a newer version, is coming, not built yet; {known}."
        )
    raise ConfigError(f"algorithm.algorithm_type: {name!r} is not known{near(name, PRESETS)}; {known}.")


def online(values: Values) -> bool:
    """Whether the policy learns from its own rollouts, and not from a file."""
    return preset(values).kind == "online"


def repeat_times(values: Values) -> int:
    """Rollouts of a task: the preset's where the file does not say."""
    return whole(values, "algorithm.repeat_times") or preset(values).repeat_times

"""Trinity-RFT's demonstrations among own rollouts: sample_strategy, auxiliary buffers, the mixed losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.loss import ARGS, given_arguments
from whet.dialects.trinity.presets import preset, repeat_times
from whet.dialects.trinity.replies import AUXILIARY, replies
from whet.dialects.trinity.values import arguments, count, entry, known_as, text, whole
from whet.types import ConfigError, Json

STRATEGY = "algorithm.sample_strategy"
STRATEGIES: dict[str, dict[str, Json]] = {
    "default": {},
    "warmup": {},
    "staleness_control": {"max_staleness": None},
    "mix": {"expert_data_ratio": 0.5, "sft_dataset_name": "sft_dataset"},
}
"""Ways to draw a batch, with their arguments; warmup is default's older name."""


def strategy(values: Values) -> tuple[str, dict[str, Json]]:
    """sample_strategy with its arguments. Raises ConfigError where it cannot go with algorithm_type."""
    base = preset(values)
    name = text(values, STRATEGY) or ("mix" if base.mixes else "default")
    known_as(name, STRATEGIES, key=STRATEGY)
    if (name == "mix") != base.mixes:
        raise ConfigError(
            f"{STRATEGY}: {name} does not go with algorithm_type {values['algorithm.algorithm_type']}: the algorithms "
            "mix and mix_chord, and only they, learn from demonstrations among rollouts. Leave it out."
        )
    return name, arguments(values, f"{STRATEGY}_args", STRATEGIES[name])


def staleness(values: Values) -> Mapping[str, Json]:
    """staleness_control: with sync_style fixed no rollout of step s is older than version s - interval - offset."""
    most = bound(values)
    if most is None or values["synchronizer.sync_style"] != "fixed":
        return {}
    oldest = count(values, "synchronizer.sync_interval") + count(values, "synchronizer.sync_offset", least=0)
    if most < oldest:
        raise NotSupportedYet(
            f"{STRATEGY}_args.max_staleness: {most} is coming, not built yet: a step's rollouts are up to "
            f"sync_interval + sync_offset = {oldest} versions old with sync_style: fixed, and none is left out for it."
        )
    return {}


def bound(values: Values) -> int | None:
    """max_staleness of staleness_control; None: rollouts may be of any age. Step s takes versions from s - it on."""
    most = strategy(values)[1].get("max_staleness")
    if most is None:
        return None
    return count({f"{STRATEGY}_args.max_staleness": most}, f"{STRATEGY}_args.max_staleness")


def step(values: Values, batch: int) -> tuple[int, int]:
    """(own tasks, demonstrations) of a step of so many experiences: ceil(ratio * batch) of them are demonstrations."""
    times = repeat_times(values)
    ratio = strategy(values)[1].get("expert_data_ratio", 0)
    experts = math.ceil(Fraction(str(ratio)) * batch)
    own, rest = divmod(batch - experts, times)
    tasks = count(values, "buffer.batch_size")
    if rest or own != tasks:
        raise NotSupportedYet(
            f"buffer.train_batch_size: of {batch} experiences {experts} are demonstrations "
            f"(algorithm.sample_strategy_args.expert_data_ratio) and {batch - experts} are not buffer.batch_size * "
            f"algorithm.repeat_times = {tasks} * {times} = {tasks * times}: training on more or "
            "fewer than a step explores is coming, not built yet."
        )
    return own, experts


def mixed(values: Values) -> Mapping[str, Json]:
    """algorithm.mix, and the rows of the demonstrations."""
    base = preset(values)
    if not base.mixes:
        return {}
    given, chosen = given_arguments(values), strategy(values)[1]
    size = whole(values, "buffer.train_batch_size") or count(values, "buffer.batch_size") * repeat_times(
        values
    )
    own, experts = step(values, size)
    for key, here in (
        ("train_batch_size_expert", experts),
        ("train_batch_size_usual", size - experts),
        ("ppo_mini_batch_size", size),
    ):
        if given[key] not in (None, here):
            raise ConfigError(f"{ARGS}.{key}: {given[key]} is not {here}, which is what a step has here.")
    name = str(chosen["sft_dataset_name"])
    buffer = entry(values, AUXILIARY, name)
    turns = "all" if buffer.get("format.enable_concatenated_multi_turn") else "last"
    return {
        "data.learn_turns": turns,
        "algorithm.mix.expert_ratio": share(experts, own + experts),
        **{f"algorithm.mix.{key}": value for key, value in _weight(base.loss, given).items()},
        **replies(buffer, f"{AUXILIARY}.{name}", at="data.expert.0"),
    }


def _weight(loss: str, given: Mapping[str, Json]) -> dict[str, Json]:
    if loss == "mix":
        return {"mu": given["mu"], "loss": "sft"}
    falls = given["mu_valley"] != given["mu_peak"]
    return {
        "mu": given["mu_peak"],
        "mu_warmup_steps": given["mu_warmup_steps"],
        "loss": "sft_phi" if given["enable_phi_function"] else "sft",
        **({"mu_valley": given["mu_valley"]} if falls else {}),
        **({"mu_decay_steps": given["mu_decay_steps"]} if falls and given["mu_decay_steps"] else {}),
    }


def share(part: int, whole: int) -> float:
    """A decimal of at most six digits that, times `whole` and rounded up, is `part`."""
    return math.floor(10**6 * part / whole) / 10**6


def outside_mu(values: Values, coef: Json, *, key: str) -> Json:
    """A term that Trinity adds to the mixed loss as it is, and whet inside the policy's part, which has 1 - mu."""
    base = preset(values)
    if not base.mixes or not coef:
        return coef
    given = given_arguments(values)
    if base.loss == "mix_chord" and (given["mu_valley"] != given["mu_peak"] or given["mu_warmup_steps"]):
        raise NotSupportedYet(
            f"{key}: {coef} beside a mu that changes (mu_warmup_steps, mu_valley) is coming, not built yet: here the "
            "term moves with mu. Set its coefficient to 0."
        )
    mu = given["mu"] if base.loss == "mix" else given["mu_peak"]
    if mu == 1:
        raise ConfigError(
            f"{key}: {coef} has no effect with mu 1, where the policy's own loss has no weight."
        )
    return coef / (1 - mu)

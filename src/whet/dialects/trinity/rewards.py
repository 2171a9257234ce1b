"""Trinity-RFT's workflows and rewards: which are of one turn, what each reward is here, who is judged by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from whet.config.keys import distance
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.presets import online, preset
from whet.dialects.trinity.replies import Own, inside
from whet.dialects.trinity.values import EVAL_TASKSETS, TASKSET, entries, text
from whet.types import ConfigError, Json

INPUT = "buffer.explorer_input"

ONE_TURN: dict[str, str | None] = {
    "simple_workflow": None,
    "math_workflow": "math_reward",
    "math_boxed_workflow": "math_boxed_reward",
    "math_eval_workflow": "math_boxed_reward",
    "on_policy_distill_workflow": None,
    "on_policy_distill_math_workflow": "math_reward",
}
"""Workflows of one turn, with the reward each brings. All but the last two also with async_ before the name."""

WORKFLOWS = {
    **ONE_TURN,
    **{f"async_{name}": reward for name, reward in ONE_TURN.items() if "distill" not in name},
}

TRINITY = "whet.rewards.trinity"
REWARDS: dict[str, str] = {
    "accuracy_reward": "math",
    "math_dapo_reward": "math",
    **{
        name: f"{TRINITY}:{name}"
        for name in ("math_reward", "math_boxed_reward", "format_reward", "countdown_reward")
    },
}
"""Trinity's rewards, and the function of each here."""

_OVERLONG = ("enable_overlong_penalty", "penalty_factor", "max_response_length", "cache_length")
_BOXED = ("with_think", "format_score_coef")


def _refuse_typo(name: str, known: Collection[str], *, at: str) -> None:
    """ConfigError for a name that is a known one, save a letter or two."""
    meant = [one for one in known if distance(name, one) <= 2]
    if meant:
        raise ConfigError(f"{at}: {name} is not known; did you mean {meant[0]}?")


def workflow(values: Values, own: Own, what: str, *, general: str) -> str:
    """The workflow of a taskset. NotSupportedYet unless it is one turn."""
    at, name = f"{what}.default_workflow_type", text(own, "default_workflow_type")
    if name is None:
        at, name = general, text(values, general) or "simple_workflow"
    if name in WORKFLOWS:
        return name
    _refuse_typo(name, WORKFLOWS, at=at)
    raise NotSupportedYet(
        f"{at}: {name}, a workflow of several turns, with tools or of your own, is coming, not built yet; here, all of "
        f"one turn: {', '.join(ONE_TURN)}."
    )


def workflow_of(values: Values, own: Own, what: str) -> str:
    """The same, with the general one of training or of evaluation."""
    general = f"{INPUT}.default_workflow_type"
    if what != TASKSET and text(values, f"{INPUT}.default_eval_workflow_type"):
        general = f"{INPUT}.default_eval_workflow_type"
    return workflow(values, own, what, general=general)


def _named(values: Values, own: Own, what: str) -> str | None:
    """The reward of a taskset: its own, the general one, or its workflow's."""
    at = f"{what}.default_reward_fn_type"
    name = text(own, "default_reward_fn_type")
    if name is None:
        at = f"{INPUT}.default_reward_fn_type"
        name = text(values, at) or WORKFLOWS[workflow_of(values, own, what)]
    if name is None and preset(values).advantage == "on_policy_distill":
        return None
    if name is None:
        raise ConfigError(
            f"{at}: must be given: {', '.join(REWARDS)}, or path/to/file.py:name of a function of yours."
        )
    if name in REWARDS or ":" in name:
        return name
    _refuse_typo(name, REWARDS, at=at)
    raise NotSupportedYet(
        f"{at}: {name}, a reward model or a function that a plugin registers, is coming, not built yet; here: "
        f"{', '.join(REWARDS)}, or path/to/file.py:name of a function of yours."
    )


def judged(values: Values, own: Own, what: str) -> dict[str, dict[str, Json]]:
    """The rewards of a taskset by label, as the native section has them."""
    name = _named(values, own, what)
    if name is None:
        _no_arguments(_section(own, "reward_fn_args"), f"{what}.reward_fn_args", ())
        return {}
    given, steps = _section(own, "reward_fn_args"), _section(own, "workflow_args")
    _no_arguments(steps, f"{what}.workflow_args", _BOXED if name == "math_boxed_reward" else ())
    label = name.rpartition(":")[2]
    reward: dict[str, Json] = {"function": REWARDS.get(name, name)}
    if name == "math_dapo_reward":
        _no_arguments(given, f"{what}.reward_fn_args", _OVERLONG)
        return {label: reward, **_overlong(given, what)}
    if name in REWARDS:
        _no_arguments(given, f"{what}.reward_fn_args", ())
    arguments = {**given, **steps}
    return {label: {**reward, "arguments": arguments} if arguments else reward}


def _section(own: Own, name: str) -> dict[str, Json]:
    """A section of the user's arguments, whole."""
    whole = own.get(name)
    if isinstance(whole, dict):
        return whole
    return {key.removeprefix(f"{name}."): value for key, value in own.items() if key.startswith(f"{name}.")}


def _no_arguments(given: Mapping[str, Json], at: str, known: Sequence[str]) -> None:
    if given.get("use_base"):
        raise NotSupportedYet(f"{at}: use_base, prompts without the chat template, is coming, not built yet.")
    for name in given:
        if name not in (*known, "use_base"):
            raise NotSupportedYet(
                f"{at}: {name} is coming, not built yet: nothing here reads it; here: {', '.join(known) or 'none'}."
            )


def _overlong(given: Mapping[str, Json], what: str) -> dict[str, dict[str, Json]]:
    """DAPO's penalty for long replies, a reward of its own."""
    at = f"{what}.reward_fn_args"
    factor, longest, cache = (given.get(key) for key in _OVERLONG[1:])
    if not given.get("enable_overlong_penalty"):
        if given:
            raise ConfigError(f"{at}.{next(iter(given))}: has no effect without enable_overlong_penalty.")
        return {}
    if factor is None or longest is None or cache is None:
        raise ConfigError(f"{at}: enable_overlong_penalty needs {', '.join(_OVERLONG[1:])}.")
    section = {
        "function": "overlong",
        "weight": factor,
        "arguments": {"max_tokens": longest, "buffer": cache},
    }
    return {"overlong": section}


# ---------------------------------------------------------------- who is judged by what


def taskset(values: Values) -> dict[str, Json]:
    """The training taskset by the names inside it."""
    return inside(values, TASKSET)


def rewards(values: Values) -> Mapping[str, Json]:
    """The rewards of training, and at weight 0 those that only evaluation has. A source that is not judged by all of
    them names its own."""
    if not online(values):
        return {}
    told = [judged(values, taskset(values), TASKSET)]
    told += [
        judged(values, own, f"{EVAL_TASKSETS}[{n}]") for n, own in enumerate(entries(values, EVAL_TASKSETS))
    ]
    every, names = _labelled(told)
    out: dict[str, Json] = {}
    for label, reward in every.items():
        out[f"rewards.{label}"] = reward if label in names[0] else {**reward, "weight": 0.0}
    if all(own == names[0] for own in names[1:]):
        return out
    weights = {label: every[label].get("weight", 1.0) for own in names[1:] for label in own}
    sources = ["data.train.0", *(f"data.eval.{n}" for n in range(len(names) - 1))]
    return {**out, "eval.reward": weights, **{f"{at}.rewards": own for at, own in zip(sources, names) if own}}


def _labelled(
    told: Sequence[Mapping[str, dict[str, Json]]],
) -> tuple[dict[str, dict[str, Json]], list[list[str]]]:
    """(all rewards by label, the labels of each taskset). Two rewards of one name get labels of their own."""
    every: dict[str, dict[str, Json]] = {}
    names: list[list[str]] = []
    for rewards in told:
        names.append([])
        for name, reward in rewards.items():
            label, number = name, 2
            while every.get(label, reward) != reward:
                label, number = f"{name}_{number}", number + 1
            every[label] = reward
            names[-1].append(label)
    return every, names

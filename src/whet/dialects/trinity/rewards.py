"""Trinity-RFT's workflows and rewards: which are of one turn, what each reward is here, who is judged by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from whet.config.environments import SEVERAL
from whet.config.keys import distance
from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.judges import (
    ANSWER_S,
    LABEL,
    NAMES,
    RUBRIC,
    RUBRIC_OF_SERVER,
    RULER,
    TrinityJudge,
    judge,
)
from whet.dialects.trinity.values import (
    EVAL_TASKSETS,
    INPUT,
    Native,
    Own,
    at_least,
    distills,
    draws_tasks,
    evaluating,
    functions,
    preset,
    section,
    text,
    training,
)
from whet.dialects.trinity.worlds import WORLDS, PlayedSet, TrinityWorld, environment
from whet.dialects.typed import choices
from whet.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """What a workflow of one turn brings along. The texts are whet's own: they ask for what the reward looks for."""

    reward: str | None = None
    """Where the file names none."""
    system: str = ""
    """The system message where the file gives none; with `of_reward` beside the workflow's own reward alone."""
    of_reward: bool = False
    with_think: str = ""
    """The system message in place of that, with workflow_args.with_think."""
    template: str = ""
    """The user's message; {prompt} is the row's."""
    fixed: bool = False
    """The file's system message is not read."""
    sampling: dict[str, float] | None = None
    """How it samples, once a task, whatever the file says."""
    world: TrinityWorld | None = None
    """What answers the replies, where there are several turns."""
    rows: str = ""
    """The function that makes its prompts of the rows' columns."""
    judge: TrinityJudge | None = None
    """Another model, whose score is the reward; `reward` is only measured."""


_BOXED_ANSWER = "Reason step by step, then write the final answer inside \\boxed{}."
_TAGGED = (
    "Work on the user's question in two parts. First think about it, inside <think> and </think>. Then give the "
    "result, inside <answer> and </answer>, as in:\n<think> how you get there </think>\n<answer> the result </answer>\n"
)
_THINK_BOXED = (
    "You solve problems of mathematics. First write how you reason, as <think>\n reasoning \n</think>\n. Then write "
    "the final answer in closed form inside \\boxed{}."
)
_QWEN = Workflow(
    reward="math_boxed_reward",
    system="You are a helpful assistant.",
    template=f"{{prompt}}\n{_BOXED_ANSWER}",
    fixed=True,
)
_QWEN_SAMPLING = {"temperature": 0.6, "top_p": 0.8, "top_k": 0}
ONE_TURN = {
    "simple_workflow": Workflow(),
    "math_workflow": Workflow(reward="math_reward", system=_TAGGED, of_reward=True),
    "math_boxed_workflow": Workflow(
        reward="math_boxed_reward", system=_BOXED_ANSWER, with_think=_THINK_BOXED
    ),
    "math_eval_workflow": replace(_QWEN, sampling=_QWEN_SAMPLING),
    "on_policy_distill_workflow": Workflow(),
    "on_policy_distill_math_workflow": _QWEN,
}
"""Workflows of one turn. All but the last two also with async_ before the name."""
_TOOL_CALLS = Workflow(reward="toolcall_reward", fixed=True, rows="whet.data.tool_n1:rows")

_THINK_FIRST = "You answer the user's question. First think about it, then give the answer."
_JUDGED = {
    "math_ruler_workflow": Workflow(reward="math_reward", system=_TAGGED, of_reward=True, judge=RULER),
    "rubric_judge_workflow": Workflow(system=_THINK_FIRST, judge=RUBRIC),
    "rubric_judge_openai_workflow": Workflow(system=_THINK_FIRST, judge=RUBRIC_OF_SERVER),
}

WORKFLOWS = {
    **ONE_TURN,
    **_JUDGED,
    "async_math_ruler_workflow": _JUDGED["math_ruler_workflow"],
    **{f"async_{name}": each for name, each in ONE_TURN.items() if "distill" not in name},
    **dict.fromkeys(("toolcall_workflow", "tool_call_workflow"), _TOOL_CALLS),
    **{name: Workflow(system=world.system, fixed=True, world=world) for name, world in WORLDS.items()},
}

_OWN_CODE = "it is code over Trinity-RFT's own interfaces"

TRINITY = "whet.rewards.trinity"
REWARDS = choices("trinity", "reward")
"""Trinity's rewards, and the function of each here."""

_ACCURACY = {
    "accuracy_reward": "",
    "math_dapo_reward": "",
    "math_reward": "/accuracy",
    "math_boxed_reward": "/accuracy",
}
"""Rewards that report the metric accuracy, and which part of theirs it is; '' for all of it."""
_WITHOUT = ("format_reward", "countdown_reward", "toolcall_reward", None)
"""Those that do not: the whole reward stands for it."""
_OVERLONG = ("enable_overlong_penalty", "penalty_factor", "max_response_length", "cache_length")
_BOXED = ("with_think", "format_score_coef")

# ---------------------------------------------------------------- names


def workflow(values: Values, own: Own, what: str) -> str:
    """The workflow of a taskset: its own, or the general one of training or of evaluation. NotSupportedYet unless it is
    one turn."""
    at, name = f"{what}.default_workflow_type", text(own, "default_workflow_type")
    if name is None:
        evaluates = what.startswith(EVAL_TASKSETS) and text(values, f"{INPUT}.default_eval_workflow_type")
        at = f"{INPUT}.default_eval_workflow_type" if evaluates else f"{INPUT}.default_workflow_type"
        name = text(values, at) or "simple_workflow"
    if name in WORKFLOWS:
        return name
    others = functions("workflow")
    if name not in others:
        _refuse_typo(name, WORKFLOWS, at=at)
    why = others[name].reason if name in others else _OWN_CODE
    raise NotSupportedYet(
        f"{at}: {name} is not read: {why}. Here: {', '.join(ONE_TURN)}, {', '.join(_JUDGED)}, toolcall_workflow, "
        f"{', '.join(WORLDS)}. For other turns write an environment (docs/environments.md), and in the file "
        "default_workflow_type: simple_workflow and whet.rollout.env.make: path/to/file.py:NAME."
    )


def is_judged(values: Values) -> bool:
    """Whether a model judges the replies to some taskset."""
    return any(WORKFLOWS[workflow(values, *each)].judge is not None for each in sets_of(values))


def train_names(values: Values) -> list[str]:
    """Names of the sources of training."""
    return [text(own, "name") or f"taskset_{n}" for n, (own, _) in enumerate(training(values))]


def eval_names(values: Values) -> list[str]:
    """Names of the sources of evaluation."""
    return [str(own.get("name") or f"eval_taskset_{n}") for n, (own, _) in enumerate(evaluating(values))]


def sets_of(values: Values) -> list[tuple[Own, str]]:
    """All tasksets, those of training first, each with its key."""
    return [*(training(values) if draws_tasks(values) else []), *evaluating(values)]


def gives_one(values: Values) -> bool:
    """Whether the workflow of training gives one experience a rollout, and not one a turn."""
    try:
        world = world_of(values, *training(values)[0])
    except NotSupportedYet:
        return False
    return world is None or not world.by_turn


def world_of(values: Values, own: Own, what: str) -> TrinityWorld | None:
    """What answers the replies to a taskset."""
    return WORKFLOWS[workflow(values, own, what)].world


def samples_as_the_model(values: Values) -> bool:
    """Whether some taskset is sampled with the model's arguments alone."""
    worlds = (world_of(values, *each) for each in sets_of(values))
    return any(world is not None and not world.rollout_args for world in worlds)


def is_plain(values: Values, own: Own, what: str) -> bool:
    """Whether the prompts of a taskset are plain text, which math_boxed_workflow writes for base models (use_base)."""
    return bool(section(own, "workflow_args").get("use_base")) and "math_boxed" in workflow(values, own, what)


def system(values: Values, own: Own, what: str) -> str:
    """The system message of a taskset that names no column of them: its own, else its workflow's; '' for none."""
    brought, given = WORKFLOWS[workflow(values, own, what)], own.get("format.system_prompt")
    if given not in (None, "None", "null") and not brought.fixed:
        return str(given)
    if brought.of_reward and _reward(values, own, what) != brought.reward:
        return ""
    return (section(own, "workflow_args").get("with_think") and brought.with_think) or brought.system


def _reward(values: Values, own: Own, what: str) -> str | None:
    """The reward of a taskset: its own, the general one, or its workflow's. None: a world gives it."""
    at, name = f"{what}.default_reward_fn_type", text(own, "default_reward_fn_type")
    kind = workflow(values, own, what)
    if name is None:
        at = f"{INPUT}.default_reward_fn_type"
        name = text(values, at)
    alone = WORKFLOWS[kind].judge is not None and WORKFLOWS[kind].reward is None
    if name is not None and (WORKFLOWS[kind].world or WORKFLOWS[kind].rows or alone):
        raise ConfigError(f"{at}: {name} has no effect: {kind} has a reward of its own; leave it out.")
    name = name or WORKFLOWS[kind].reward
    if name is None and (distills(values) or WORKFLOWS[kind].world or alone):
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


def _refuse_typo(name: str, known: Collection[str], *, at: str) -> None:
    """ConfigError for a name that is a known one, save a letter or two."""
    meant = [one for one in known if distance(name, one) <= 2]
    if meant:
        raise ConfigError(f"{at}: {name} is not known; did you mean {meant[0]}?")


# ---------------------------------------------------------------- one taskset


def _judged(values: Values, own: Own, what: str) -> dict[str, Native]:
    """The rewards of a taskset by label, as the native section has them: beside a judge only measured."""
    found, kind = _by_function(values, own, what), WORKFLOWS[workflow(values, own, what)]
    if kind.judge is None:
        return found
    measured = {label: {**reward, "weight": 0.0} for label, reward in found.items()}
    return {**measured, LABEL: judge(values, kind.judge, own, what)}


def _by_function(values: Values, own: Own, what: str) -> dict[str, Native]:
    """Those that are functions. NotSupportedYet for arguments that nothing reads."""
    name = _reward(values, own, what)
    given = section(own, "reward_fn_args")
    plain, steps = is_plain(values, own, what), dict(section(own, "workflow_args"))
    if plain or steps.get("use_base") is False:
        del steps["use_base"]
    known = {"math_dapo_reward": _OVERLONG, "rlcr_reward": ("weights",)}.get(name or "", ())
    if name is None or name in REWARDS:
        _only(given, f"{what}.reward_fn_args", known)
    if name is None:
        kind = WORKFLOWS[workflow(values, own, what)]
        if kind.world is None:
            named = kind.judge is not None and kind.judge.named
            _only(steps, f"{what}.workflow_args", NAMES if named else ())
        return {}
    _only(steps, f"{what}.workflow_args", _BOXED if name == "math_boxed_reward" else ())
    reward: Native = {"function": REWARDS.get(name, name)}
    if name == "math_dapo_reward":
        if at_least(values, "0.6.0"):  # 1 or -1, before 1 or 0
            reward["function"] = f"{TRINITY}:math_dapo_reward"
        return {name: reward, **_overlong(given, what)}
    arguments = {**given, **steps}
    return {name.rpartition(":")[2]: {**reward, "arguments": arguments} if arguments else reward}


def _only(given: Own, at: str, known: Sequence[str]) -> None:
    """NotSupportedYet for arguments that nothing here reads."""
    for name in given:
        if name not in known:
            raise NotSupportedYet(
                f"{at}: {name} is coming, not built yet: nothing here reads it; here: {', '.join(known) or 'none'}."
            )


def _overlong(given: Own, what: str) -> dict[str, Native]:
    """DAPO's penalty for long replies, a reward of its own."""
    at = f"{what}.reward_fn_args"
    factor, longest, cache = (given.get(key) for key in _OVERLONG[1:])
    if not given.get("enable_overlong_penalty"):
        if given:
            raise ConfigError(f"{at}.{next(iter(given))}: has no effect without enable_overlong_penalty.")
        return {}
    if factor is None or longest is None or cache is None:
        raise ConfigError(f"{at}: enable_overlong_penalty needs {', '.join(_OVERLONG[1:])}.")
    arguments = {"max_tokens": longest, "buffer": cache}
    return {"overlong": {"function": "overlong", "weight": factor, "arguments": arguments}}


# ---------------------------------------------------------------- all of them


def rewards(values: Values) -> Native:
    """The rewards of training, and at weight 0 those that only evaluation has. A source that is not judged by all of
    them names its own."""
    sets = sets_of(values)
    if not sets:
        return {}
    n_train = len(sets) - len(evaluating(values))
    every, names = _labelled([_judged(values, own, what) for own, what in sets])
    names_of_sources = [*train_names(values)[:n_train], *eval_names(values)]
    out = environment(
        [PlayedSet(name, world_of(values, *each), *each) for name, each in zip(names_of_sources, sets)]
    )
    out |= _winners(values, sets[:n_train])
    several = out.get("rollout.env.make") == SEVERAL
    trained = {label for own in names[: n_train or len(names)] for label in own}
    if any("url" in (reward.get("arguments") or {}) for reward in every.values()):
        out["reward_workers.timeout_s"] = ANSWER_S + 1.0
    for label, reward in every.items():
        out[f"rewards.{label}"] = reward if label in trained else {**reward, "weight": 0.0}
    if all(own == names[0] for own in names[1:]):
        return out
    weights = {label: every[label].get("weight", 1.0) for own in names[n_train:] for label in own}
    sources = [f"data.train.{n}" for n in range(n_train)]
    sources += [f"data.eval.{n}" for n in range(len(names) - n_train)]
    out |= {"eval.reward": weights} if weights else {}
    return {**out, **{f"{at}.rewards": own for at, own in zip(sources, names) if own or several}}


def _winners(values: Values, sets: Sequence[tuple[Own, str]]) -> Native:
    """What is trained on where a workflow of training gives the episodes alone that are paid 1."""
    worlds = [world_of(values, *each) for each in sets]
    alone = [world is not None and world.winners for world in worlds]
    if not any(alone):
        return {}
    if preset(values).recipe != "raft" or not all(alone):
        raise ConfigError(
            f"{sets[alone.index(True)][1]}.default_workflow_type: its episodes have no reward, so only "
            "algorithm_type: raft learns from them, and from all tasksets of training alike."
        )
    return {"algorithm.groups.min_reward": 1.0}


def accuracy(values: Values, at: str) -> list[str]:
    """The reward or its part that is the metric accuracy of the tasksets of training; none: the whole reward stands for
    it. NotSupportedYet where it is not reported here. at: the key that asks."""
    sets = sets_of(values)
    _, labels = _labelled([_judged(values, own, what) for own, what in sets])
    found: list[list[str]] = []
    for (own, what), (*names,) in zip(training(values) if draws_tasks(values) else [], labels):
        name, judge = _reward(values, own, what), WORKFLOWS[workflow(values, own, what)].judge
        if (judge and name) or name not in (*_ACCURACY, *_WITHOUT):
            why = "a judge gives the reward" if judge else f"{name} does not report it"
            raise NotSupportedYet(
                f"{at}: the metric accuracy of {what}: {why} here, so it is coming, not built yet; here: "
                f"{', '.join(_ACCURACY)}. Leave the operator out and write whet.algorithm: {{dynamic_sampling: true, "
                "groups: {uniform: {by: [NAME/PART], above: NUMBER}}}."
            )
        found.append([names[0] + _ACCURACY[name]] if name in _ACCURACY else [])
    if any(one != found[0] for one in found):
        raise NotSupportedYet(
            f"{at}: tasksets whose accuracy is told by several rewards ({found}) are coming, not built yet; here: one "
            "reward for all tasksets of training."
        )
    return found[0] if found else []


def _labelled(told: Sequence[Mapping[str, Native]]) -> tuple[dict[str, Native], list[list[str]]]:
    """(all rewards by label, the labels of each taskset). Two rewards of one name get labels of their own."""
    every: dict[str, Native] = {}
    names: list[list[str]] = []
    for rewards in told:
        names.append([])
        for name, reward in rewards.items():
            label, count = name, 2
            while every.get(label, reward) != reward:
                label, count = f"{name}_{count}", count + 1
            every[label] = reward
            names[-1].append(label)
    return every, names

"""What Trinity-RFT's `buffer` section means: batch sizes, the length of a run, tasksets, sampling, token limits."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.mix import step
from whet.dialects.trinity.presets import online, preset, repeat_times
from whet.dialects.trinity.replies import Own, rows_of, system
from whet.dialects.trinity.rewards import taskset, workflow_of
from whet.dialects.trinity.values import (
    EVAL_TASKSETS,
    TASKSET,
    count,
    entries,
    given,
    known_as,
    text,
    whole,
)
from whet.types import ConfigError, Json

ENGINE = "explorer.rollout_model"
RATIO = "explorer.over_rollout.ratio"

# ---------------------------------------------------------------- how much

MODES = ("both", "train", "explore", "bench", "serve")


def mode(values: Values) -> Mapping[str, Json]:
    """The processes of a run. What learns from a file does not explore: there it is train, in one process."""
    wanted, name = str(values["mode"]), values["algorithm.algorithm_type"]
    known_as(wanted, dict.fromkeys(MODES[:4]), key="mode", coming=MODES[4:])
    if online(values):
        return {"mode": wanted}
    if wanted == "bench":
        raise NotSupportedYet(
            f"mode: bench with {name} is coming, not built yet; `whet eval` evaluates its exports."
        )
    if wanted != "train":
        raise ConfigError(f"mode: {name} learns from a file and does not explore; write mode: train.")
    return {}


def apart(values: Values) -> bool:
    """Whether explorers and trainer are processes of their own, which meet in a store."""
    return online(values) and str(values["mode"]) in ("train", "explore")


def batch(values: Values) -> Mapping[str, Json]:
    """buffer.batch_size counts tasks, buffer.train_batch_size experiences: batch_size * repeat_times of them a step."""
    base, size = preset(values), whole(values, "buffer.train_batch_size")
    if base.kind != "online":
        if size is None:
            raise ConfigError(
                f"buffer.train_batch_size: {values['algorithm.algorithm_type']} needs it: the examples of one step."
            )
        return {"train.tasks_per_step": _divided(values, size)}
    tasks, times = count(values, "buffer.batch_size"), repeat_times(values)
    if base.mixes:
        own, experts = step(values, size or tasks * times)
        _divided(values, own * times + experts)
        return {"train.tasks_per_step": own + experts, "rollout.group_size": times}
    spare = spared(values, tasks)
    if spare:
        return _with_spare(values, tasks - spare, spare=spare)
    if size is not None and size != tasks * times:
        raise NotSupportedYet(
            f"buffer.train_batch_size: {size} is not buffer.batch_size * algorithm.repeat_times = {tasks} * {times} = "
            f"{tasks * times}: training on more or fewer experiences than a step explores is coming, not built yet."
        )
    _divided(values, tasks * times)
    return {"train.tasks_per_step": tasks, "rollout.group_size": times}


def spared(values: Values, tasks: int) -> int:
    """Tasks that a step does not wait for: it has enough with ceil((1 - ratio) * batch_size)."""
    ratio = values[RATIO]
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise ConfigError(f"{RATIO}: got {ratio!r}, expected a number from 0, below 1.")
    return tasks - ceil((1 - Fraction(str(ratio))) * tasks)


def _with_spare(values: Values, need: int, *, spare: int) -> dict[str, Json]:
    """A step of the tasks that are needed, with more of them asked than that."""
    size, times = whole(values, "buffer.train_batch_size"), repeat_times(values)
    if str(values["synchronizer.sync_style"]) == "fixed":
        raise ConfigError(
            f"{RATIO}: {values[RATIO]} does not go with synchronizer.sync_style: fixed; write 0, or another style."
        )
    if size != need * times:
        raise NotSupportedYet(
            f"buffer.train_batch_size: {size} with {RATIO}: {values[RATIO]} is coming, not built yet: a step here "
            f"trains on the {need} tasks that it waits for, so write {need * times} (times repeat_times = {times})."
        )
    _divided(values, size)
    return {"train.tasks_per_step": need, "rollout.group_size": times, "rollout.spare_tasks": spare}


def trainers(values: Values) -> int:
    """GPUs that the explorer leaves to the trainer; 0 or less: the file does not say."""
    nodes = whole(values, "cluster.node_num") or 1
    engines = count(values, f"{ENGINE}.engine_num") * count(values, f"{ENGINE}.tensor_parallel_size")
    for n, own in enumerate(entries(values, "explorer.auxiliary_models")):
        named = {f"explorer.auxiliary_models[{n}].{key}": value for key, value in own.items()}
        sizes = (f"explorer.auxiliary_models[{n}].{key}" for key in ("engine_num", "tensor_parallel_size"))
        first, second = (count(named, key) if key in named else 1 for key in sizes)
        engines += first * second
    each = whole(values, "cluster.gpu_per_node", least=0) or 0
    return nodes * each - (engines if online(values) else 0)


def _divided(values: Values, size: int) -> int:
    """Trinity's rule: the trainer's GPUs divide train_batch_size."""
    left = trainers(values)
    if left > 0 and size % left:
        raise ConfigError(
            f"buffer.train_batch_size: {size} must be divisible by the number of GPUs of the trainer, {left} "
            "(cluster.node_num * cluster.gpu_per_node, less engine_num * tensor_parallel_size of "
            "explorer.rollout_model and explorer.auxiliary_models)."
        )
    return size


def length(values: Values) -> Mapping[str, Json]:
    """Steps of the explorer or of the trainer, whichever ends first; else passes over the taskset."""
    steps = [
        n for key in ("buffer.total_steps", "trainer.total_steps") if (n := whole(values, key)) is not None
    ]
    return {"train.steps": min(steps)} if steps else {"train.epochs": values["buffer.total_epochs"]}


# ---------------------------------------------------------------- tasksets

ORDERS = {"sequential": "sequential", "shuffle": "shuffle", "offline_easy2hard": "hard_first"}
"""Trinity's easy2hard puts the largest feature first: there it means easy, here hard."""


def tasks(values: Values) -> Mapping[str, Json]:
    """The training taskset: files, columns, one user message a task, in the order of the file."""
    if not online(values):
        return {}
    own = taskset(values)
    workflow_of(values, own, TASKSET)
    times = given(own.get("repeat_times"))
    if times is not None and times != repeat_times(values):
        raise ConfigError(
            f"{TASKSET}.repeat_times: {times} is not algorithm.repeat_times = {repeat_times(values)}, which is what "
            "Trinity uses for training; leave it out."
        )
    source = _source(own, TASKSET, at="data.train.0")
    return {"data.train.0.name": "taskset_0", **source, "data.chat": True, **_order(own)}


def _order(own: Own) -> dict[str, Json]:
    """task_selector: the order of the tasks. A seed means something to shuffle alone."""
    at, kind = f"{TASKSET}.task_selector", str(given(own.get("task_selector.selector_type")) or "sequential")
    known_as(kind, ORDERS, key=f"{at}.selector_type", coming=("random", "difficulty_based"))
    features, seed = own.get("task_selector.feature_keys") or [], own["task_selector.seed"]
    if kind != "offline_easy2hard":
        if features:
            raise ConfigError(f"{at}.feature_keys: has no effect with selector_type: {kind}; leave it out.")
        return {"data.order": ORDERS[kind], "data.seed": seed}
    if len(features) != 1:
        raise NotSupportedYet(
            f"{at}.feature_keys: {features} is coming, not built yet; here: one column of numbers."
        )
    return {"data.order": ORDERS[kind], "data.seed": seed, "data.train.0.difficulty": features[0]}


def _source(own: Own, what: str, *, at: str) -> dict[str, Json]:
    storage = str(own.get("storage_type") or "file")
    if storage == "queue":
        raise ConfigError(f"{what}.storage_type: tasks cannot come from a queue; here: file.")
    known_as(storage, {"file": 1}, key=f"{what}.storage_type", coming=("sql",))
    name, prefix = text(own, "name"), text(own, "format.reply_prefix")
    return {
        **rows_of(own, what, at=at),
        f"{at}.prompt": own.get("format.prompt_key") or "prompt",
        f"{at}.answer": own.get("format.response_key") or "response",
        **({f"{at}.name": name} if name else {}),
        **system(own, at=at),
        **({f"{at}.reply_prefix": prefix} if prefix else {}),
    }


def evaluation(values: Values) -> Mapping[str, Json]:
    """Evaluation tasksets, which the explorer asks when the weights are synchronized, each in its own way."""
    sets = entries(values, EVAL_TASKSETS)
    if not sets or not online(values):
        return {}
    out: dict[str, Json] = {}
    for n, own in enumerate(sets):
        what, name = f"{EVAL_TASKSETS}[{n}]", own.get("name") or f"eval_taskset_{n}"
        workflow_of(values, own, what)
        out |= _source(own, what, at=f"data.eval.{n}") | {f"data.eval.{n}.name": name}
    times = [whole(own, "repeat_times") or 1 for own in sets]
    sampled = [_sampled(values, own) for own in sets]
    out |= {"eval.samples": times[0]} | {f"eval.sampling.{key}": value for key, value in sampled[0].items()}
    special: dict[str, Json] = {}
    for n in range(len(sets)):
        other: dict[str, Json] = {} if times[n] == times[0] else {"samples": times[n]}
        if sampled[n] != sampled[0]:
            other["sampling"] = {"max_tokens": limits(values)[1], **sampled[n]}
        special |= {out[f"data.eval.{n}.name"]: other} if other else {}
    interval = count(values, "synchronizer.sync_interval")
    every = max(count(values, "explorer.eval_interval") // interval, 1) * interval
    return out | {
        "data.exclude_eval": False,
        "eval.every": every,
        "eval.at_start": values["explorer.eval_on_startup"],
        "eval.at_end": False,
        **({"eval.sources": special} if special else {}),
    }


# ---------------------------------------------------------------- sampling


def _sampled(values: Values, own: Own) -> dict[str, Json]:
    """vLLM's sampling arguments of a taskset, the model's where it gives none; top_k -1 is off."""
    out: dict[str, Json] = {}
    for key in ("temperature", "top_p", "top_k"):
        value = given(own.get(f"rollout_args.{key}"))
        out[key] = values[f"model.{key}"] if value is None else value
    out["top_k"] = 0 if out["top_k"] == -1 else out["top_k"]
    longest = given(own.get("rollout_args.max_tokens"))
    return out if longest is None else out | {"max_tokens": longest}


def sampling(values: Values) -> Mapping[str, Json]:
    """How training samples; the trainer divides by the same temperature."""
    own = {key: value for key, value in taskset(values).items() if key != "rollout_args.max_tokens"}
    return {
        **{f"rollout.sampling.{key}": value for key, value in _sampled(values, own).items()},
        "rollout.sampling.repetition_penalty": values["model.repetition_penalty"],
        "rollout.sampling.min_tokens": min(
            count(values, "model.min_response_tokens", least=0), limits(values)[1]
        ),
    }


def limits(values: Values) -> tuple[int, int]:
    """(prompt, response) in tokens: of the two and their sum max_model_len, two decide."""
    both, prompt, response = (
        whole(values, f"model.{key}") for key in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    if both is None and (prompt is None or response is None):
        raise ConfigError(
            "model.max_model_len: give it, or both model.max_prompt_tokens and model.max_response_tokens, whose "
            "sum it is."
        )
    if prompt is None:
        prompt = (both or 0) // 2 if response is None else (both or 0) - response
    if response is None:
        response = (both or 0) - prompt
    if prompt < 1 or response < 1 or (both is not None and prompt + response > both):
        raise ConfigError(
            f"model.max_model_len: max_prompt_tokens + max_response_tokens must not exceed it, and leave both at "
            f"least 1; got {prompt} + {response} and {both}."
        )
    return prompt, response


def token_limits(values: Values) -> Mapping[str, Json]:
    """Longest prompt and reply. Trinity trains on no token of a prompt that it had to cut, so here it is left out.

    Given replies are bounded together with their prompt, and never cut.
    """
    prompt, response = limits(values)
    if not online(values):
        both = whole(values, "model.max_model_len") or prompt + response
        total = ("data.max_total_tokens", "data.max_prompt_tokens", "rollout.sampling.max_tokens")
        return {**dict.fromkeys(total, both), "data.overlong": "error"}
    own = given(values.get(f"{TASKSET}.rollout_args.max_tokens"))
    cut = values["model.enable_prompt_truncation"]
    return {
        "data.max_prompt_tokens": prompt,
        "data.overlong": "filter" if cut else "error",
        "rollout.sampling.max_tokens": response if own is None else own,
    }

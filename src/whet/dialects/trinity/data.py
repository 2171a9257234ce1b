"""What Trinity-RFT's `buffer` section means: batch sizes, the length of a run, tasksets, files of replies, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, prod
from pathlib import Path

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.trinity.algorithm import OPERATORS
from whet.dialects.trinity.loss import step, strategy, weight
from whet.dialects.trinity.rewards import (
    WORKFLOWS,
    eval_names,
    gives_one,
    is_plain,
    sets_of,
    system,
    train_names,
    workflow,
    world_of,
)
from whet.dialects.trinity.selectors import order_of_sets, order_of_tasks
from whet.dialects.trinity.values import (
    AUXILIARY,
    BY_EXPLORER,
    EVAL_TASKSETS,
    EXPERIENCES,
    TASKSET,
    Native,
    Own,
    at_least,
    draws_tasks,
    entries,
    evaluating,
    given,
    in_rounds,
    inside,
    known_as,
    online,
    preset,
    repeat_times,
    text,
    training,
)
from whet.types import ConfigError

ENGINE = "explorer.rollout_model"
RATIO = "explorer.over_rollout.ratio"

# ---------------------------------------------------------------- how much


MODES = {"both": "both", "train": "train", "explore": "explore", "bench": "eval", "colocate": "both"}


def mode(values: Values) -> Native:
    """The processes of a run."""
    wanted = str(values["mode"])
    known_as(wanted, MODES, key="mode", coming=("serve",))
    return {"mode": MODES[wanted]}


def apart(values: Values) -> bool:
    """Whether explorers and trainer are processes of their own, which meet in a store."""
    return online(values) and str(values["mode"]) in ("train", "explore")


def has_services(values: Values) -> bool:
    """Whether an operator asks Data-Juicer."""
    named = [own.get("name") for own in entries(values, OPERATORS)]
    return bool(values["data_processor.task_pipeline.operators"]) or "data_juicer" in named


def batch(values: Values) -> Native:
    """buffer.batch_size counts tasks, buffer.train_batch_size experiences: batch_size * repeat_times of them a step."""
    base, size = preset(values), values["buffer.train_batch_size"] or None
    if base.kind != "online":
        if size is None:
            raise ConfigError(
                f"buffer.train_batch_size: {values['algorithm.algorithm_type']} needs it: the examples of one step."
            )
        return {"train.tasks_per_step": _divided(values, size)}
    tasks, times = values["buffer.batch_size"], repeat_times(values)
    if values["mode"] == "train" and size and size % times == 0:
        tasks = size // times  # a trainer by itself does not read batch_size, which is the explorers'
    if base.mixes:
        own, experts = step(values)
        _divided(values, own * times + experts)
        return {"train.tasks_per_step": own + experts, "rollout.group_size": times}
    need = _needed(values, tasks)
    if need < tasks:
        return _with_spare(values, need, spare=tasks - need)
    if size not in (None, tasks * times) and gives_one(values):
        tasks = _of_the_trainer(values, size, tasks * times)
    _divided(values, size or tasks * times)
    return {"train.tasks_per_step": tasks, "rollout.group_size": times}


def _of_the_trainer(values: Values, size: int, explored: int) -> int:
    """Tasks of a step of the trainer that is of another size than the explorer's: it takes what it needs from the
    queue, and where it decides about syncs, the explorer's steps count nothing."""
    style, times = str(values["synchronizer.sync_style"]), repeat_times(values)
    if style in ("fixed", *BY_EXPLORER) or size % times or values["buffer.total_steps"]:
        raise NotSupportedYet(
            f"buffer.train_batch_size: {size} is not buffer.batch_size * algorithm.repeat_times = "
            f"{values['buffer.batch_size']} * {times} = {explored}: steps of the trainer and of the explorer of "
            "different sizes are coming, not built yet; here: a multiple of repeat_times, with "
            "synchronizer.sync_style: trainer_driven or fully_async, and without buffer.total_steps."
        )
    return size // times


def _needed(values: Values, tasks: int) -> int:
    """Tasks that a step waits for: it has enough with ceil((1 - ratio) * batch_size)."""
    ratio = values[RATIO]
    if not 0 <= ratio < 1:
        raise ConfigError(f"{RATIO}: got {ratio!r}, expected a number from 0, below 1.")
    return ceil((1 - Fraction(str(ratio))) * tasks)


def _with_spare(values: Values, need: int, *, spare: int) -> Native:
    """A step of the tasks that are needed, with more of them asked than that."""
    size, times = values["buffer.train_batch_size"], repeat_times(values)
    if values["synchronizer.sync_style"] == "fixed":
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


_OF_AN_ENGINE = ("engine_num", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")


def trainers(values: Values) -> int:
    """GPUs that the explorer leaves to the trainer, all of them where it is a process of its own; 0 or less: the file
    does not say."""
    engines = 0
    for own in (inside(values, ENGINE), *entries(values, "explorer.auxiliary_models")):
        engines += prod(own.get(key) or 1 for key in _OF_AN_ENGINE)
    nodes, each = values["cluster.node_num"] or 1, values["cluster.gpu_per_node"] or 0
    alone = not online(values) or values["mode"] == "train"
    left: int = nodes * each - (0 if alone else engines)
    return left


def _divided(values: Values, size: int) -> int:
    """Trinity's rule: the trainer's GPUs divide train_batch_size; from 0.5.2 on those that share a sequence are one. It
    asks nothing of a process without a trainer."""
    left = 0 if values["mode"] in ("explore", "bench") else trainers(values)
    if left > 0 and at_least(values, "0.5.2"):
        left = max(left // values["trainer.ulysses_sequence_parallel_size"], 1)
    if left > 0 and size % left:
        raise ConfigError(
            f"buffer.train_batch_size: {size} must be divisible by the number of GPUs of the trainer, {left} "
            "(cluster.node_num * cluster.gpu_per_node, less engine_num * tensor_parallel_size of "
            "explorer.rollout_model and explorer.auxiliary_models)."
        )
    return size


# ---------------------------------------------------------------- sources

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def rows_of(own: Own, what: str, *, at: str) -> Native:
    """Where the rows are: a file, or a split (and subset) of a dataset folder. Nothing is downloaded."""
    path, split, subset = given(own.get("path")), str(own.get("split") or "train"), text(own, "subset_name")
    if path is None:
        raise ConfigError(f"{what}.path: must be given: a dataset folder, or a file ({', '.join(SUFFIXES)}).")
    if Path(str(path)).suffix not in SUFFIXES:
        return {f"{at}.path": path, f"{at}.split": split, **({f"{at}.subset": subset} if subset else {})}
    for key, value, only in (("split", split, "train"), ("subset_name", subset, None)):
        if value != only:
            raise ConfigError(f"{what}.{key}: {path} is one file, whose only split is train, not {value!r}.")
    return {f"{at}.path": path}


def _system(own: Own, message: str | None, *, at: str) -> Native:
    """The system message: of the row (system_prompt_key), else `message`, of them all."""
    column = text(own, "format.system_prompt_key")
    if column:
        return {f"{at}.system_prompt_column": column}
    return {f"{at}.system_prompt": message} if message else {}


# ---------------------------------------------------------------- tasksets


def tasks(values: Values) -> Native:
    """The tasksets of training: files, columns, one user message a task, their order. With several of them an epoch has
    each task once, and they alternate at random."""
    if not draws_tasks(values):
        if values["mode"] == "train" and in_rounds(values):
            raise NotSupportedYet(
                f"{TASKSET}.path: mode: train without a taskset and sync_style: fixed, where the trainer says which "
                "task is played when, is coming, not built yet; write explorer_input as in the explorers' file, or "
                "another sync_style."
            )
        return _chat(values) if entries(values, EVAL_TASKSETS) else {}
    sets = training(values)
    out: Native = {"data.mixing": "proportional"} if len(sets) > 1 else {}
    names = train_names(values)
    for n, (own, what) in enumerate(sets):
        if own.get("repeat_times") not in (None, repeat_times(values)):
            raise ConfigError(
                f"{what}.repeat_times: {own['repeat_times']} is not algorithm.repeat_times = {repeat_times(values)}, "
                "which is what Trinity uses for training; leave it out."
            )
        at = f"data.train.{n}"
        out |= {f"{at}.name": names[n], **_source(values, own, what, at=at)}
    return {
        **out,
        **_chat(values),
        **order_of_sets(sets, values["buffer.batch_size"]),
        **({"algorithm.groups.truncated": "mask"} if _masks_truncated(values, sets) else {}),
    }


def _masks_truncated(values: Values, sets: Sequence[tuple[Own, str]]) -> bool:
    """Whether truncated replies are not trained on, which math_boxed_workflow says from 0.6.0 on."""
    boxed = ["math_boxed" in workflow(values, own, what) for own, what in sets]
    if not at_least(values, "0.6.0") or not any(boxed):
        return False
    if not all(boxed):
        raise NotSupportedYet(
            f"{sets[boxed.index(False)][1]}.default_workflow_type: beside math_boxed_workflow, which alone masks "
            "truncated replies, is coming, not built yet; here: for all tasksets of training or none."
        )
    return True


def _chat(values: Values) -> Native:
    """The chat template for all tasksets. Where one has plain prompts (use_base), the others' system messages ask for
    it."""
    sets = sets_of(values)
    plain = [is_plain(values, own, what) for own, what in sets]
    if not any(plain):
        return {"data.chat": True}
    for (own, what), is_text in zip(sets, plain):
        if not is_text and not _system(own, system(values, own, what), at=""):
            raise NotSupportedYet(
                f"{what}.format.system_prompt: none, beside a taskset with workflow_args.use_base: plain prompts "
                "beside chats without a system message are coming, not built yet; give it a system_prompt, or use_base."
            )
    return {}


def _plain(own: Own, what: str, message: str, *, at: str) -> Native:
    """The text around the prompt of a base model."""
    for key in ("format.system_prompt_key", "format.reply_prefix"):
        if text(own, key):
            raise ConfigError(f"{what}.{key}: has no effect with workflow_args.use_base; leave it out.")
    begins = f"System:{message}\n" if message else ""
    return {f"{at}.template": f"{begins}User:\n{{prompt}}\nAssistant:\n"}


def _source(values: Values, own: Own, what: str, *, at: str) -> Native:
    plain, message = is_plain(values, own, what), system(values, own, what)
    kind = WORKFLOWS[workflow(values, own, what)]
    storage = str(own.get("storage_type") or "file")
    if storage == "queue":
        raise ConfigError(f"{what}.storage_type: whet reads tasks from files only; write file.")
    known_as(storage, {"file": 1}, key=f"{what}.storage_type", coming=("sql",))
    prefix = text(own, "format.reply_prefix")
    if kind.world is not None or kind.rows:
        if prefix:
            raise ConfigError(f"{what}.format.reply_prefix: has no effect with this workflow; leave it out.")
        return _made(own, what, message, kind.rows, at=at)
    return {
        **rows_of(own, what, at=at),
        f"{at}.prompt": own.get("format.prompt_key") or "prompt",
        f"{at}.answer": own.get("format.response_key") or "response",
        **(_plain(own, what, message, at=at) if plain else _system(own, message, at=at)),
        **({f"{at}.template": kind.template} if kind.template else {}),
        **({f"{at}.reply_prefix": prefix} if prefix else {}),
    }


def _made(own: Own, what: str, message: str, rows: str, *, at: str) -> Native:
    """Rows whose prompts an environment asks, or a function makes of their columns."""
    if not rows:
        return {**rows_of(own, what, at=at), f"{at}.prompt": None, f"{at}.system_prompt": message}
    places = {key.removeprefix(f"{at}."): value for key, value in rows_of(own, what, at=at).items()}
    return {f"{at}.function": rows, f"{at}.arguments": places}


def evaluation(values: Values) -> Native:
    """Evaluation tasksets, which the explorer asks when the weights are synchronized, each in its own way."""
    sets = evaluating(values)
    if not sets or not online(values):
        return {}
    out: Native = {}
    for n, (each, name) in enumerate(zip(sets, eval_names(values))):
        at = f"data.eval.{n}"
        out |= _source(values, *each, at=at) | {f"{at}.name": name}
    brought = [WORKFLOWS[workflow(values, *each)].sampling for each in sets]
    times = [1 if fixed else own.get("repeat_times") or 1 for (own, _), fixed in zip(sets, brought)]
    longest = max(_lengths(values).values())
    sampled = [
        _below(longest, _length(values, *each)) | _sampled(values, *each) | (fixed or {})
        for each, fixed in zip(sets, brought)
    ]
    out |= {"eval.samples": times[0]} | {f"eval.sampling.{key}": value for key, value in sampled[0].items()}
    special: Native = {}
    for n, (_, what) in enumerate(sets):
        other: Native = {} if times[n] == times[0] else {"samples": times[n]}
        if sampled[n] != sampled[0]:
            other["sampling"] = {"max_tokens": longest, **sampled[n]}
        name = out[f"data.eval.{n}.name"]
        if special.setdefault(name, other) != other:
            raise ConfigError(
                f"{what}.name: {name} is also the name of another taskset of evaluation, which is "
                "sampled otherwise; give each a name of its own."
            )
    special = {name: other for name, other in special.items() if other}
    interval, penalty = values["synchronizer.sync_interval"], values["model.repetition_penalty"]
    return out | {
        # the rollout model's own, which no taskset can change; here an evaluation has none of its own
        **({"eval.sampling.repetition_penalty": penalty} if penalty != 1 else {}),
        "data.exclude_eval": False,
        "eval.interval": max(values["explorer.eval_interval"] // interval, 1) * interval,
        "eval.at_start": values["explorer.eval_on_startup"],
        "eval.at_end": False,
        **({"eval.sources": special} if special else {}),
    }


# ---------------------------------------------------------------- files of replies

FORMAT: Native = {
    "prompt_type": "messages",
    "prompt_key": "prompt",
    "response_key": "response",
    "messages_key": "message",
    "tools_key": "tools",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
}
"""Columns with the document's names."""


def demonstrations(values: Values) -> Native:
    """trainer_input.experience_buffer: the file that sft and dpo read, in the order that its data_selector says."""
    kind = preset(values).kind
    if kind == "online":
        return {}
    selector, own = f"{EXPERIENCES}.data_selector", inside(values, EXPERIENCES)
    order = order_of_tasks(inside(values, selector), selector, values["buffer.train_batch_size"] or 1)
    if order["data.order"] == "sequential":
        del order["data.seed"]
    return {
        **_replies(own, EXPERIENCES, at="data.train.0", pairs=kind == "dpo"),
        **({"data.learn_turns": _turns(own)} if kind == "sft" else {}),
        "data.chat": True,
        **order,
    }


def mixed(values: Values) -> Native:
    """algorithm.mix, and the rows of the demonstrations."""
    if not preset(values).mixes:
        return {}
    name, buffers = str(strategy(values)[1]["sft_dataset_name"]), values[AUXILIARY]
    buffers = buffers if isinstance(buffers, dict) else {}
    if not isinstance(buffers.get(name), dict):
        raise ConfigError(f"{AUXILIARY}.{name}: must be given; there are: {', '.join(buffers) or 'none'}.")
    (own,) = entries({name: [buffers[name]]}, name)
    return {
        "data.learn_turns": _turns(own),
        **{f"algorithm.mix.{key}": value for key, value in weight(values).items()},
        **_replies(own, f"{AUXILIARY}.{name}", at="data.demonstrations.0"),
    }


def _turns(own: Own) -> str:
    return "all" if own.get("format.enable_concatenated_multi_turn") else "last"


def _replies(own: Own, what: str, *, at: str, pairs: bool = False) -> Native:
    """A file of prompts with replies (or pairs of them), or of whole conversations."""
    storage = str(own.get("storage_type") or "queue")
    known_as(storage, {"file": 1, "queue": 1}, key=f"{what}.storage_type", coming=("sql",))
    form = {key: given(own.get(f"format.{key}")) or default for key, default in FORMAT.items()}
    talk = form["prompt_type"] == "messages"
    if pairs:
        columns = {
            "prompt": form["messages_key" if talk else "prompt_key"],
            "response": form["chosen_key"],
            "rejected": form["rejected_key"],
        }
    elif talk:
        columns = {"messages": form["messages_key"]}
        columns |= {"tools": form["tools_key"]} if form["tools_key"] != "tools" else {}
    else:
        columns = {"prompt": form["prompt_key"], "response": form["response_key"]}
    return {
        **rows_of(own, what, at=at),
        **({f"{at}.name": own["name"]} if given(own.get("name")) else {}),
        **{f"{at}.{key}": value for key, value in columns.items()},
        **({} if talk else _system(own, text(own, "format.system_prompt"), at=at)),
    }


# ---------------------------------------------------------------- sampling


def _sampled(values: Values, own: Own, what: str) -> Native:
    """vLLM's sampling arguments of a taskset, the model's where it gives none, but for top_k, -1 (off) then."""
    out: Native = {}
    world = world_of(values, own, what)
    own = {} if world is not None and not world.rollout_args else {"rollout_args.top_k": -1, **own}
    for key in ("temperature", "top_p", "top_k"):
        value = given(own.get(f"rollout_args.{key}"))
        out[key] = values[f"model.{key}"] if value is None else value
    out["top_k"] = 0 if out["top_k"] == -1 else out["top_k"]
    longest = given(own.get("rollout_args.max_tokens"))
    return out if longest is None else out | {"max_tokens": longest}


def sampling(values: Values) -> Native:
    """How training samples, and what the trainer divides logits by. Lengths are those of each taskset."""
    sets = training(values)
    told = [_sampled(values, *one) for one in sets]
    lengths = _lengths(values)
    most = max(lengths.values())
    sources = {
        name: _below(most, length)
        | {key: own[key] for key in ("temperature", "top_p", "top_k") if own[key] != told[0][key]}
        for (name, length), own in zip(lengths.items(), told)
    }
    differing = {name: own for name, own in sources.items() if own}
    return {
        **{f"rollout.sampling.{key}": value for key, value in told[0].items() if key != "max_tokens"},
        "rollout.sampling.min_tokens": min(values["model.min_response_tokens"], limits(values)[1] - 1),
        **({"rollout.sources": differing} if differing else {}),
        **_trained_temperature(values, [own["temperature"] for own in told]),
    }


def _trained_temperature(values: Values, sampled: list[float]) -> Native:
    """The trainer divides all logits by one temperature: model.temperature since 0.6.0 (with verl 0.8 or newer), before
    that the first taskset's, 1 without one."""
    if values["mode"] in ("explore", "bench"):
        return {}
    if at_least(values, "0.6.0"):
        trained = values["model.temperature"]
    else:
        trained = sampled[0] if given(training(values)[0][0].get("path")) else 1.0
    usual = set(sampled) if online(values) else {1.0}
    return {} if usual == {trained} or trained <= 0 else {"train.temperature": trained}


def _lengths(values: Values) -> dict[str, int]:
    """The longest reply to each taskset of training, in tokens, by the name of its source."""
    return {name: _length(values, *each) for name, each in zip(train_names(values), training(values))}


def _length(values: Values, own: Own, what: str) -> int:
    """The longest reply to a taskset, in tokens; or all replies of an episode, where its workflow counts so."""
    world = world_of(values, own, what)
    if world is not None:
        return world.tokens or limits(values)[1]
    return given(own.get("rollout_args.max_tokens")) or limits(values)[1]


def _below(most: int, length: int) -> Native:
    return {} if length == most else {"max_tokens": length}


def limits(values: Values) -> tuple[int, int]:
    """(prompt, response) in tokens: of the two and their sum max_model_len, two decide."""
    both, prompt, response = (
        values[f"model.{key}"] for key in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    if both is None and (prompt is None or response is None):
        raise ConfigError(
            "model.max_model_len: give it, or both model.max_prompt_tokens and model.max_response_tokens, whose "
            "sum it is."
        )
    if prompt is None:
        prompt = both // 2 if response is None else both - response
    if response is None:
        response = both - prompt
    if prompt < 1 or response < 1 or (both is not None and prompt + response > both):
        raise ConfigError(
            f"model.max_model_len: max_prompt_tokens + max_response_tokens must not exceed it, and leave both at "
            f"least 1; got {prompt} + {response} and {both}."
        )
    return prompt, response


def token_limits(values: Values) -> Native:
    """Longest prompt and reply. Trinity trains on no token of a prompt that it had to cut, so here it is left out.

    Given replies are bounded together with their prompt, and never cut.
    """
    prompt, response = limits(values)
    if not online(values):
        both = values["model.max_model_len"] or prompt + response
        total = ("data.max_total_tokens", "data.max_prompt_tokens", "rollout.sampling.max_tokens")
        return {**dict.fromkeys(total, both), "data.overlong": "error"}
    truncates = values["model.enable_prompt_truncation"]
    out: Native = {
        "data.max_prompt_tokens": prompt,
        "data.overlong": "filter" if truncates else "error",
        "rollout.sampling.max_tokens": max(_lengths(values).values()),
    }
    worlds = (world_of(values, *each) for each in sets_of(values))
    world = next((each for each in worlds if each is not None), None)
    if world is None:
        return out
    whole = values["model.max_model_len"] or prompt + response
    out |= {"data.max_total_tokens": whole, "rollout.env.observation_tokens": whole}
    if world.tokens is not None:  # of all replies and answers together
        return out | {"rollout.env.tokens_after_prompt": world.tokens}
    bound = {"rollout.env.input_tokens": prompt} if truncates else {}
    return out | {"rollout.env.max_tokens_per": "turn"} | bound

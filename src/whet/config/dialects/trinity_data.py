"""What Trinity-RFT's `buffer` section means: batch sizes, the length of a run, tasksets, rewards, files of replies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from whet.config.dialects.key import Values
from whet.config.dialects.trinity_values import (
    EVAL_TASKSETS,
    EXPERIENCES,
    TASKSET,
    count,
    entries,
    given,
    online,
    preset,
    repeat_times,
    text,
    whole,
)
from whet.tables import near
from whet.types import ConfigError, Json

INPUT = "buffer.explorer_input"
OTHER_SPLITS = {"test", "validation", "valid", "val", "dev", "eval"}
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")

# ---------------------------------------------------------------- how much


def mode(values: Values) -> Mapping[str, Json]:
    """both for the algorithms that explore, train for those that learn from a file."""
    wanted, name = values["mode"], values["algorithm.algorithm_type"]
    if wanted not in ("both", "train", "explore", "bench", "serve"):
        raise ConfigError(f"mode: {wanted!r} is not known; it is both, train, explore or bench.")
    if wanted not in ("both", "train"):
        raise ConfigError(f"mode: {wanted} is coming, not built yet; here: both, and train for sft and dpo.")
    if wanted == "both" and not online(values):
        raise ConfigError(f"mode: {name} learns from a file and does not explore; write mode: train.")
    if wanted == "train" and online(values):
        raise ConfigError(
            f"mode: train with {name} (from stored experiences) is coming, not built yet; use both."
        )
    return {}


def batch(values: Values) -> Mapping[str, Json]:
    """buffer.batch_size counts tasks, buffer.train_batch_size experiences: batch_size * repeat_times of them a step."""
    size = whole(values, "buffer.train_batch_size")
    if not online(values):
        if size is None:
            raise ConfigError(
                f"buffer.train_batch_size: {values['algorithm.algorithm_type']} needs it: the examples of one step."
            )
        return {"train.tasks_per_step": _divided(values, size)}
    tasks, times = count(values, "buffer.batch_size"), repeat_times(values)
    if size is not None and size != tasks * times:
        raise ConfigError(
            f"buffer.train_batch_size: {size} is not buffer.batch_size * algorithm.repeat_times = {tasks} * {times} = "
            f"{tasks * times}: training on more or fewer experiences than a step explores is coming, not built yet."
        )
    _divided(values, tasks * times)
    return {"train.tasks_per_step": tasks, "rollout.group_size": times}


def _divided(values: Values, size: int) -> int:
    """Trinity's rule: the trainer's GPUs divide train_batch_size. Theirs are those that the explorer leaves over."""
    engine, nodes = "explorer.rollout_model", whole(values, "cluster.node_num") or 1
    engines = count(values, f"{engine}.engine_num") * count(values, f"{engine}.tensor_parallel_size")
    each = whole(values, "cluster.gpu_per_node", least=0) or 0
    left = nodes * each - (engines if online(values) else 0)
    if left > 0 and size % left:
        raise ConfigError(
            f"buffer.train_batch_size: {size} must be divisible by the number of GPUs of the trainer, {left} "
            "(cluster.node_num * cluster.gpu_per_node, less explorer.rollout_model.engine_num * tensor_parallel_size)."
        )
    return size


def length(values: Values) -> Mapping[str, Json]:
    """Steps of the explorer or of the trainer, whichever ends first; else passes over the taskset."""
    steps = [
        n for key in ("buffer.total_steps", "trainer.total_steps") if (n := whole(values, key)) is not None
    ]
    return {"train.steps": min(steps)} if steps else {"train.epochs": values["buffer.total_epochs"]}


# ---------------------------------------------------------------- tasksets


def tasks(values: Values) -> Mapping[str, Json]:
    """The training taskset: files, columns, one user message a task, in the order of the file."""
    if not online(values):
        return {}
    own = {key.removeprefix(f"{TASKSET}."): v for key, v in values.items() if key.startswith(f"{TASKSET}.")}
    _workflow(values, own, TASKSET, general=f"{INPUT}.default_workflow_type")
    times = given(own.get("repeat_times"))
    if times is not None and times != repeat_times(values):
        raise ConfigError(
            f"{TASKSET}.repeat_times: {times} is not algorithm.repeat_times = {repeat_times(values)}, which is what "
            "Trinity uses for training; leave it out."
        )
    return {**_source(own, TASKSET, at="data.train.0"), "data.chat": True, "data.shuffle": _shuffled(own)}


def _shuffled(own: Mapping[str, Json]) -> bool:
    kind = given(own.get("task_selector.selector_type")) or "sequential"
    if kind not in ("sequential", "shuffle"):
        raise ConfigError(
            f"{TASKSET}.task_selector.selector_type: {kind} is coming, not built yet; here: sequential, shuffle."
        )
    return kind == "shuffle"


def _source(own: Mapping[str, Json], what: str, *, at: str) -> dict[str, Json]:
    storage = own.get("storage_type") or "file"
    if storage != "file":
        why = (
            "tasks cannot come from a queue" if storage == "queue" else f"{storage} is coming, not built yet"
        )
        raise ConfigError(f"{what}.storage_type: {why}; here: file.")
    path = given(own.get("path"))
    if path is None:
        raise ConfigError(f"{what}.path: must be given: the folder or file of the tasks.")
    name, system = given(own.get("name")), given(own.get("format.system_prompt"))
    return {
        f"{at}.path": split_files(str(path), str(own.get("split") or "train"), text(own, "subset_name")),
        f"{at}.prompt": own.get("format.prompt_key") or "prompt",
        f"{at}.answer": own.get("format.response_key") or "response",
        **({f"{at}.name": name} if name else {}),
        **({f"{at}.system": system} if system else {}),
    }


def split_files(path: str, split: str, subset: str | None = None) -> Json:
    """The files of a split in a folder, as `datasets.load_dataset(path, subset, split=split)` finds them.

    Those whose name has the split's name as a word, in the folder or in its `data`; where no file's name has one,
    all are `train`. What is no folder goes over as it is: a file, a pattern, or a name whose absence is told later.
    """
    folder = Path(path).expanduser() / (subset or "")
    if (folder / split / "dataset_info.json").exists():
        return str(folder / split)
    if folder.is_file() and split != "train":
        raise ConfigError(f"split: {folder} is one file, whose only split is train, not {split!r}.")
    if not folder.is_dir() or (folder / "dataset_info.json").exists():
        return path if subset is None else str(folder)
    files = sorted(
        f for inside in (folder, folder / "data") for f in inside.glob("*") if f.suffix in SUFFIXES
    )
    words = {f: set(re.split(r"[^a-z0-9]+", f.stem.lower())) for f in files}
    named = [f for f in files if split.lower() in words[f]]
    if not named and split == "train" and not any(words[f] & OTHER_SPLITS for f in files):
        named = files
    if files and not named:
        raise ConfigError(
            f"split: {folder} has no file of {split!r}; there are: {', '.join(f.name for f in files)}."
        )
    return [str(f) for f in named] or str(folder)


def evaluation(values: Values) -> Mapping[str, Json]:
    """Evaluation tasksets, which the explorer asks every eval_interval steps."""
    sets = entries(values, EVAL_TASKSETS)
    if not sets or not online(values):
        return {}
    out: dict[str, Json] = {}
    for n, own in enumerate(sets):
        what = f"{EVAL_TASKSETS}[{n}]"
        general = f"{INPUT}.default_eval_workflow_type"
        general = general if text(values, general) else f"{INPUT}.default_workflow_type"
        _workflow(values, own, what, general=general)
        out |= _source(own, what, at=f"data.eval.{n}") | {
            f"data.eval.{n}.name": own.get("name") or f"eval_taskset_{n}"
        }
    times = _common(sets, "repeat_times", 1)
    sampled = {key: _common(sets, f"rollout_args.{key}", default) for key, default in SAMPLING.items()}
    return out | {
        "data.exclude_eval": False,
        "eval.every": values["explorer.eval_interval"],
        "eval.at_start": values["explorer.eval_on_startup"],
        "eval.at_end": False,
        "eval.samples": times,
        **_sampling(sampled, at="eval.sampling"),
        **({"eval.reward": judge} if (judge := _eval_reward(values, sets)) != _train_reward(values) else {}),
    }


def _common(sets: Sequence[Mapping[str, Json]], key: str, default: Json) -> Json:
    """What all evaluation tasksets say. ConfigError if they differ."""
    said = [default if given(own.get(key)) is None else own[key] for own in sets]
    if any(value != said[0] for value in said):
        listed = ", ".join(map(str, said))
        raise ConfigError(
            f"{EVAL_TASKSETS}[].{key}: {listed}: tasksets that differ in it are coming, not built yet."
        )
    return said[0]


# ---------------------------------------------------------------- sampling

SAMPLING: dict[str, Json] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": None}


def _sampling(own: Mapping[str, Json], *, at: str) -> dict[str, Json]:
    """vLLM's sampling arguments; top_k -1 is off."""
    out = {f"{at}.{key}": own[key] for key in ("temperature", "top_p")}
    out[f"{at}.top_k"] = 0 if own["top_k"] == -1 else own["top_k"]
    return out | ({f"{at}.max_tokens": own["max_tokens"]} if own["max_tokens"] else {})


def sampling(values: Values) -> Mapping[str, Json]:
    """How training samples; the trainer divides by the same temperature."""
    own = {key: given(values.get(f"{TASKSET}.rollout_args.{key}")) for key in SAMPLING}
    own = {key: SAMPLING[key] if value is None else value for key, value in own.items()}
    return {
        **_sampling({**own, "max_tokens": None}, at="rollout.sampling"),
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
    """Longest prompt and reply. Trinity trains on no token of a prompt that it had to cut, so here it is left out."""
    prompt, response = limits(values)
    own = given(values.get(f"{TASKSET}.rollout_args.max_tokens")) if online(values) else None
    cut = online(values) and values["model.enable_prompt_truncation"]
    return {
        "data.max_prompt_tokens": prompt,
        "data.overlong": "filter" if cut else "error",
        "rollout.sampling.max_tokens": response if own is None else own,
    }


# ---------------------------------------------------------------- workflows and rewards

WORKFLOWS: dict[str, str | None] = {
    "simple_workflow": None,
    "math_workflow": "math_reward",
    "math_boxed_workflow": "math_boxed_reward",
}
"""Workflows of one turn, with the reward each brings."""

REWARDS: dict[str, dict[str, Json]] = {
    "accuracy_reward": {"function": "math"},
    "math_reward": {"function": "math"},
    "math_boxed_reward": {"function": "math", "arguments": {"boxed": True}},
}
"""Trinity's rewards that exist here. What math_reward adds for the form of a reply is not given."""

COMING_REWARDS = ["format_reward", "countdown_reward", "math_dapo_reward", "rm_gallery_reward"]


def _workflow(values: Values, own: Mapping[str, Json], what: str, *, general: str) -> str:
    """The workflow of a taskset. ConfigError unless it is one turn."""
    at, name = f"{what}.default_workflow_type", text(own, "default_workflow_type")
    if name is None:
        at, name = general, text(values, general) or "simple_workflow"
    if name not in WORKFLOWS:
        raise ConfigError(
            f"{at}: {name} is coming, not built yet{near(str(name), WORKFLOWS)}; "
            f"here, all of one turn: {', '.join(WORKFLOWS)}."
        )
    return str(name)


def _reward(values: Values, own: Mapping[str, Json], what: str) -> str:
    """The reward of a taskset: its own, the general one, or its workflow's."""
    at, name = f"{what}.default_reward_fn_type", text(own, "default_reward_fn_type")
    if name is None:
        at = f"{INPUT}.default_reward_fn_type"
        name = (
            text(values, at)
            or WORKFLOWS[_workflow(values, own, what, general=f"{INPUT}.default_workflow_type")]
        )
    if name is None:
        raise ConfigError(
            f"{at}: must be given: {', '.join(REWARDS)}, or path/to/file.py:name of a function of yours."
        )
    if name not in REWARDS and ":" not in str(name):
        known = (
            "is coming, not built yet"
            if name in COMING_REWARDS
            else f"is not known{near(str(name), REWARDS)}"
        )
        raise ConfigError(
            f"{at}: {name} {known}; here: {', '.join(REWARDS)}, or path/to/file.py:name of a function of yours."
        )
    return str(name)


def _train_reward(values: Values) -> str:
    own = {"default_reward_fn_type": values.get(f"{TASKSET}.default_reward_fn_type")}
    own["default_workflow_type"] = values.get(f"{TASKSET}.default_workflow_type")
    return _label(_reward(values, own, TASKSET))


def _eval_reward(values: Values, sets: Sequence[Mapping[str, Json]]) -> str:
    names = {_reward(values, own, f"{EVAL_TASKSETS}[{n}]") for n, own in enumerate(sets)}
    if len(names) > 1:
        raise ConfigError(
            f"{EVAL_TASKSETS}[].default_reward_fn_type: {', '.join(sorted(names))}: one for all is what is built."
        )
    return _label(names.pop())


def _label(name: str) -> str:
    """What a reward is called in metrics: `countdown` for `rewards/games.py:countdown`."""
    return name.rpartition(":")[2]


def rewards(values: Values) -> Mapping[str, Json]:
    """The reward of training, and of evaluation at weight 0 where that is another one."""
    if not online(values):
        return {}
    own = {key: values.get(f"{TASKSET}.{key}") for key in ("default_reward_fn_type", "default_workflow_type")}
    wanted = {_reward(values, own, TASKSET): 1.0}
    for n, each in enumerate(entries(values, EVAL_TASKSETS)):
        wanted.setdefault(_reward(values, each, f"{EVAL_TASKSETS}[{n}]"), 0.0)
    return {
        f"rewards.{_label(name)}": {
            **REWARDS.get(name, {"function": name}),
            **({} if weight else {"weight": 0.0}),
        }
        for name, weight in wanted.items()
    }


# ---------------------------------------------------------------- files of replies


def demonstrations(values: Values) -> Mapping[str, Json]:
    """trainer_input.experience_buffer: the file that sft and dpo read; for the others a queue in memory."""
    at, kind = EXPERIENCES, preset(values).kind
    storage, path = values[f"{at}.storage_type"], text(values, f"{at}.path")
    if kind == "online":
        return _queue(storage, path)
    if storage not in ("queue", "file"):
        raise ConfigError(f"{at}.storage_type: {storage} is coming, not built yet; here: file.")
    if path is None:
        raise ConfigError(f"{at}.path: must be given: the folder or file of the {kind} examples.")
    form = {key.rpartition(".")[2]: given(v) for key, v in values.items() if key.startswith(f"{at}.format.")}
    if form["prompt_type"] != "plaintext":
        raise ConfigError(
            f"{at}.format.prompt_type: {form['prompt_type']} (the default) is coming, not built yet; here: plaintext, "
            "with prompt_key and response_key (chosen_key and rejected_key for dpo)."
        )
    reply = {"data.train.0.response": form["response_key" if kind == "sft" else "chosen_key"]}
    rejected = {"data.train.0.rejected": form["rejected_key"]} if kind == "dpo" else {}
    system = {"data.train.0.system": form["system_prompt"]} if form["system_prompt"] else {}
    return {
        "data.train.0.name": values[f"{at}.name"],
        "data.train.0.path": split_files(path, str(values.get(f"{at}.split") or "train")),
        "data.train.0.prompt": form["prompt_key"],
        **reply,
        **rejected,
        **system,
        "data.chat": True,
        "data.shuffle": False,
    }


def _queue(storage: Json, path: str | None) -> Mapping[str, Json]:
    if storage not in ("queue", "file"):
        raise ConfigError(
            f"{EXPERIENCES}.storage_type: {storage} is coming, not built yet; here: queue, in memory."
        )
    if path is not None:
        raise ConfigError(
            f"{EXPERIENCES}.path: a backup of the queue at a place of yours is coming, not built yet; leave it out: "
            "every rollout is written to rollouts/ in the run's folder."
        )
    return {}

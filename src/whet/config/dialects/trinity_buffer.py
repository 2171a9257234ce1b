"""The rows of Trinity-RFT's `buffer` section."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, inert, translated
from whet.config.dialects.trinity_data import (
    INPUT,
    batch,
    demonstrations,
    evaluation,
    length,
    rewards,
    sampling,
    tasks,
    token_limits,
)
from whet.config.dialects.trinity_values import EVAL_TASKSETS, EXPERIENCES, TASKSET, section
from whet.types import Json


def _taskset(name: str, native: str, *, default: Json = None, reason: str) -> Key:
    return translated(f"{TASKSET}.{name}", tasks, native, default=default, reason=reason)


def _eval_set(name: str, *native: str, default: Json = None, reason: str) -> Key:
    return translated(f"{EVAL_TASKSETS}[].{name}", evaluation, *native, default=default, reason=reason)


def _file(name: str, native: str, *, default: Json = None, reason: str) -> Key:
    return translated(f"{EXPERIENCES}.{name}", demonstrations, native, default=default, reason=reason)


_WORKFLOW = "workflows of one turn; their instruction comes from your data or format.system_prompt"
_REWARD = "Trinity's by name (math_reward without its score for form), or path/to/file.py:name"
_ASK = "a user message; the chat template is applied"
_SPLIT = "files of the folder whose name has the split's name"

_REPLAY = f"{EXPERIENCES}.replay_buffer"
_AUXILIARY = "buffer.trainer_input.auxiliary_buffers"

BUFFER: tuple[Key, ...] = (
    section("buffer", "data"),
    # ------------------------------------------------ how much
    translated(
        "algorithm.repeat_times",
        batch,
        "rollout.group_size",
        default=None,
        reason="1; the presets' 2 for grpo, rloo and dpo where it is not given",
    ),
    translated("buffer.batch_size", batch, "train.tasks_per_step", default=1, reason="tasks of a step"),
    translated(
        "buffer.train_batch_size",
        batch,
        "train.tasks_per_step",
        default=None,
        reason="must be batch_size * repeat_times, which is its default; for sft and dpo the examples of a step",
    ),
    translated(
        "buffer.total_epochs", length, "train.epochs", default=1, reason="unless a number of steps is given"
    ),
    translated(
        "buffer.total_steps",
        length,
        "train.steps",
        default=None,
        reason="the smaller of it and trainer.total_steps",
    ),
    coming(
        "algorithm.sample_strategy", "sampling from stored experiences", default=None, harmless=("default",)
    ),
    # ------------------------------------------------ tasksets
    section("buffer.explorer_input", "data"),
    section("buffer.trainer_input", "data"),
    translated(f"{INPUT}.default_workflow_type", tasks, default=None, reason=_WORKFLOW),
    translated(f"{INPUT}.default_eval_workflow_type", evaluation, default=None, reason=_WORKFLOW),
    translated(f"{INPUT}.default_reward_fn_type", rewards, "rewards", default=None, reason=_REWARD),
    section(TASKSET, "data.train"),
    _taskset("name", "data.train.0.name", reason="label in metrics"),
    _taskset("storage_type", "data.train.0.path", default="file", reason="file; sql is coming"),
    _taskset("path", "data.train.0.path", reason="a local folder or file; nothing is downloaded"),
    _taskset("subset_name", "data.train.0.path", reason="a folder inside path"),
    _taskset("split", "data.train.0.path", default="train", reason=_SPLIT),
    _taskset("repeat_times", "rollout.group_size", reason="must be algorithm.repeat_times"),
    section(f"{TASKSET}.format", "data.train"),
    _taskset("format.prompt_key", "data.train.0.prompt", default="prompt", reason=_ASK),
    _taskset(
        "format.response_key", "data.train.0.answer", default="response", reason="what rewards compare with"
    ),
    section(f"{TASKSET}.rollout_args", "rollout.sampling"),
    translated(
        f"{TASKSET}.rollout_args.temperature",
        sampling,
        "rollout.sampling.temperature",
        default=1.0,
        reason="the trainer divides by it too",
    ),
    translated(f"{TASKSET}.default_workflow_type", tasks, default=None, reason=_WORKFLOW),
    translated(f"{TASKSET}.default_reward_fn_type", rewards, "rewards", default=None, reason=_REWARD),
    coming(f"{TASKSET}.workflow_args", "workflows with arguments", default={}),
    _eval_set("name", "data.eval", reason="label in metrics"),
    _eval_set("storage_type", "data.eval", default="file", reason="file; sql is coming"),
    _eval_set("path", "data.eval", reason="a local folder or file; nothing is downloaded"),
    _eval_set("subset_name", "data.eval", reason="a folder inside path"),
    _eval_set("split", "data.eval", default="train", reason=_SPLIT),
    _eval_set("repeat_times", "eval.samples", default=1, reason="the same for all evaluation tasksets"),
    section(f"{EVAL_TASKSETS}[].format", "data.eval"),
    _eval_set("format.prompt_key", "data.eval", default="prompt", reason=_ASK),
    _eval_set("format.response_key", "data.eval", default="response", reason="what rewards compare with"),
    inert(
        f"{EVAL_TASKSETS}[].format.prompt_type",
        "the column says itself whether it holds text or messages",
        default="messages",
        harmless=("plaintext",),
    ),
    section(f"{EVAL_TASKSETS}[].rollout_args", "eval.sampling"),
    _eval_set(
        "rollout_args.temperature",
        "eval.sampling.temperature",
        default=1.0,
        reason="the same for all of them",
    ),
    _eval_set("default_workflow_type", reason=_WORKFLOW),
    _eval_set("default_reward_fn_type", "eval.reward", reason=_REWARD),
    translated(
        EVAL_TASKSETS,
        evaluation,
        "data.eval",
        "eval",
        default=[],
        reason="asked at the start and every eval_interval steps",
    ),
    coming(f"{EVAL_TASKSETS}[].workflow_args", "workflows with arguments", default={}),
    # ------------------------------------------------ the trainer's input
    section(EXPERIENCES, "data.train"),
    _file("name", "data.train.0.name", default="experience_buffer", reason="label in metrics (sft, dpo)"),
    _file("storage_type", "data.train.0.path", default="queue", reason="in memory; for sft and dpo a file"),
    _file("path", "data.train.0.path", reason="the file of sft and dpo; a queue's backup is coming"),
    inert(
        f"{EXPERIENCES}.max_read_timeout",
        "a step is explored before it is trained on, so nothing is waited for",
        default=1800,
        harmless=(60, 300, 600, 900, 1200, 3600, 7200, 86400),
    ),
    section(f"{EXPERIENCES}.format", "data.train"),
    _file(
        "format.prompt_type",
        "data.train.0.prompt",
        default="messages",
        reason="plaintext; messages is coming",
    ),
    _file("format.prompt_key", "data.train.0.prompt", default="prompt", reason=_ASK),
    _file(
        "format.response_key", "data.train.0.response", default="response", reason="the demonstration (sft)"
    ),
    coming(f"{EXPERIENCES}.format.system_prompt_key", "a column of system messages", default=None),
    _file("format.system_prompt", "data.train.0.system", reason="a system message for every example"),
    coming(f"{EXPERIENCES}.format.messages_key", "examples as lists of messages", default="message"),
    coming(f"{EXPERIENCES}.format.tools_key", "tools", default="tools"),
    _file("format.chosen_key", "data.train.0.response", default="chosen", reason="the better reply (dpo)"),
    _file("format.rejected_key", "data.train.0.rejected", default="rejected", reason="the worse reply (dpo)"),
    coming(f"{EXPERIENCES}.format.enable_concatenated_multi_turn", "training on all turns", default=False),
    coming(f"{EXPERIENCES}.format.chat_template", "a template of its own beside the model's", default=None),
    section(_REPLAY, "data.train"),
    coming(f"{_REPLAY}.enable", "a replay buffer", default=False),
    coming(f"{_REPLAY}.reuse_cooldown_time", "a replay buffer", default=None),
    coming(f"{_REPLAY}.priority_fn", "a replay buffer", default="linear_decay"),
    coming(f"{_REPLAY}.priority_fn_args", "a replay buffer", default={"decay": 2.0}),
    coming(_AUXILIARY, "auxiliary buffers (mix)", default={}),
    *(
        coming(f"{_AUXILIARY}.<name>.{key}", "auxiliary buffers (mix)", default=None)
        for key in ("name", "storage_type", "path")
    ),
    coming(f"{_AUXILIARY}.<name>.format", "auxiliary buffers (mix)", default={}),
    coming(f"{_AUXILIARY}.<name>.format.prompt_key", "auxiliary buffers (mix)", default=None),
    coming(f"{_AUXILIARY}.<name>.format.response_key", "auxiliary buffers (mix)", default=None),
)

MORE_BUFFER: tuple[Key, ...] = (
    _taskset("format.system_prompt", "data.train.0.system", reason="a system message for every task"),
    inert(
        f"{TASKSET}.format.prompt_type",
        "the column says itself whether it holds text or messages",
        default="messages",
        harmless=("plaintext",),
    ),
    _taskset(
        "task_selector.selector_type", "data.shuffle", default="sequential", reason="sequential or shuffle"
    ),
    *(
        translated(f"{TASKSET}.rollout_args.{key}", sampling, native, default=default, reason="vLLM's name")
        for key, native, default in (
            ("top_p", "rollout.sampling.top_p", 1.0),
            ("top_k", "rollout.sampling.top_k", -1),
        )
    ),
    translated(
        f"{TASKSET}.rollout_args.max_tokens",
        token_limits,
        "rollout.sampling.max_tokens",
        default=None,
        reason="model.max_response_tokens",
    ),
    _eval_set("format.system_prompt", "data.eval", reason="a system message for every task"),
    _eval_set("rollout_args.top_p", "eval.sampling.top_p", default=1.0, reason="vLLM's name"),
    _eval_set("rollout_args.top_k", "eval.sampling.top_k", default=-1, reason="vLLM's name"),
    _eval_set("rollout_args.max_tokens", "eval.sampling.max_tokens", reason="model.max_response_tokens"),
    _file("split", "data.train.0.path", default="train", reason=_SPLIT),
)
"""Keys that the document leaves to the source code."""

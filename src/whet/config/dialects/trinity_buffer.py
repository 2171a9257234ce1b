"""The rows of Trinity-RFT's `buffer` section."""

from __future__ import annotations

from whet.config.dialects.key import Key, coming, derived, inert, translated
from whet.config.dialects.trinity_data import batch, evaluation, length, sampling, tasks, token_limits
from whet.config.dialects.trinity_layout import patience
from whet.config.dialects.trinity_mix import mixed, staleness
from whet.config.dialects.trinity_replay import MORE_REPLAY, REPLAY_BUFFER
from whet.config.dialects.trinity_replies import AUXILIARY, demonstrations, queue
from whet.config.dialects.trinity_rewards import INPUT, rewards
from whet.config.dialects.trinity_run import chat_template
from whet.config.dialects.trinity_values import EVAL_TASKSETS, EXPERIENCES, TASKSET, at_any_value, section
from whet.types import Json


def _taskset(name: str, native: str, *, default: Json = None, reason: str) -> Key:
    return translated(f"{TASKSET}.{name}", tasks, native, default=default, reason=reason)


def _eval_set(name: str, *native: str, default: Json = None, reason: str) -> Key:
    return translated(f"{EVAL_TASKSETS}[].{name}", evaluation, *native, default=default, reason=reason)


def _file(name: str, native: str, *, default: Json = None, reason: str) -> Key:
    return translated(f"{EXPERIENCES}.{name}", demonstrations, native, default=default, reason=reason)


def _expert(name: str, *native: str, default: Json = None, reason: str) -> Key:
    return translated(f"{AUXILIARY}.<name>.{name}", mixed, *native, default=default, reason=reason)


_WORKFLOW = "workflows of one turn; their instruction comes from your data or format.system_prompt"
_REWARD = "Trinity's by name, or path/to/file.py:name"
_ARGUMENTS = "arguments of the reward; math_dapo_reward's penalty for long replies is a reward of its own"
_STEPS = "with_think and format_score_coef of math_boxed_reward; other workflows with arguments are coming"
_ASK = "a user message; the chat template is applied"
_PLACE = "a local file, or a dataset folder; nothing is downloaded"
_SPLIT = "files of the folder whose name has the split's name; a file is all of it"
_SUBSET = "a folder inside path"
_PREFIX = "given, not sampled: part of the prompt"
_SYSTEM = "a system message for every row"
_SYSTEM_COLUMN = "a column of system messages; wins over system_prompt"
_TURNS = "messages: a column of whole conversations"
_PICTURES = "pictures and films"
_TOOLS = "tools"
_RETRIES = "tasks and experiences from a database"

BUFFER: tuple[Key, ...] = (
    section("buffer", "data"),
    # ------------------------------------------------ how much
    translated(
        "algorithm.repeat_times",
        batch,
        "rollout.group_size",
        default=None,
        reason="the preset's where it is not given: 1 (ppo), 2 or 8 (mix, multi_step_grpo, on_policy_distill)",
    ),
    translated("buffer.batch_size", batch, "train.tasks_per_step", default=1, reason="tasks of a step"),
    translated(
        "buffer.train_batch_size",
        batch,
        "train.tasks_per_step",
        default=None,
        reason="must be batch_size * repeat_times, which is its default, and the demonstrations of a mix more; for sft "
        "and dpo the examples of a step",
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
    derived(
        "algorithm.sample_strategy",
        staleness,
        default=None,
        reason="mix for mix and mix_chord, else default; staleness_control bounds the age of rollouts, see "
        "synchronizer.sync_style",
    ),
    # ------------------------------------------------ tasksets
    section("buffer.explorer_input", "data"),
    section("buffer.trainer_input", "data"),
    translated(f"{INPUT}.default_workflow_type", rewards, "rewards", default=None, reason=_WORKFLOW),
    translated(f"{INPUT}.default_eval_workflow_type", rewards, "eval.reward", default=None, reason=_WORKFLOW),
    translated(f"{INPUT}.default_reward_fn_type", rewards, "rewards", default=None, reason=_REWARD),
    section(TASKSET, "data.train"),
    _taskset("name", "data.train.0.name", reason="label in metrics; taskset_0 where it is not given"),
    _taskset("storage_type", "data.train.0.path", default="file", reason="file; sql is coming"),
    _taskset("path", "data.train.0.path", reason=_PLACE),
    _taskset("subset_name", "data.train.0.subset", reason=_SUBSET),
    _taskset("split", "data.train.0.split", default="train", reason=_SPLIT),
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
        default=None,
        reason="null: model.temperature; the trainer divides by it too",
    ),
    translated(f"{TASKSET}.default_workflow_type", rewards, "rewards", default=None, reason=_WORKFLOW),
    translated(f"{TASKSET}.default_reward_fn_type", rewards, "rewards", default=None, reason=_REWARD),
    translated(f"{TASKSET}.workflow_args", rewards, "rewards", default={}, reason=_STEPS),
    _eval_set("name", "data.eval", reason="label in metrics; eval_taskset_N where it is not given"),
    _eval_set("storage_type", "data.eval", default="file", reason="file; sql is coming"),
    _eval_set("path", "data.eval", reason=_PLACE),
    _eval_set("subset_name", "data.eval", reason=_SUBSET),
    _eval_set("split", "data.eval", default="train", reason=_SPLIT),
    _eval_set("repeat_times", "eval.samples", "eval.sources", default=1, reason="replies to a task"),
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
        "eval.sources",
        reason="null: model.temperature",
    ),
    *(
        translated(
            f"{EVAL_TASKSETS}[].{key}", rewards, "eval.reward", "rewards", default=default, reason=reason
        )
        for key, default, reason in (
            ("default_workflow_type", None, _WORKFLOW),
            ("default_reward_fn_type", None, _REWARD),
            ("workflow_args", {}, _STEPS),
        )
    ),
    translated(
        EVAL_TASKSETS,
        evaluation,
        "data.eval",
        "eval",
        default=[],
        reason="asked at the start and every eval_interval steps",
    ),
    # ------------------------------------------------ the trainer's input
    section(EXPERIENCES, "data.train"),
    _file("name", "data.train.0.name", default="experience_buffer", reason="label in metrics (sft, dpo)"),
    translated(
        f"{EXPERIENCES}.storage_type",
        queue,
        "buffer.url",
        "buffer.order",
        "track.rollouts_dir",
        default="queue",
        reason="in memory; for sft and dpo a file. With mode train and explore: queue and sql, both in path's database",
    ),
    _file(
        "path",
        "data.train.0.path",
        reason=f"sft and dpo: {_PLACE}; of a queue: the folder of the rollouts' record, without the suffix; with mode "
        "train and explore: the database (buffer.url)",
    ),
    inert(
        f"{EXPERIENCES}.max_read_timeout",
        "a step is explored before it is trained on, so nothing is waited for",
        default=1800,
        harmless=(60, 300, 600, 900, 1200, 3600, 7200, 86400),
    ),
    section(f"{EXPERIENCES}.format", "data.train"),
    _file(
        "format.prompt_type",
        "data.train.0.messages",
        default="messages",
        reason="messages: conversations; plaintext: a prompt and a reply",
    ),
    _file("format.prompt_key", "data.train.0.prompt", default="prompt", reason=_ASK),
    _file(
        "format.response_key", "data.train.0.response", default="response", reason="the demonstration (sft)"
    ),
    _file("format.system_prompt_key", "data.train.0.system_column", reason=_SYSTEM_COLUMN),
    _file("format.system_prompt", "data.train.0.system", reason=_SYSTEM),
    _file(
        "format.messages_key", "data.train.0.messages", default="message", reason=f"{_TURNS} (dpo: prompts)"
    ),
    coming(f"{EXPERIENCES}.format.tools_key", _TOOLS, default="tools"),
    _file("format.chosen_key", "data.train.0.response", default="chosen", reason="the better reply (dpo)"),
    _file("format.rejected_key", "data.train.0.rejected", default="rejected", reason="the worse reply (dpo)"),
    _file(
        "format.enable_concatenated_multi_turn",
        "data.learn_turns",
        default=False,
        reason="true: every assistant message is learned (sft)",
    ),
    translated(
        f"{EXPERIENCES}.format.chat_template",
        chat_template,
        "tokenizer.chat_template",
        default=None,
        reason="null: the model's (sft, dpo)",
    ),
    *REPLAY_BUFFER,
    translated(
        AUXILIARY,
        mixed,
        "data.expert",
        default={},
        reason="the one that sample_strategy_args.sft_dataset_name names: the demonstrations of a mix",
    ),
    _expert("name", "data.expert", default="", reason="label in metrics"),
    _expert("storage_type", "data.expert", default="queue", reason="a file; sql is coming"),
    _expert("path", "data.expert", reason=_PLACE),
    section(f"{AUXILIARY}.<name>.format", "data.expert", default={}),
    _expert("format.prompt_key", "data.expert", default="prompt", reason=_ASK),
    _expert("format.response_key", "data.expert", default="response", reason="the demonstration"),
)


def _not_built(at: str, names: dict[str, Json], feature: str) -> tuple[Key, ...]:
    return tuple(coming(f"{at}.{name}", feature, default=default) for name, default in names.items())


def _of_tasks(at: str) -> tuple[Key, ...]:
    """Keys of a taskset that nothing reads here, or that are coming."""
    return (
        at_any_value(f"{at}.enable_progress_bar", "whet has its own display", default=False),
        coming(
            f"{at}.rollout_args.logprobs",
            "log-probs of other tokens than the sampled",
            default=None,
            harmless=(0,),
        ),
        *_not_built(f"{at}.format", {"image_key": None, "video_key": None}, _PICTURES),
        *_not_built(
            f"{at}.format", {"workflow_key": "", "reward_fn_key": ""}, "a workflow or reward of each row"
        ),
        *_not_built(f"{at}.format", {"messages_key": "message", "tools_key": "tools"}, _TOOLS),
        *_not_built(at, {"max_retry_times": 3, "max_retry_interval": 1}, _RETRIES),
    )


MORE_BUFFER: tuple[Key, ...] = (
    _taskset("format.system_prompt", "data.train.0.system", reason=_SYSTEM),
    _taskset("format.system_prompt_key", "data.train.0.system_column", reason=_SYSTEM_COLUMN),
    _taskset("format.reply_prefix", "data.train.0.reply_prefix", reason=_PREFIX),
    inert(
        f"{TASKSET}.format.prompt_type",
        "the column says itself whether it holds text or messages",
        default="messages",
        harmless=("plaintext",),
    ),
    _taskset(
        "task_selector.selector_type",
        "data.order",
        default="sequential",
        reason="sequential, shuffle, or offline_easy2hard by one feature, whose largest values come first",
    ),
    _taskset("task_selector.seed", "data.seed", default=42, reason="of shuffle"),
    _taskset(
        "task_selector.feature_keys", "data.train.0.difficulty", default=[], reason="one column of numbers"
    ),
    coming(f"{TASKSET}.task_selector.kwargs", "tasks chosen by how they went", default={}),
    coming(f"{TASKSET}.task_selector.kwargs.*", "tasks chosen by how they went", default={}),
    *(
        translated(f"{TASKSET}.rollout_args.{key}", sampling, native, default=default, reason=reason)
        for key, native, default, reason in (
            ("top_p", "rollout.sampling.top_p", None, "null: model.top_p"),
            ("top_k", "rollout.sampling.top_k", None, "null: model.top_k; -1 is off"),
        )
    ),
    translated(
        f"{TASKSET}.rollout_args.max_tokens",
        token_limits,
        "rollout.sampling.max_tokens",
        default=None,
        reason="null: model.max_response_tokens",
    ),
    translated(f"{TASKSET}.reward_fn_args", rewards, "rewards", default={}, reason=_ARGUMENTS),
    *_of_tasks(TASKSET),
    coming(f"{INPUT}.tasksets", "several training tasksets", default=[]),
    _eval_set("format.system_prompt", "data.eval", reason=_SYSTEM),
    _eval_set("format.system_prompt_key", "data.eval", reason=_SYSTEM_COLUMN),
    _eval_set("format.reply_prefix", "data.eval", reason=_PREFIX),
    _eval_set("rollout_args.top_p", "eval.sampling.top_p", "eval.sources", reason="null: model.top_p"),
    _eval_set(
        "rollout_args.top_k", "eval.sampling.top_k", "eval.sources", reason="null: model.top_k; -1 is off"
    ),
    _eval_set(
        "rollout_args.max_tokens",
        "eval.sampling.max_tokens",
        "eval.sources",
        reason="null: model.max_response_tokens",
    ),
    translated(f"{EVAL_TASKSETS}[].reward_fn_args", rewards, "rewards", default={}, reason=_ARGUMENTS),
    *_of_tasks(f"{EVAL_TASKSETS}[]"),
    _file("split", "data.train.0.split", default="train", reason=_SPLIT),
    _file("subset_name", "data.train.0.subset", reason=_SUBSET),
    at_any_value(f"{EXPERIENCES}.enable_progress_bar", "whet has its own display", default=False),
    *(patience(f"{EXPERIENCES}.{key}") for key in ("max_retry_times", "max_retry_interval")),
    *_not_built(f"{EXPERIENCES}.format", {"image_key": None, "video_key": None}, _PICTURES),
    *MORE_REPLAY,
    _expert("split", "data.expert", default="train", reason=_SPLIT),
    _expert("subset_name", "data.expert", reason=_SUBSET),
    _expert("format.prompt_type", "data.expert", default="messages", reason=_TURNS),
    _expert("format.messages_key", "data.expert", default="message", reason=_TURNS),
    _expert("format.system_prompt", "data.expert", reason=_SYSTEM),
    _expert("format.system_prompt_key", "data.expert", reason=_SYSTEM_COLUMN),
    _expert(
        "format.enable_concatenated_multi_turn",
        "data.learn_turns",
        default=False,
        reason="true: every assistant message is learned",
    ),
    at_any_value(f"{AUXILIARY}.<name>.total_epochs", "demonstrations begin again by themselves", default=1),
    coming(f"{AUXILIARY}.<name>.schema_type", "other auxiliary buffers than demonstrations", default="sft"),
    at_any_value(f"{AUXILIARY}.<name>.enable_progress_bar", "whet has its own display", default=False),
    *_not_built(
        f"{AUXILIARY}.<name>.format", {"image_key": None, "video_key": None, "tools_key": "tools"}, _PICTURES
    ),
)
"""Keys that the document leaves to the source code."""

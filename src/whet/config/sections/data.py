"""Sections about the sources of tasks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from whet.config.sections.base import Above0, Count, Negative, Percent, Positive, Section, Share

REASONING_GYM = "reasoning_gym"
"""The function of a source whose rows the package of that name generates."""


class ReasoningGymArguments(Section):
    """Its arguments; all others are those of the dataset."""

    model_config = ConfigDict(extra="allow")

    task: str
    """Name of the dataset."""
    size: Positive = 1000
    """Number of tasks to generate."""
    seed: Count = 0
    """Seed of the generator."""


RANDOM_TOKENS = "random_tokens"
"""The function of a source whose rows are made up, for trial runs."""


class RandomTokensArguments(Section):
    """Its arguments."""

    rows: Positive
    """Number of rows."""
    prompt: Count = 0
    """Tokens of each prompt; 0: the rows have none (set the source's `prompt` to null)."""
    response: Count = 0
    """Tokens of each response; 0: the rows have none."""
    seed: Count = 0
    """Seed of the tokens."""


GENERATED: dict[str, type[Section]] = {
    REASONING_GYM: ReasoningGymArguments,
    RANDOM_TOKENS: RandomTokensArguments,
}
"""Built-in functions of sources, with their arguments."""


class SourceConfig(Section):
    """One source of rows."""

    name: str | None = None
    """Label of this source in metrics. Default: the stem of the file, or the name of the reasoning-gym task."""
    path: str | tuple[str, ...] | None = None
    """File, folder, glob or list of them: parquet, jsonl, json, csv, or a Hugging Face dataset folder; on this machine,
    or a URL that is fetched once (hf://datasets/ORG/NAME, s3://, gs://, hdfs://). NaN and infinity, which are not JSON,
    and an object with a duplicate key are refused."""
    subset: str | None = None
    """Configuration of a dataset folder: the subfolder of that name."""
    split: str | tuple[str, ...] | None = None
    """Split of a dataset folder, or a list of splits that are concatenated: a saved split, or the files with its name.
    Default: all files."""
    function: str | None = None
    """Function that returns an iterable of rows (dicts), as 'package.module:name' or 'path/to/file.py:name'; or a
    dataset class whose instances are iterable or have `__len__` and `__getitem__`. Built in: reasoning_gym, tasks with
    their own verifier from the package reasoning-gym; random_tokens, made-up rows for a trial run of full length."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`. Of reasoning_gym: task (name of the dataset, e.g. spell_backward), size (number
    of tasks, 1000), seed (0; use different seeds for training and evaluation), and those of the dataset, e.g.
    min_word_len: 3. Of random_tokens: rows (their number), prompt and response (tokens of each; 0: none), seed (0)."""
    rows: tuple[dict[str, Any], ...] | None = None
    """The rows themselves, for a small number of rows; they become part of the config. Put large data into files."""
    weight: Above0 = 1.0
    """Sampling weight of this source in the mix, relative to the other sources (`data.mixing=weighted`)."""
    prompt: str | None = "prompt"
    """Column of the prompt: text, a list of {role, content} messages, or a list of token ids. null: the rows have no
    prompt, and SFT learns all tokens of the response but the first; with `rollout.env` the environment asks, and what
    it says first follows `system_prompt`. Columns that you do not name are recognised where the default ones are
    absent: `messages` (a prompt if they end with a question and the algorithm does not learn replies); `question`
    or `text` as the prompt; `completion` or `chosen` as the response (the `answer` of a `question`, if there is
    neither); conversations in `chosen` and `rejected` with a shared prompt; for SFT a `text` alone as a response
    without a prompt. run.log and `whet plan` report the choice; if several columns fit, name one."""
    messages: str | None = None
    """Column of whole conversations that end with a reply, instead of `prompt` and `response`: the last message is the
    response, all messages before it are the prompt."""
    answer: str = "answer"
    """Column of the reference answer; dots address nested columns (verl: reward_model.ground_truth). May be absent."""
    response: str = "response"
    """Column of the demonstration (SFT) or the chosen reply (DPO): text, one assistant message, or token ids, which
    must hold the end of the reply. May be absent."""
    rejected: str = "rejected"
    """Column of the rejected reply (DPO): text, or messages that end with the reply. May be absent."""
    tools: str | None = "tools"
    """Column of the tools that the chat template shows to the policy: a list in OpenAI's form, or its JSON text. May be
    absent; null: none is read. (verl, Trinity: tools_key)"""
    chat_template_kwargs: str | None = "chat_template_kwargs"
    """Column of each row's variables of the chat template, which override tokenizer.chat_template_kwargs: a map, e.g.
    {enable_thinking: false}, or the value of one variable named like the column. May be absent; null: none is read.
    (verl: enable_thinking_key)"""
    desirable: str = "desirable"
    """Column that marks the response as desirable (KTO): true or 1, false or 0. May be absent."""
    label: str | None = None
    """Column with the source label of each row (verl: data_source). A row without a label has `name`, and so has every
    row by default."""
    difficulty: str | tuple[str, ...] | None = None
    """Column of numbers, larger is harder: the sort key of `data.order` easy_first and hard_first. With a list of
    columns, rows that are equal in the first are sorted by the second, and so on."""
    template: str | None = None
    """Text around a plain-text prompt, in which {prompt} stands for it: "Question: {prompt}". null: none."""
    system_prompt: str | None = None
    """System message put before the prompt; it turns a plain-text prompt into a chat. null: none."""
    system_prompt_column: str | None = None
    """Column with the system message of each row. A row without one has `system_prompt`."""
    reply_prefix: str | None = None
    """Text that every reply starts with. The text is given, not sampled: it belongs to the tokens of the prompt, and is
    neither in `response` nor in the text that rewards score."""
    rewards: tuple[str, ...] | None = None
    """Names of the `rewards` of the run that score this source; needs a `name`. Default: all rewards. An empty list:
    none, where its environment gives the reward (`rollout.env`)."""
    expect: dict[str, Any] = Field(default_factory=dict)
    """Columns, and the value that every row with the column must have in it; a row with another value is an error, so
    that rows which were made for something else are never taken for these. (SkyRL: env_class of a row, in place of
    environment.env_class)"""
    skip: int | Share | Percent = 0
    """Number of rows to skip at the start. A number below 1 is a share of all rows: at least one row is skipped, and
    never the last. A negative number counts from the end, as in a slice: -10 skips all rows but the last ten. A text
    like 10% or -10% is a boundary as in the slices of the datasets library: the row that is closest to it, of two the
    even one."""
    limit: Positive | Negative | Share | Percent | None = None
    """Maximum number of rows to use after `skip`. A share is counted as in `skip`: limit 0.1 of one source and skip 0.1
    of another split the same rows into two disjoint parts. A negative number excludes that many rows at the end. With
    percentages skip 5% and limit 10% are the rows between the boundaries 5% and 15%; limit -10% excludes the last
    tenth."""


class DataConfig(Section):
    """The sources of tasks, and their order."""

    train: tuple[SourceConfig, ...] = ()
    """Sources of training tasks, mixed as `mixing` says. May be empty where explorers in other processes draw the tasks
    (mode=train with rollout.schedule=async), and with mode=eval."""
    demonstrations: tuple[SourceConfig, ...] = ()
    """Sources of demonstrations beside the policy's own rollouts (algorithm.mix), mixed as `mixing` says."""
    eval: tuple[SourceConfig, ...] = ()
    """Sources of held-out tasks; every metric is reported per source."""
    exclude_eval: bool = True
    """Exclude training rows whose prompt is also in `eval`, and count them."""
    order: str | dict[str, Any] = "shuffle"
    """Order in which the rows of a training source are drawn: shuffle (a new random order in each epoch), sequential
    (the order of the file), easy_first and hard_first (by `difficulty`), random (each draw from all rows, without
    epochs), adaptive (tasks near a target success rate), a table of settings (`{name: adaptive, target: 0.7}`), or a
    class of yours as 'package.module:Class' or 'path/to/file.py:Class' (docs/curriculum.md). adaptive, and a class of
    yours, hold for `train` alone: `demonstrations` are then shuffled."""
    mixing: Literal["weighted", "proportional"] = "weighted"
    """How draws are divided among several sources. weighted: by the `weight` of each, kept as exactly as possible at
    every point; a small source is passed again before a large one ends. proportional: each epoch draws from a source
    as often as it has rows (after filtering), and the sources alternate in a random order, a new one in each epoch."""
    seed: Count | None = None
    """Seed of that order, and of proportional `mixing`. Default: the seed of the run."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt, in tokens, after the chat template; `overlong` says what happens to a longer one. (verl:
    max_prompt_length)"""
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt and reply together, in tokens: a rollout ends at this length, and `overlong` applies to a longer
    row of demonstrations or preferences (SFT, DPO). Default: the sum that `max_prompt_tokens`,
    `rollout.sampling.max_tokens` and, with an environment, `rollout.env.observation_tokens` allow."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right", "truncate_middle"] = "error"
    """What happens to a prompt or row above these limits. (verl: truncation) error: the run stops, because silent
    truncation changes the task; filter: the row is dropped and counted; truncate_*: a prompt is truncated on that side,
    a reply at its end. Above `max_total_tokens` truncate_right truncates the reply, the others truncate the prompt."""
    learn_turns: Literal["all", "last"] | None = None
    """Which replies of a conversation SFT trains on: every assistant message, or only the last one. Default: all if a
    training source has `messages`, else the last. A last reply ends with the token that the chat template writes after
    a reply if it ends the model's own replies (generation_config.json), else with the tokenizer's eos_token."""
    chat: bool | None = None
    """Whether prompts go through the chat template. Default: prompts of messages and those with a system message do,
    other plain text does not. true: plain text becomes a message of the user. false is refused where there are
    messages."""

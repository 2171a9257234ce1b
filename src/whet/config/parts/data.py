"""Sections about where tasks come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.parts.base import Above0, Count, Negative, Positive, Section

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class ReasoningGym(Section):
    """Procedurally generated tasks with their own verifier, from the reasoning-gym package."""

    task: str
    """Name of the reasoning-gym dataset, e.g. spell_backward."""
    size: Positive = 1000
    """How many tasks to generate."""
    seed: Count = 0
    """Seed of the generator; give training and evaluation different ones."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that dataset, e.g. {min_word_len: 3}."""


class Source(Section):
    """One place that rows come from."""

    name: str | None = None
    """Label of this source in metrics. Default: the file's stem or the task's name."""
    path: str | tuple[str, ...] | None = None
    """File, folder, glob or list of them: parquet, jsonl, json, csv, or a Hugging Face dataset folder. Local only.
    Refused are NaN and infinity, which are no JSON, and an object that has a key twice."""
    subset: str | None = None
    """Configuration of a dataset folder: its subfolder of that name."""
    split: str | tuple[str, ...] | None = None
    """Split of a dataset folder, or several, one after the other: a saved split, or the files that have its name.
    Default: all files."""
    reasoning_gym: ReasoningGym | None = None
    """Generate the rows instead."""
    function: str | None = None
    """'package.module:name' or 'path/to/file.py:name' of a function that returns an iterable of rows (dicts), or of a
    dataset class whose instances are one or have `__len__` and `__getitem__`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""
    rows: tuple[dict[str, Any], ...] | None = None
    """The rows themselves, for a few; they become part of the config. Large data belongs in files."""
    weight: Above0 = 1.0
    """Share of this source in the mix, relative to the others."""
    prompt: str = "prompt"
    """Column of the prompt: text, or a list of {role, content} messages."""
    messages: str | None = None
    """Column of whole conversations that end with a reply, in place of `prompt` and `response`: the messages before
    the last are the prompt, the last is the response."""
    answer: str = "answer"
    """Column of the reference answer; dots go into nested columns (verl: reward_model.ground_truth). May be absent."""
    response: str = "response"
    """Column of the demonstration (SFT) or the chosen reply (DPO): text, or one assistant message. May be absent."""
    rejected: str = "rejected"
    """Column of the rejected reply (DPO): text, or messages that end with it. May be absent."""
    desirable: str = "desirable"
    """Column that says whether the response is a desirable one (KTO): true or 1, false or 0. May be absent."""
    label: str | None = None
    """Column that holds each row's own source label (verl: data_source). A row without one, and by default every
    row, has `name`."""
    difficulty: str | None = None
    """Column of numbers, larger is harder: what `data.order` easy_first and hard_first go by."""
    template: str | None = None
    """Text put around a plain-text prompt, with {prompt} in it."""
    system_prompt: str | None = None
    """System message put before the prompt; makes a chat of a plain-text prompt."""
    system_prompt_column: str | None = None
    """Column of each row's own system message. A row without one has `system`."""
    reply_prefix: str | None = None
    """Text that every reply starts with. It is given, not sampled: part of the prompt's tokens, and neither in
    `response` nor in the text that rewards see."""
    rewards: tuple[str, ...] | None = None
    """Which of the run's `rewards` judge this source; needs a `name`. Default: all."""
    skip: int | Share = 0
    """Leave out the first so many rows. A number below 1 is a share of all rows: at least one, and never the last. A
    negative number counts from the end, as in a slice: -10 leaves out all but the last ten."""
    limit: Positive | Negative | Share | None = None
    """Use only the first so many of the others. A share is counted as in `skip`: limit 0.1 of one source and skip 0.1
    of another part the same rows in two. Negative: all of them but the last so many."""


class Data(Section):
    """Where tasks come from, and in what order."""

    train: tuple[Source, ...] = ()
    """Sources of training tasks, mixed by weight."""
    demonstrations: tuple[Source, ...] = ()
    """Sources of demonstrations that stand among the policy's own rollouts (algorithm.mix), mixed by weight."""
    eval: tuple[Source, ...] = ()
    """Sources of held-out tasks; every metric is given per source."""
    exclude_eval: bool = True
    """Leave out training rows whose prompt also stands in `eval`, and count them."""
    order: Literal["shuffle", "sequential", "easy_first", "hard_first"] = "shuffle"
    """Order of the rows of a source in every epoch. shuffle: anew each time; sequential: as in the file; easy_first,
    hard_first: by `difficulty`, equally difficult rows shuffled."""
    seed: Count | None = None
    """Seed of that order. Default: the run's seed."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt, in tokens, after the chat template."""
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt and reply together, in tokens: a rollout ends there, and a row to learn from (SFT, DPO) that is
    longer is `overlong`. Default: what `max_prompt_tokens` and `rollout.sampling.max_tokens` allow."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right", "truncate_middle"] = "error"
    """What to do with a longer one; `filter` counts what it drops. `error`, because a silent cut changes the task.
    truncate_* cut a prompt there, a reply at its end; over `max_total_tokens` truncate_right cuts the reply, the
    others the prompt."""
    learn_turns: Literal["all", "last"] | None = None
    """Which replies of a conversation SFT learns: every assistant message, or the last alone. Default: all if a
    training source has `messages`, else the last."""
    chat: bool | None = None
    """Apply the chat template. Default: to message prompts yes, to plain text no."""

"""Rules over several keys, each with overrides that break it.

The text of the error is not written down a second time: `error` breaks the rule and takes what the check says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from whet.config.checks import hard_problems
from whet.config.load import load
from whet.types import Json

BASE: Mapping[str, Json] = {
    "model": {"scratch": {}},
    "tokenizer": {"build": "chars"},
    "data": {"train": [{"path": "train.jsonl"}]},
    "rewards": {"answer": {"function": "exact"}},
    "train": {"steps": 100},
}
"""A config that works; what breaks a rule is put over it."""


@dataclass(frozen=True)
class Constraint:
    """One rule over several keys."""

    keys: str
    """All that the rule looks at, separated by spaces. The error stands at the first, or at a section around it."""
    broken: tuple[str, ...]
    """Overrides of BASE that break the rule."""


def error(rule: Constraint) -> str:
    """What is said of a config that breaks a rule."""
    cfg = load(None, rule.broken, BASE).config
    at = rule.keys.split()[0].replace(".*", ".0")
    plain = ((re.sub(r"\[(\d+)\]", r".\1", key), text) for key, text in hard_problems(cfg))
    return next(text for key, text in plain if f"{at}.".startswith(f"{key}."))


def _at_schedule(at: str, *algorithm: str) -> tuple[Constraint, ...]:
    return (
        Constraint(
            f"{at}.warmup_steps {at}.warmup_ratio",
            (*algorithm, f"{at}.warmup_steps=5", f"{at}.warmup_ratio=0.1"),
        ),
        Constraint(
            f"{at}.warmup_steps {at}.total_steps",
            (*algorithm, f"{at}.type=cosine", f"{at}.warmup_steps=9", f"{at}.total_steps=9"),
        ),
        Constraint(
            f"{at}.decay_steps {at}.warmup_steps {at}.total_steps",
            (
                *algorithm,
                f"{at}.type=wsd",
                f"{at}.warmup_steps=5",
                f"{at}.decay_steps=6",
                f"{at}.total_steps=9",
            ),
        ),
    )


def _source(part: str, *given: str) -> tuple[Constraint, ...]:
    """The rules of a source. given: overrides without which nothing reads it."""
    at = f"data.{part}.*"

    def rule(keys: str, row: str) -> Constraint:
        return Constraint(
            " ".join(f"{at}.{key}" for key in keys.split()), (*given, f"data.{part}=[{{{row}}}]")
        )

    return (
        rule("path reasoning_gym function rows", "path: a.jsonl, function: 'mine.py:rows'"),
        rule("arguments function", "path: a.jsonl, arguments: {size: 5}"),
        rule("subset path", "function: 'mine.py:rows', subset: main"),
        rule("split path", "function: 'mine.py:rows', split: test"),
        rule("template prompt", "path: a.jsonl, template: Solve it."),
        rule("messages prompt response template", "path: a.jsonl, messages: talk, prompt: question"),
    )


MODELS = (
    Constraint(
        "model.scratch.num_key_value_heads model.scratch.num_attention_heads",
        ("model.scratch.num_key_value_heads=3",),
    ),
    Constraint(
        "model.scratch.num_attention_heads model.scratch.hidden_size model.scratch.head_dim",
        ("model.scratch.hidden_size=30",),
    ),
    Constraint("model.scratch.head_dim", ("model.scratch.head_dim=7",)),
    Constraint("tokenizer.chat_template", ("tokenizer.chat_template=no_such_file",)),
)

DATA = (
    Constraint(
        "data.max_prompt_tokens rollout.sampling.max_tokens model.scratch.max_position_embeddings",
        ("model.scratch.max_position_embeddings=512",),
    ),
    *_source("train"),
    *_source("eval"),
    *_source("demonstrations", "algorithm.name=mix"),
    Constraint(
        "data.train.*.rewards rewards.*", ("data.train=[{path: a.jsonl, name: a, rewards: [style]}]",)
    ),
    Constraint(
        "data.train.*.rewards data.train.*.name", ("data.train=[{path: a.jsonl, rewards: [answer]}]",)
    ),
    Constraint("data.train.*.difficulty data.order", ("data.order=easy_first",)),
    Constraint("eval.reward rewards.*", ("data.eval=[{path: test.jsonl}]", "eval.reward=style")),
    Constraint(
        "eval.samples eval.sampling.temperature", ("data.eval=[{path: test.jsonl}]", "eval.samples=4")
    ),
)

ALGORITHM = (
    Constraint("algorithm.name", ("algorithm.name=gpro",)),
    Constraint("algorithm.advantage", ("algorithm.advantage=gea",)),
    Constraint("algorithm.loss algorithm.name", ("algorithm.loss=sft",)),
    Constraint(
        "algorithm.loss.rec_regularizer algorithm.loss.rec_regularizer_coef",
        ("algorithm.name=rec", "algorithm.loss.rec_regularizer=k2"),
    ),
    Constraint(
        "algorithm.correction.weight.low algorithm.correction.weight.high",
        ("algorithm.correction.weight={name: token, low: 2.0, high: 1.0}",),
    ),
    Constraint(
        "algorithm.correction.reject.*.low algorithm.correction.reject.*.high",
        ("algorithm.correction.reject=[{over: sum}]",),
    ),
    Constraint(
        "algorithm.old_logprobs algorithm.correction.weight algorithm.correction.reject "
        "algorithm.correction.second_moment",
        ("algorithm.old_logprobs=sampled", "algorithm.correction.weight=token"),
    ),
    Constraint(
        "algorithm.mix.demonstration_ratio train.tasks_per_step train.minibatches",
        (
            "algorithm={name: mix, mix: {demonstration_ratio: 0.01}}",
            "data.demonstrations=[{path: given.jsonl}]",
            "train.minibatches=2",
        ),
    ),
    Constraint("algorithm.groups.uniform_by rewards.*", ("algorithm.groups.uniform_by=[style]",)),
    Constraint(
        "algorithm.groups.keep_best algorithm.groups.keep_worst rollout.group_size",
        ("algorithm.groups.keep_best=8",),
    ),
    Constraint("rewards.*.weight", ("rewards.answer.weight=0.0",)),
)

SAMPLING = (
    Constraint(
        "rollout.sampling.min_tokens rollout.sampling.max_tokens", ("rollout.sampling.min_tokens=300",)
    ),
    Constraint(
        "rollout.sampling.ignore_eos rollout.sampling.stop rollout.sampling.stop_token_ids",
        ("rollout.sampling.ignore_eos=true", "rollout.sampling.stop=['.']"),
    ),
)

PPO = "algorithm.name=ppo"

TRAIN = (
    Constraint("train.minibatches train.tasks_per_step", ("train.minibatches=3",)),
    *_at_schedule("train.optimizer.schedule"),
    Constraint("critic.minibatches train.tasks_per_step", (PPO, "critic.minibatches=3")),
    *_at_schedule("critic.optimizer.schedule", PPO),
)

RUN = (
    Constraint("checkpoint.save_contents", ("checkpoint.save_contents=[optimizer]",)),
    Constraint("checkpoint.load_contents", ("checkpoint.load_contents=[optimizer]",)),
    Constraint("checkpoint.dir run_dir", ("checkpoint.dir=runs",)),
    Constraint("checkpoint.export_dir run_dir", ("checkpoint.export_dir=runs",)),
    Constraint("track.rollouts_dir track.eval_dir", ("track.rollouts_dir=all", "track.eval_dir=all")),
    Constraint("track.rollouts_dump", ("track.rollouts_dump=dump.jsonl",)),
    Constraint("track.eval_dump", ("track.eval_dump=dump.jsonl",)),
    Constraint("track.batches_dump", ("track.batches_dump='{step}.pkl'",)),
    Constraint("imports", ("imports=[no_such_file.py]",)),
)

CONSTRAINTS: tuple[Constraint, ...] = (*MODELS, *DATA, *ALGORITHM, *SAMPLING, *TRAIN, *RUN)

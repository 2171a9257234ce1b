"""A newcomer's desk: the files that the tasks and mistakes work on, and a run and a model that are there already."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import whet
from whet.cli import main
from whet.types import ConfigError, WhetError

RUN = """\
model: {scratch: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1, num_key_value_heads: 1, head_dim: 16,
                  intermediate_size: 16, max_position_embeddings: 64}}
tokenizer: {build: chars}
data: {train: tasks.jsonl, max_prompt_tokens: 8}
algorithm: grpo
rewards: {right: exact}
rollout: {group_size: 2, sampling: {max_tokens: 4}}
train: {steps: 2, tasks_per_step: 2, optimizer: {lr: 1e-2}}
checkpoint: {interval: 1, keep: null}
machine: {threads: 1}
reward_workers: {count: 1}
"""
SHORT = "data.max_prompt_tokens=8 rollout.sampling.max_tokens=4"
"""Limits that fit the model of the desk."""
REWARDS = """\
import math


def first_letter(response, task):
    return float(response[:1] == task.answer[:1])


def by_column(response, level):
    return level / 10


def as_trl(prompts, completions, level, **kwargs):
    return [float(len(c) <= n) for c, n in zip(completions, level)]


def by_parts(response, task):
    return {"score": 1.0, "short": float(len(response) < 3)}


def talks(response, task):
    print("a word from the reward")
    return float(len(response))


def raises(response, task):
    raise ValueError("bad luck")


def gives_text(response, task):
    return "good"


def gives_nothing(response, task):
    pass


def gives_nan(response, task):
    return math.nan


def gives_short_list(prompts, completions, **kwargs):
    return [1.0]


def other_signature(x, y):
    return 1.0


def unknown_column(response, levle):
    return 1.0
"""
ROWS = ("ab", "ba"), ("cab", "bac"), ("bc", "cb"), ("abb", "bba")
"""Words and what is to be said of each."""


def lines(make: Callable[[int, str, str], str]) -> str:
    return "".join(make(n, word, reply) + "\n" for n, (word, reply) in enumerate(ROWS))


def asked(word: str) -> str:
    return f'{{"role": "user", "content": "{word}"}}'


def said(text: str) -> str:
    return f'{{"role": "assistant", "content": "{text}"}}'


FILES = {
    "run.yaml": RUN,
    "rewards.py": REWARDS,
    "tasks.jsonl": lines(lambda n, w, r: f'{{"prompt": "{w}>", "answer": "{r}", "level": {n}}}'),
    "held_out.jsonl": '{"prompt": "c>", "answer": "c"}\n{"prompt": "a>", "answer": "a"}\n',
    "question.jsonl": lines(lambda n, w, r: f'{{"question": "{w}>", "answer": "{r}"}}'),
    "own.jsonl": lines(lambda n, w, r: f'{{"word": "{w}>", "gold": {{"text": "{r}"}}}}'),
    "demos.jsonl": lines(lambda n, w, r: f'{{"prompt": "{w}>", "response": "{r}"}}'),
    "completions.jsonl": lines(lambda n, w, r: f'{{"prompt": "{w}>", "completion": "{r}"}}'),
    "texts.jsonl": lines(lambda n, w, r: f'{{"text": "{w}>{r}"}}'),
    "pairs.jsonl": lines(lambda n, w, r: f'{{"prompt": "{w}>", "chosen": "{r}", "rejected": "{w}"}}'),
    "labels.jsonl": lines(
        lambda n, w, r: f'{{"prompt": "{w}>", "completion": "{r}", "label": {str(n % 2 == 0).lower()}}}'
    ),
    "chat_pairs.jsonl": lines(
        lambda n, w, r: f'{{"chosen": [{asked(w)}, {said(r)}], "rejected": [{asked(w)}, {said(w)}]}}'
    ),
    "chat.jsonl": lines(lambda n, w, r: f'{{"messages": [{asked(w)}, {said(r)}]}}'),
    "chat_prompts.jsonl": lines(lambda n, w, r: f'{{"prompt": [{asked(w)}], "answer": "{r}"}}'),
    "tasks.csv": "prompt,answer\nab>,ba\nbc>,cb\n",
}


def lay_out(folder: Path) -> None:
    """Write the files, train `runs/done` to its end and put its model into `models/mine`."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with contextlib.chdir(folder):
        whet.train("run.yaml", run_dir="runs/done", data={"train": "tasks.jsonl", "eval": "held_out.jsonl"})
        shutil.copytree("runs/done/export/main", "models/mine")


def whet_says(*arguments: str) -> tuple[int, str]:
    """The exit code of a command, and all that it says, with every run of white space as one space."""
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["whet", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, " ".join(out.getvalue().split())


def python_says(call: Callable[[], object]) -> tuple[int, str]:
    """The same of a call from Python: what an error would have been on the command line, and its words."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            print(call())
            code = 0
        except ConfigError as e:
            code = 2
            print(e)
        except WhetError as e:
            code = 1
            print(e)
    return code, " ".join(out.getvalue().split())

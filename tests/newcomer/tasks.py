"""More than forty things that people do in their first hour, each with what they see and which files they have then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import whet
from newcomer import desk

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


class Task(NamedTuple):
    """One task. `do`: commands without `whet`, a line each, or a call from Python whose result is printed."""

    name: str
    do: str | Callable[[], object]
    said: tuple[str, ...] = ()
    """Parts of what is printed, in this order."""
    there: tuple[str, ...] = ()
    """Files and folders that are there then; 'FILE: TEXT' has this text in it."""
    files: Mapping[str, str] = {}
    """What is on the desk besides."""


TRAIN = "train run.yaml "
OWN_MODEL = TRAIN + "model=models/mine model.scratch=~ tokenizer=~ data.max_prompt_tokens=40 "
DONE = "train runs/done/config.yaml "
ENDED = ("main step 2/2", "stage steps time", "curve runs/run/curve.png")
ROWS = [{"prompt": f"{word}>", "answer": reply} for word, reply in desk.ROWS]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant: "
TOML = """\
algorithm = "grpo"
data = {train = "tasks.jsonl", max_prompt_tokens = 8}
rewards = {right = "exact"}
rollout = {group_size = 2, sampling = {max_tokens = 4}}
train = {steps = 1, tasks_per_step = 2}
tokenizer = {build = "chars"}
reward_workers = {count = 1}
[model.scratch]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 16
intermediate_size = 16
"""


def python(**sections: Any) -> Callable[[], object]:
    return lambda: steps_of(whet.train("run.yaml", **sections))


def steps_of(result: whet.Result) -> str:
    return f"steps {[line['step'] for line in result.metrics if 'rollout/count' in line]}"


def one_reward(response: str, task: whet.Task) -> float:
    return float(len(response) == len(str(task.answer)))


def two_rewards() -> object:
    rewards = {"right": {"function": "exact", "weight": 2.0}, "long": lambda response: float(len(response))}
    return sorted(
        k for k in whet.train("run.yaml", rewards=rewards).metrics[-1] if k.startswith("reward/part")
    )


def callbacks() -> object:
    seen: list[tuple[str, int]] = []
    result = whet.train(
        "run.yaml",
        data={"eval": "held_out.jsonl"},
        on_step=lambda row: seen.append(("step", row["step"])),
        on_eval=lambda row: seen.append(("eval", row["step"])),
    )
    return seen, result.finished


def stopped_by_a_callback() -> object:
    result = whet.train("run.yaml", overrides=["train.steps=5"], on_step=lambda row: row["step"] == 1)
    return steps_of(result), result.finished


def stages() -> object:
    first = {"name": "sft", "algorithm": "sft", "data": {"train": "demos.jsonl"}}
    result = whet.train("run.yaml", stages=[first, {"name": "rl"}])
    return [(line["stage"], line["step"]) for line in result.metrics if "rollout/count" in line]


def evaluated() -> object:
    found = whet.evaluate("models/mine", data=ROWS[:2], rewards=one_reward, overrides=desk.SHORT.split())
    return [(line["step"], line["eval/eval/tasks"]) for line in found]


START = [
    Task("the version", "--version", ("whet ",)),
    Task("the commands", "--help", ("train", "plan", "rehearse", "eval", "export", "convert", "show")),
    Task("train", "train run.yaml", ENDED, ("runs/run/metrics.jsonl", "runs/run/export/main/config.json")),
    Task("fewer steps", TRAIN + "train.steps=1", ("main step 1/1",)),
    Task(
        "another folder", TRAIN + "seed=3 run_dir=runs/s3 train.steps=1", ("runs/s3/curve.png",), ("runs/s3",)
    ),
    Task("a TOML file", "train e.toml", ("main step 1/1",), files={"e.toml": TOML}),
    Task(
        "with held-out tasks",
        TRAIN + "data.eval=held_out.jsonl",
        ("held-out 0.000", "prompt expected before after"),
    ),
    Task("drop a key", TRAIN + "rewards.right=~ rewards.mine=rewards.py:first_letter", ENDED),
    Task(
        "keys without effect",
        TRAIN + "--unused warn algorithm=sft data.train=demos.jsonl rollout.group_size=4",
        ("note: rollout.group_size: has no effect", "main step 2/2"),
    ),
    Task(
        "a run anew",
        "train runs/done/config.yaml checkpoint.resume=fresh",
        ("previous run was moved to", "2/2"),
    ),
]

DATA = [
    Task(
        "columns of your own",
        TRAIN + "'data.train={path: own.jsonl, prompt: word, answer: gold.text}'",
        ENDED,
    ),
    Task(
        "columns that are recognised",
        "plan run.yaml data.train=question.jsonl",
        ("prompt from column 'question'", "response from column 'answer'", "name columns to read others"),
    ),
    Task("a table", TRAIN + "data.train=tasks.csv", ENDED),
    Task(
        "a mix of files",
        TRAIN + "'data.train=[{path: tasks.jsonl, weight: 3}, {path: tasks.csv, name: more}]'",
        ENDED,
    ),
    Task("a system prompt", OWN_MODEL + "data.train.0.system_prompt=Reverse.", ENDED),
    Task("prompts of messages", OWN_MODEL + "data.train=chat_prompts.jsonl", ENDED),
    Task(
        "plain text for a chat model",
        OWN_MODEL,
        ("plain text, so the model's chat template is not applied", "data.chat=true"),
    ),
    Task(
        "another template",
        OWN_MODEL + "data.train=chat_prompts.jsonl tokenizer.chat_template=chat.jinja train.steps=1",
        ("main step 1/1",),
        ("runs/run/export/main/chat_template.jinja: {{ m.role }}: ",),
        files={"chat.jinja": CHAT},
    ),
    Task("another tokenizer", TRAIN + "tokenizer.build=words", ENDED),
    Task(
        "GSM8K",
        f"data gsm8k --from {ROOT}/tests/data/gsm8k --to gsm",
        ("train.parquet: ",),
        ("gsm/test.parquet",),
    ),
]

LEARNING = [
    Task("a reward in a file", TRAIN + "rewards.right=rewards.py:first_letter", ENDED),
    Task("a reward that reads a column", TRAIN + "rewards.right=rewards.py:by_column", ENDED),
    Task("a reward of TRL", TRAIN + "rewards.right=rewards.py:as_trl", ENDED),
    Task(
        "a reward of several parts",
        TRAIN + "rewards.right=rewards.py:by_parts\nshow runs/run --step 1 --limit 1",
        ("reward 1", "parts right 1 right/short"),
    ),
    Task(
        "a reward that prints",
        TRAIN + "rewards.right=rewards.py:talks",
        ("a word from the reward",),
        ("runs/run/run.log: a word from the reward",),
    ),
    Task(
        "SFT",
        TRAIN + "algorithm=sft data.train=demos.jsonl",
        ("rewards.right.function: has no effect", "loss"),
    ),
    Task("SFT on completions", TRAIN + "algorithm=sft data.train=completions.jsonl", ("main step 2/2",)),
    Task(
        "SFT on conversations",
        OWN_MODEL + "algorithm=sft data.train=chat.jsonl rollout.sampling.max_tokens=8",
        ("2/2",),
    ),
    Task(
        "SFT on texts",
        TRAIN + "algorithm=sft data.train=texts.jsonl rollout.sampling.max_tokens=8",
        ("main step 2/2",),
        ("runs/run/run.log: no prompt, response from column 'text'",),
    ),
    Task("DPO", TRAIN + "algorithm=dpo data.train=pairs.jsonl", ("accuracy", "margin")),
    Task(
        "DPO on conversations",
        OWN_MODEL + "algorithm=dpo data.train=chat_pairs.jsonl\nshow runs/run --step 1 --limit 2",
        ("margin", "chosen ", "rejected "),
    ),
    Task("KTO", TRAIN + "algorithm=kto data.train=labels.jsonl", ("main step 2/2",)),
    Task("PPO", TRAIN + "algorithm=ppo", ENDED),
    Task(
        "LoRA",
        TRAIN + "model.lora.rank=2\nexport runs/run -o adapters --as adapter",
        (*ENDED, "adapters"),
        ("adapters/adapter_config.json",),
    ),
    Task("from a model of your own", OWN_MODEL + "data.chat=false", ENDED),
    Task("rollouts ahead of training", TRAIN + "rollout.max_staleness=1", ENDED),
    Task(
        "early stopping",
        TRAIN + "data.eval=held_out.jsonl eval.interval=1 train.steps=6 'train.early_stopping={patience: 2}'",
        ("main step 2/6", "stop"),
    ),
]

RUNS = [
    Task(
        "the summary",
        "show runs/done",
        ("run runs/done, not running", "algorithm grpo", "is it learning?", "held-out"),
    ),
    Task(
        "single rollouts",
        "show runs/done --step 1 --limit 1",
        ("task 0", "prompt", "reply", "expected", "3 more rollouts"),
    ),
    Task("every token", "show runs/done --step 2 --limit 1 --tokens", ("place token text log-prob",)),
    Task("where the time went", "show runs/done --timeline", ("bubble",)),
    Task("a finished run again", DONE, ("holds a finished run; increase train.steps",)),
    Task("more steps", DONE + "train.steps=3", ("resuming from", "0-main-000002", "main step 3/3")),
    Task(
        "another learning rate from here on",
        DONE + "--change train.steps=3 train.optimizer.lr=1e-3\nshow runs/done",
        ("main step 3/3", "branches: changes of results", "train.optimizer.lr 0.01 0.001"),
    ),
    Task(
        "evaluate a run", "eval runs/done", ("main step 1", "main step 2"), ("runs/done/bench/metrics.jsonl",)
    ),
    Task(
        "evaluate one step",
        "eval runs/done --step 1 -o out/one.json",
        ("main step 1",),
        ('out/one.json: "step": 1',),
    ),
    Task("on other data", "eval runs/done --data tasks.jsonl --reward rewards.py:first_letter", ("tasks",)),
    Task(
        "evaluate a model",
        f"eval models/mine --data held_out.jsonl --reward exact {desk.SHORT}",
        ("mean@1", "tasks 2"),
        ("runs/eval-mine/bench/metrics.jsonl",),
    ),
    Task(
        "score replies of a file",
        "eval judge.yaml --offline replies.jsonl data.eval.0.response=reply",
        ("mean@1 0.5", "tasks 2"),
        files={
            "judge.yaml": "rewards: {right: exact}\n",
            "replies.jsonl": '{"prompt": "a", "reply": "b", "answer": "b"}\n'
            '{"prompt": "a", "reply": "c", "answer": "b"}\n',
        },
    ),
    Task(
        "export a step",
        "export runs/done --step 1 -o out --dtype bfloat16",
        ("out",),
        ("out/model.safetensors",),
    ),
]

LOOKING = [
    Task("what follows from a file", "plan run.yaml", ("2 tasks x 2 = 4 rollouts", "lr 0.01", "KV cache")),
    Task("on other machines", f"plan {EXAMPLES}/from_verl.yaml --gpus 8x2 --mem 80", ("machine",)),
    Task(
        "from verl",
        f"convert {EXAMPLES}/from_verl.yaml",
        ("Written by `whet convert`", "algorithm:", "name: grpo"),
    ),
    Task(
        "from a launch script",
        f"convert {EXAMPLES}/from_verl.sh",
        ("Written by `whet convert`", "algorithm:"),
    ),
    Task(
        "from SkyRL",
        f"convert {EXAMPLES}/from_skyrl.yaml --report r.md",
        ("algorithm:",),
        ("r.md: Translation of",),
    ),
    Task(
        "from Cosmos-RL",
        f"convert {EXAMPLES}/from_cosmos.toml -o out/native.yaml",
        (),
        ("out/native.yaml: train:",),
    ),
    Task("from Trinity-RFT", f"convert {EXAMPLES}/from_trinity.yaml", ("algorithm:",)),
    Task("another system's keys", "keys --dialect verl-ppo --status coming", ("coming",)),
    Task("all algorithms", "keys --algorithms", ("grpo", "dapo", "dpo")),
    Task("one key", "explain train.optimizer.lr", ("Peak learning rate", "default", "source")),
    Task("one recipe", "explain algorithm=dapo", ("dynamic_sampling", "arXiv:2503.14476")),
    Task("the schema", "schema -o out/whet.schema.json", (), ("out/whet.schema.json: json-schema.org",)),
]

PYTHON = [
    Task("a list of rows", python(data=ROWS), ("steps [1, 2]",), ("runs/run/data",)),
    Task(
        "a data frame", python(data={"train": pd.DataFrame(ROWS), "max_prompt_tokens": 8}), ("steps [1, 2]",)
    ),
    Task("a function as reward", python(rewards=one_reward), ("steps [1, 2]",)),
    Task("two rewards", two_rewards, ("long", "right")),
    Task("a section", python(train={"steps": 1}), ("steps [1]",)),
    Task("callbacks", callbacks, ("('eval', 0), ('step', 1), ('step', 2), ('eval', 2)]", "True")),
    Task("stopped by a callback", stopped_by_a_callback, ("steps [1]", "False")),
    Task("SFT, then RL", stages, ("('sft', 1), ('sft', 2), ('rl', 1), ('rl', 2)",)),
    Task("evaluate from Python", evaluated, ("[(0, 2",)),
]

TASKS = [*START, *DATA, *LEARNING, *RUNS, *LOOKING, *PYTHON]

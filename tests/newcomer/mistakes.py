"""Sixty and more mistakes of a first hour: what is done, its exit code, and the parts of the message that a person
needs (what was given, what was expected, what to do). Exit code 2: nothing was run; 1: the run ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import whet
from newcomer import desk
from whet.track.files import RunLock


class Mistake(NamedTuple):
    """One mistake. `do`: a command without `whet`, or a call from Python."""

    name: str
    do: str | Callable[[], object]
    code: int
    said: tuple[str, ...]
    files: Mapping[str, str] = {}
    """What is on the desk besides."""


def column(text: str) -> dict[str, str]:
    """A data file of one line."""
    return {"e.jsonl": text + "\n"}


TRAIN = "train run.yaml "
OWN_MODEL = TRAIN + "model=models/mine model.scratch=~ tokenizer=~ data.max_prompt_tokens=60 "
DONE = "train runs/done/config.yaml "


def given(**sections: Any) -> Callable[[], object]:
    return lambda: whet.train("run.yaml", **sections)


def two_at_once() -> object:
    with RunLock(Path("runs/run")):
        return whet.train("run.yaml")


def another_function_on_a_finished_run() -> object:
    whet.train("run.yaml", rewards=lambda response, task: 1.0)
    return whet.train("run.yaml", rewards=lambda response, task: float(len(response)))


def another_threshold_on_a_finished_run() -> object:
    def longer_than(length: int) -> Callable[..., float]:
        return lambda response, task: float(len(response) > length)

    whet.train("run.yaml", rewards=longer_than(1))
    return whet.train("run.yaml", rewards=longer_than(2))


def edited_reward_on_a_finished_run() -> object:
    whet.train("run.yaml", overrides=["rewards.right=rewards.py:by_column"])
    Path("rewards.py").write_text(desk.REWARDS.replace("level / 10", "level / 20"))
    return whet.train("run.yaml", overrides=["rewards.right=rewards.py:by_column"])


WORDS = [
    Mistake("unknown command", "trian run.yaml", 2, ("No such command 'trian'", "Did you mean 'train'?")),
    Mistake("no run named", "show", 2, ("Missing argument 'run'", "whet show -h")),
    Mistake("a setting as an option", TRAIN + "--train.steps=5", 2, ("--train.steps", "train.steps=VALUE")),
    Mistake(
        "another program's option",
        TRAIN + "--learning_rate 1e-5",
        2,
        ("--learning_rate: no such option", "key.path=value", "did you mean train.optimizer.lr?"),
    ),
    Mistake("no equals sign", TRAIN + "train.steps 5", 2, ("expected key.path=value", "train.steps=VALUE")),
    Mistake("config misspelt", "train rnu.yaml", 2, ("rnu.yaml", "No such file", "did you mean 'run.yaml'?")),
    Mistake("a folder as config", "train runs", 2, ("runs is a folder", "expected a config file (.yaml")),
    Mistake("a Python file as config", "convert rewards.py", 2, ("rewards.py", "ends in .yaml, .yml, .json")),
    Mistake("unknown dialect", "plan run.yaml --dialect trl", 2, ("--dialect trl", "expected native, verl")),
    Mistake(
        "a version of whet", "plan run.yaml --dialect native@1", 2, ("native@1", "expected native, verl")
    ),
    Mistake("unknown dialect of keys", "keys --dialect trl", 2, ("--dialect trl", "expected verl, skyrl")),
    Mistake("GPUs in words", "plan run.yaml --gpus many", 2, ("--gpus many", "8, or 8x2")),
    Mistake("memory of no GPU", "plan run.yaml --mem 40", 2, ("--mem 40", "give --gpus, too")),
    Mistake("converted over itself", "convert run.yaml -o ./run.yaml", 2, ("run.yaml", "give another file")),
    Mistake(
        "report over the file", "convert run.yaml --report run.yaml", 2, ("run.yaml", "give another file")
    ),
    Mistake("findings over it", "rehearse run.yaml -o run.yaml", 2, ("run.yaml", "give another file")),
    Mistake(
        "explain a typo", "explain train.stepz", 2, ("'train.stepz' is not a key", "did you mean train.steps")
    ),
    Mistake(
        "explain a recipe's typo",
        "explain algorithm=grpoo",
        2,
        ("algorithm.name: 'grpoo' is not known", "did you mean 'grpo'"),
    ),
    Mistake(
        "an output below a file",
        "convert run.yaml -o rewards.py/native.yaml",
        2,
        ("cannot write rewards.py/native.yaml", "give another file"),
    ),
]

KEYS = [
    Mistake("typo of a key", TRAIN + "train.stepz=3", 2, ("train.stepz", "did you mean train.steps?")),
    Mistake("typo of a section", TRAIN + "rolout.group_size=3", 2, ("unknown key", "did you mean rollout?")),
    Mistake("key of a list", TRAIN + "data.train.0.promt=w", 2, ("did you mean data.train[0].prompt?",)),
    Mistake(
        "peft's name of a key",
        TRAIN + "model.lora.rank=4 model.lora.target_modules=[q]",
        2,
        ("did you mean model.lora.targets?",),
    ),
    Mistake(
        "typo of a recipe", TRAIN + "algorithm=grpoo", 2, ("'grpoo' is not known", "did you mean 'grpo'")
    ),
    Mistake(
        "typo of a loss", TRAIN + "algorithm.loss=ppoo", 2, ("'ppoo' is not known", "did you mean 'ppo'")
    ),
    Mistake(
        "loss of another kind",
        TRAIN + "algorithm.loss=sft",
        2,
        ("'sft' learns from demonstrations", "set algorithm.name"),
    ),
    Mistake(
        "text for a number", TRAIN + "train.steps=many", 2, ('got "many"', "expected a whole number >= 0")
    ),
    Mistake("a number with a slip", TRAIN + "train.optimizer.lr=1e-5x", 2, ('got "1e-5x"', "number >= 0")),
    Mistake("negative", TRAIN + "train.steps=-1", 2, ("got -1", "expected a whole number >= 0")),
    Mistake("out of range", TRAIN + "rollout.sampling.top_p=1.5", 2, ("got 1.5", "> 0 and <= 1")),
    Mistake("no boolean", TRAIN + "checkpoint.export=maybe", 2, ('got "maybe"', "expected true or false")),
    Mistake("unknown device", TRAIN + "machine.device=gpu", 2, ("'auto', 'cpu' or 'cuda'",)),
    Mistake("drop what is not there", TRAIN + "train.epochs=~", 2, ("train.epochs=~", "is not; null sets")),
    Mistake(
        "drop what is needed",
        TRAIN + "rewards.right=~",
        2,
        ("needs rewards", "rewards.answer.function=exact"),
    ),
    Mistake(
        "groups of one",
        TRAIN + "rollout.group_size=1",
        2,
        ("rollout.group_size", "every advantage would be 0", "set it to 2 or more"),
    ),
    Mistake(
        "greedy rollouts",
        TRAIN + "rollout.sampling.temperature=0",
        2,
        ("all 2 rollouts of a task would be equal", "set it above 0"),
    ),
    Mistake(
        "a key without effect",
        TRAIN + "algorithm=sft rollout.group_size=4 data.train=demos.jsonl",
        2,
        ("rollout.group_size: has no effect", "leave it out"),
    ),
    Mistake(
        "minibatches that do not fit",
        TRAIN + "train.minibatches=3",
        2,
        ("3 does not divide train.tasks_per_step=2", "train.tasks_per_step=3"),
    ),
    Mistake(
        "early stopping of nothing",
        TRAIN + "train.early_stopping={}",
        2,
        ("train.early_stopping", "nothing is evaluated"),
    ),
    Mistake(
        "longer than the model's positions",
        TRAIN + "rollout.sampling.max_tokens=400",
        2,
        ("8 prompt tokens + 400 reply tokens", "is 64", "lower one of the two"),
    ),
    Mistake(
        "a variable that is not set", TRAIN + "seed=${oc.env:NOPE}", 2, ("no variable NOPE", "give a default")
    ),
    Mistake("unknown tracker", TRAIN + "track.trackers=[wanbd]", 2, ("'wanbd' is not known", "'wandb'")),
    Mistake(
        "a tracker that is not installed",
        TRAIN + "track.trackers=[swanlab]",
        2,
        ("swanlab is not installed", "pip install"),
    ),
    Mistake(
        "an engine of another system",
        TRAIN + "rollout.engine=trtllm",
        2,
        ("TensorRT-LLM is not supported", "use rollout.engine=vllm, sglang or native"),
    ),
    Mistake(
        "a tab in YAML",
        "train e.yaml",
        2,
        ("e.yaml:2", "YAML indents with spaces"),
        {"e.yaml": "model:\n\tp: x\n"},
    ),
    Mistake("a list as config", "train e.yaml", 2, ("a config is a mapping of keys",), {"e.yaml": "- a\n"}),
    Mistake(
        "a key twice",
        "train e.yaml",
        2,
        ("seed: given twice, in lines 1 and 2",),
        {"e.yaml": "seed: 1\nseed: 2\n"},
    ),
    Mistake("broken TOML", "train e.toml", 2, ("e.toml:1: not valid TOML",), {"e.toml": "[model\n"}),
    Mistake(
        "an empty config",
        "train e.yaml",
        2,
        ("5 problems", "model: give either path", "data.train: give at least one", "train.steps: give"),
        {"e.yaml": ""},
    ),
]

DATA = [
    Mistake(
        "data misspelt",
        TRAIN + "data.train=taks.jsonl",
        1,
        ("No such data file: taks.jsonl", "'tasks.jsonl'"),
    ),
    Mistake(
        "an id of a hub as data", TRAIN + "data.train=openai/gsm8k", 1, ("downloads nothing", "save_to_disk")
    ),
    Mistake("no data", TRAIN + "data.train=~", 2, ("data.train: give at least one source",)),
    Mistake("code as data", TRAIN + "data.train=rewards.py", 1, ("unknown format '.py'", ".parquet, .jsonl")),
    Mistake(
        "an empty file",
        TRAIN + "data.train=e.jsonl",
        1,
        ("'e' is empty: no rows in e.jsonl",),
        {"e.jsonl": ""},
    ),
    Mistake(
        "a line that is cut",
        TRAIN + "data.train=e.jsonl",
        1,
        ("e.jsonl, line 2: not JSON", "column 12"),
        column('{"prompt": "a", "answer": "b"}\n{"prompt": "a'),
    ),
    Mistake(
        "a row without names",
        TRAIN + "data.train=e.jsonl",
        1,
        ("line 1: a row must be an object with named columns", "a list"),
        column('["ab"]'),
    ),
    Mistake(
        "other columns",
        TRAIN + "data.train=own.jsonl",
        1,
        ("own.jsonl, line 1: no column 'prompt'", "columns: word, gold", "`prompt: COLUMN`"),
    ),
    Mistake(
        "columns that could all be the prompt",
        TRAIN + "algorithm=sft data.train=e.jsonl",
        1,
        ("completion, chosen could all be the prompt", "name those to read"),
        column('{"prompt": "a>", "completion": "b", "chosen": "c"}'),
    ),
    Mistake(
        "a prompt that is a number",
        TRAIN + "data.train=e.jsonl",
        1,
        ("column 'prompt' holds int 7", "expected a non-empty text"),
        column('{"prompt": 7, "answer": "b"}'),
    ),
    Mistake(
        "messages without roles",
        TRAIN + "data.train=e.jsonl",
        1,
        ("messages whose role and content are text",),
        column('{"prompt": [{"rol": "user", "content": "a"}], "answer": "b"}'),
    ),
    Mistake(
        "SFT without replies",
        TRAIN + "algorithm=sft data.train=tasks.jsonl",
        1,
        (
            "tasks.jsonl, line 1: it has no response to train on (column 'response' is absent or null)",
            "`response: COLUMN`",
            "level",
        ),
    ),
    Mistake(
        "DPO without rejected replies",
        TRAIN + "algorithm=dpo data.train=demos.jsonl",
        1,
        ("it has no rejected reply", "`rejected: COLUMN`"),
    ),
    Mistake(
        "KTO without labels",
        TRAIN + "algorithm=kto data.train=demos.jsonl",
        1,
        ("it has no label, expected true or false", "`desirable: COLUMN`"),
    ),
    Mistake(
        "prompts above the limit",
        TRAIN + "data.max_prompt_tokens=2",
        1,
        ("its prompt has 3 tokens, the limit is 2", "Raise data.max_prompt_tokens", "data.overlong"),
    ),
    Mistake(
        "the same rows held out",
        TRAIN + "data.eval=tasks.jsonl",
        1,
        ("4 held_out, 0 kept", "use other tasks in data.eval"),
    ),
    Mistake(
        "a template without its place",
        TRAIN + "'data.train={path: tasks.jsonl, template: \"Reverse:\"}'",
        2,
        ("template 'Reverse:' has no {prompt}", "add it"),
    ),
    Mistake(
        "exact without answers",
        TRAIN + "data.train=demos.jsonl",
        1,
        ("4 of 4 rollouts of this step are unscored", "task 0 of 'demos' has no answer", "check `answer`"),
    ),
]

MODELS = [
    Mistake("no model", TRAIN + "model.scratch=~", 2, ("give either path", "neither is given")),
    Mistake("two models", TRAIN + "model=models/mine", 2, ("both are given", "leave build out")),
    Mistake(
        "an id of a hub as model",
        TRAIN + "model=Qwen/Qwen3-0.6B model.scratch=~ tokenizer=~",
        2,
        ("No folder Qwen/Qwen3-0.6B", "local folders only", "hf download Qwen/Qwen3-0.6B --local-dir"),
    ),
    Mistake(
        "a run as model",
        TRAIN + "model=runs/done model.scratch=~ tokenizer=~",
        2,
        ("runs/done holds no config.json", "give the folder of a Hugging Face model"),
    ),
    Mistake(
        "a template that is not there",
        OWN_MODEL + "data.train=chat_prompts.jsonl tokenizer.chat_template=none.jinja",
        2,
        ("'none.jinja' is neither a file nor a template", "give the text or a path"),
    ),
    Mistake(
        "a broken template",
        OWN_MODEL + "data.train=chat_prompts.jsonl tokenizer.chat_template=bad.jinja",
        1,
        (
            "chat_prompts.jsonl, line 1: The chat template refuses the messages",
            "'endfor'",
            "line 1 of the template",
        ),
        {"bad.jinja": "{% for m in messages %}{{ m.content }}"},
    ),
    Mistake(
        "layers that the model lacks",
        TRAIN + "model.lora.rank=4 model.lora.targets=[q_prj]",
        2,
        ("'q_prj'", "Linear layers of the model: down_proj", "q_proj"),
    ),
    Mistake("no CUDA", TRAIN + "machine.device=cuda", 2, ("finds no CUDA device", "use auto or cpu")),
]


def reward(name: str) -> str:
    return f"{TRAIN}rewards.right=rewards.py:{name}"


UNSCORED = "4 of 4 rollouts of this step are unscored"
REWARDS = [
    Mistake(
        "typo of a built-in",
        TRAIN + "rewards.right=exat",
        2,
        ("'exat' is not known", "did you mean 'exact'?"),
    ),
    Mistake(
        "no such file", TRAIN + "rewards.right=reward.py:f", 2, ("no such file", "did you mean 'rewards.py'?")
    ),
    Mistake("no such function", reward("first_leter"), 2, ("has no 'first_leter'", "'first_letter'")),
    Mistake("a file alone", TRAIN + "rewards.right=rewards.py", 2, ("expected rewards.py:NAME",)),
    Mistake(
        "no function",
        TRAIN + "rewards.right=bad.py:f",
        2,
        ("is 3; expected a function",),
        {"bad.py": "f = 3\n"},
    ),
    Mistake(
        "a slip in the code",
        TRAIN + "rewards.right=bad.py:f",
        2,
        ("cannot load 'bad.py'", "line 1"),
        {"bad.py": "def f(response, task)\n    return 1\n"},
    ),
    Mistake(
        "an import that is missing",
        TRAIN + "rewards.right=bad.py:f",
        2,
        ("cannot load 'bad.py'", "No module named 'no_such_package'"),
        {"bad.py": "import no_such_package\n"},
    ),
    Mistake(
        "another signature", reward("other_signature"), 2, ("takes (x, y)", "expected (response, task, ...)")
    ),
    Mistake(
        "a column that is not there", reward("unknown_column"), 2, ("a value for levle", "answer, level")
    ),
    Mistake("it raises", reward("raises"), 1, (UNSCORED, "ValueError: bad luck (rewards.py:26)")),
    Mistake(
        "it returns text", reward("gives_text"), 1, (UNSCORED, "the text 'good'; expected a finite number")
    ),
    Mistake("it returns nothing", reward("gives_nothing"), 1, (UNSCORED, "None (is a `return` missing?)")),
    Mistake("it returns NaN", reward("gives_nan"), 1, (UNSCORED, "nan; expected a finite number")),
    Mistake(
        "a list of another length", reward("gives_short_list"), 1, (UNSCORED, "1 values for 2 completions")
    ),
    Mistake(
        "it ends the process",
        TRAIN + "rewards.right=bad.py:f",
        1,
        (UNSCORED, "exited with code 3"),
        {"bad.py": "import os\n\ndef f(response, task):\n    os._exit(3)\n"},
    ),
]

RUNS = [
    Mistake("no such run", "show runs/dnoe", 1, ("runs/dnoe is not a run directory", "no such folder")),
    Mistake("the folder above", "show runs", 1, ("runs is not a run directory", "in it: runs/done")),
    Mistake("a model as a run", "show models/mine", 1, ("models/mine is not a run directory",)),
    Mistake(
        "a step that is not there", "show runs/done --step 9", 1, ("no rollouts of step 9", "main: 1 to 2")
    ),
    Mistake(
        "a task that is not there", "show runs/done --step 1 --task 99", 1, ("has no task 99", "lists them")
    ),
    Mistake("two views at once", "show runs/done --timeline --step 1", 2, ("leave out --step",)),
    Mistake("evaluate nothing", "eval nothing", 2, ("nothing", "No such file")),
    Mistake("evaluate a folder of runs", "eval runs", 2, ("runs has no config.yaml", "give a run directory")),
    Mistake("evaluate a config", "eval run.yaml", 2, ("--data FILE", "--offline FILE")),
    Mistake(
        "evaluate a step that is not there",
        "eval runs/done --step 9",
        1,
        ("no checkpoint of step 9", "000002"),
    ),
    Mistake(
        "evaluate another stage", "eval runs/done --stage sft", 1, ("no checkpoint of stage sft", "main")
    ),
    Mistake("a model alone", "eval models/mine", 2, ("--data FILE", "--reward math")),
    Mistake(
        "a model without a reward",
        "eval models/mine --data held_out.jsonl",
        2,
        ("give rewards", "--reward math"),
    ),
    Mistake(
        "export a step that is not there", "export runs/done --step 9", 1, ("no checkpoint of --step 9",)
    ),
    Mistake("export a model", "export models/mine", 1, ("has no checkpoint", "give a run directory")),
    Mistake(
        "adapters of a run without",
        "export runs/done --as adapter",
        2,
        ("has no adapters", "use --as merged"),
    ),
    Mistake("scale a finished run", "scale runs/done --replicas 2", 1, ("no run is active here",)),
    Mistake(
        "two runs in one folder", two_at_once, 1, ("runs/run is in use by process", "give another run_dir")
    ),
    Mistake(
        "a folder that is a file", TRAIN + "run_dir=tasks.jsonl/run", 1, ("a file stands where a folder",)
    ),
    Mistake(
        "resume from nothing", TRAIN + "checkpoint.resume=none", 1, ("none: no such folder", "expected auto")
    ),
    Mistake(
        "begin anew in a run", DONE + "checkpoint.resume=never", 1, ("already holds a run", "resume=fresh")
    ),
    Mistake("another seed of a finished run", DONE + "seed=5", 1, ("seed: 0 -> 5", "Give another run_dir")),
    Mistake(
        "another learning rate",
        DONE + "train.steps=3 train.optimizer.lr=1e-3",
        1,
        ("train.optimizer.lr: 0.01 -> 0.001", "whet train --change", "give the old value"),
    ),
    Mistake(
        "another model",
        DONE + "train.steps=3 model.scratch.hidden_size=32",
        1,
        ("hidden_size: 16 -> 32", "another run_dir"),
    ),
    Mistake("fewer steps", DONE + "train.steps=1", 1, ("is at step 2", "set at least 2")),
    Mistake(
        "another function on a finished run",
        another_function_on_a_finished_run,
        1,
        ("finished run", "code of 'object:reward'", "Give another run_dir"),
    ),
    Mistake(
        "another threshold on a finished run",
        another_threshold_on_a_finished_run,
        1,
        ("finished run", "code of 'object:reward'", "Give another run_dir"),
    ),
    Mistake(
        "edited code on a finished run",
        edited_reward_on_a_finished_run,
        1,
        ("finished run", "code of 'rewards.py'", "Give another run_dir"),
    ),
]

PYTHON = [
    Mistake(
        "sections by position",
        lambda: whet.train(yaml.safe_load(desk.RUN)),  # type: ignore[arg-type]
        2,
        ("expected a file, got a mapping", "whet.train(**config)"),
    ),
    Mistake("a number as data", given(data=7), 2, ("got a int", "a list of rows (dicts)")),
    Mistake("no rows", given(data=[]), 2, ("data.train: give at least one source",)),
    Mistake("a set in a row", given(data=[{"prompt": {1}}]), 2, ("row 1", "rows hold dict, list, str")),
    Mistake("a number as reward", given(rewards=3), 2, ("rewards: got 3, expected a function",)),
    Mistake("a reward of x", given(rewards=lambda x: 1.0), 2, ("takes (x)", "(response, task, ...)")),
    Mistake("a keyword of TRL", given(learning_rate=1e-5), 2, ("did you mean train.optimizer.lr?",)),
    Mistake(
        "overrides as text", given(overrides="train.steps=1"), 2, ("expected a list", "['train.steps=1']")
    ),
    Mistake("no callback", given(on_step=3), 2, ("on_step: got 3, expected a function",)),
    Mistake("evaluate without data", lambda: whet.evaluate("models/mine"), 2, ("data=...", "rewards=...")),
]

MISTAKES = [*WORDS, *KEYS, *DATA, *MODELS, *REWARDS, *RUNS, *PYTHON]

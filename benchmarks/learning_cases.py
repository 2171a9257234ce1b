"""What the learning benchmark trains on, and its cases: one for every recipe, loss and advantage, and examples with
their controls.

The task: write four letters backwards (`abcd>` to `dcba`). All runs of a seed start from one model, which has imitated
a sloppy teacher for a short while: 60 % of the demonstrations copy the letters instead of reversing them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from whet.config.functions import ADVANTAGES, LOSSES, Kind
from whet.config.recipes import RECIPES

LETTERS, LENGTH = "abcdefghijkl", 4
PARTS = {"held_out": (0, 256), "sloppy": (256, 3256), "clean": (3256, 8376), "pool": (8376, 20736)}
"""Disjoint ranges of the 20,736 words in a fixed random order."""

LR = 3e-4
STEPS, LOOKS = 81, 9
"""Training steps of 128 rollouts, and held-out evaluations after the first: every 9 steps, because an evaluation syncs
weights and so must not fall between the syncs of a stale engine."""
GROUP_SIZE = 8
OFFLINE_ROWS = 64
"""Demonstrations, pairs or labelled replies a step."""
STALENESS = (0, 2, 8)
START: dict[str, Any] = {"part": "sloppy", "right_share": 0.4, "steps": 150}
TEACHER: dict[str, Any] = {"part": "clean", "right_share": 1.0, "steps": 400}
"""The imitation that all runs of a seed start from, and that of the teacher of distill and gkd."""

Row = dict[str, Any]
Part = Literal["recipe", "function", "setting", "offline", "staleness", "example"]


def words(part: str) -> list[str]:
    """The words of one part; the same for every seed."""
    everything = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(0).shuffle(everything)
    start, end = PARTS[part]
    return everything[start:end]


def tasks(part: str) -> list[Row]:
    return [{"prompt": f"{word}>", "answer": word[::-1]} for word in words(part)]


def demonstrations(part: str, right_share: float) -> list[Row]:
    """A word is reversed with probability right_share, else copied."""
    lot = random.Random(1)
    return [
        {"prompt": f"{word}>", "response": word[::-1] if lot.random() < right_share else word}
        for word in words(part)
    ]


def pairs() -> list[Row]:
    """The reversed word is better than the copied one."""
    return [{"prompt": f"{word}>", "response": word[::-1], "rejected": word} for word in words("clean")]


def labelled() -> list[Row]:
    """One reply a word, every other one reversed and desirable, the others copied and not."""
    return [
        {"prompt": f"{word}>", "response": word[::-1] if n % 2 else word, "desirable": bool(n % 2)}
        for n, word in enumerate(words("clean"))
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    part: Part
    algorithm: dict[str, Any]
    lr: float = LR
    steps: int = STEPS
    reference: dict[str, Any] = field(default_factory=dict)
    """Keys of the reference, where one is named by nothing else."""
    staleness: int = 0
    """By how many versions a rollout may be behind the policy."""
    why: str = ""
    """What departs from the common setting, and why."""
    example: str = ""
    """A file of `examples`, whose last stage is measured, in place of the common task."""
    overrides: tuple[str, ...] = ()
    """Of the example."""

    @property
    def recipe(self) -> str:
        return str(self.algorithm["name"])

    @property
    def loss(self) -> str:
        return _named(self.algorithm.get("loss", RECIPES[self.recipe].loss))

    @property
    def advantage(self) -> str:
        return _named(self.algorithm.get("advantage", RECIPES[self.recipe].advantage))

    @property
    def kind(self) -> Kind:
        return RECIPES[self.recipe].kind

    @property
    def greedy(self) -> bool:
        """Every task is asked once more, greedily."""
        return "baseline" in ADVANTAGES[self.advantage].needs

    @property
    def several(self) -> bool:
        """Two optimizer steps on a batch of 128 rollouts; a loss without a ratio takes one on a batch of 64."""
        return LOSSES[self.loss].ratio

    @property
    def taught(self) -> bool:
        """It learns from a teacher, and reads no rewards."""
        return not (
            RECIPES[self.recipe].reprompts or (ADVANTAGES[self.advantage].judged and LOSSES[self.loss].judged)
        )


def _named(function: str | dict[str, Any]) -> str:
    """The name of a function that is given with or without settings."""
    return str(function["name"]) if isinstance(function, dict) else function


CHANGES: dict[str, dict[str, Any]] = {
    "dapo": {
        "steps": 63,
        "algorithm": {"max_refills": 100},
        "why": "fewer steps: dropped groups are replaced",
    },
    "grpo_passk": {
        "why": "with rewards 0 and 1 it learns only where exactly one reply of the group is right"
    },
    "online_dpo": {
        "steps": 63,
        "algorithm": {"max_refills": 100},
        "why": "fewer steps: dropped groups are replaced",
    },
    "remax": {"steps": 72, "why": "fewer steps: a greedy rollout per task"},
    "raft": {
        "algorithm": {"groups": {"min_reward": 1.0}},
        "why": "groups.min_reward=1, as its note recommends",
    },
    "mix": {"algorithm": {"mix": {"demonstration_ratio": 0.2}}, "why": "4 demonstrations beside 16 tasks"},
    "mix_chord": {
        "algorithm": {"mix": {"demonstration_ratio": 0.2}},
        "why": "4 demonstrations beside 16 tasks",
    },
    "gkd": {"why": "from a teacher trained on right demonstrations; rewards are only measured"},
    "sdpo": {
        "algorithm": {
            "loss": {"name": "gkd", "top_k": 4},
            "reprompt": {"template": "{prompt}{solution}", "solution_template": "{reply}>"},
        },
        "why": "the start model has never seen a prompt with a reply in it",
    },
    "alphapo": {"lr": 5e-5, "why": "lr 5e-5: with that of the others both replies of a pair become unlikely"},
    "distill": {"why": "from a teacher trained on right demonstrations; rewards are only measured"},
    "cross_entropy": {
        "algorithm": {"advantage": "reward", "groups": {"min_reward": 1.0}},
        "why": "only of right replies (groups.min_reward=1)",
    },
}
"""What a recipe or a loss needs beside its name, and why."""


SETTINGS: dict[str, dict[str, Any]] = {
    "entropy_control=adaptive": {
        "algorithm": {"name": "grpo", "entropy_control": {"target": 0.2}},
        "why": "adaptive entropy control (Skywork-OR1)",
    },
    "entropy_clip=batch": {
        "algorithm": {"name": "grpo", "entropy_clip": "batch"},
        "why": "Clip_B",
    },
    "entropy_clip=vocabulary": {
        "algorithm": {"name": "grpo", "entropy_clip": "vocabulary"},
        "why": "Clip_V",
    },
    "kl.coef=0.1": {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
        "why": "the reference stays the start model",
    },
    "reference.mixup_alpha=0.6": {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
        "reference": {"reset_interval": 9, "mixup_alpha": 0.6},
        "why": "kl.coef=0.1; the reference moves towards the policy every 9 steps (TR-DPO's soft update)",
    },
    "divergence=jsd": {
        "algorithm": {"name": "gkd", "loss": {"name": "gkd", "divergence": "jsd"}},
        "why": "`gkd` with the Jensen-Shannon divergence over the vocabulary",
    },
    "divergence=jsd_topk": {
        "algorithm": {"name": "gkd", "loss": {"name": "gkd", "divergence": "jsd_topk", "top_k": 2}},
        "why": "`gkd` with the same over the two likeliest tokens of both models and a tail",
    },
    "importance_sampling, staleness 8": {
        "algorithm": {"name": "importance_sampling"},
        "staleness": 8,
        "why": "an engine up to 8 versions behind",
    },
    "second_moment=0.04, staleness 8": {
        "algorithm": {"name": "importance_sampling", "correction": {"second_moment": 0.04}},
        "staleness": 8,
        "why": "the same as M2PO: without the tokens that make the second moment of the ratio large",
    },
}
"""Settings beside a recipe that change what is learned, and why they are measured."""

OF_ADVANTAGES: dict[str, dict[str, Any]] = {"gdpo": {"parts": ["right"]}}
"""Settings that an advantage needs."""


def cases() -> dict[str, Case]:
    """Every case by its name in the table."""
    return dict([*_recipes(), *_functions(), *_settings(), *_staleness(), *_examples()])


def _recipes() -> Iterator[tuple[str, Case]]:
    for name, recipe in RECIPES.items():
        change = dict(CHANGES.get(name, {}))
        algorithm = {"name": name, **change.pop("algorithm", {})}
        part: Part = "recipe" if recipe.kind == "online" else "offline"
        yield name, Case(part=part, algorithm=algorithm, **change)


def _functions() -> Iterator[tuple[str, Case]]:
    """Losses and advantages that are part of no recipe."""
    losses = {name for name, row in LOSSES.items() if row.kind == "online"}
    for name in sorted(losses - {recipe.loss for recipe in RECIPES.values()}):
        change = dict(CHANGES.get(name, {}))
        algorithm = {"name": "grpo", "loss": name, **change.pop("algorithm", {})}
        yield f"loss={name}", Case(part="function", algorithm=algorithm, **change)
    for name in sorted(ADVANTAGES.keys() - {recipe.advantage for recipe in RECIPES.values()}):
        given = {"name": name, **OF_ADVANTAGES.get(name, {})}
        yield (
            f"advantage={name}",
            Case(part="function", algorithm={"name": "grpo", "advantage": given if len(given) > 1 else name}),
        )


def _settings() -> Iterator[tuple[str, Case]]:
    """Settings beside a recipe."""
    for name, case in SETTINGS.items():
        yield name, Case(part="setting", **case)


def _staleness() -> Iterator[tuple[str, Case]]:
    """GRPO from a policy that is synced to the engine every so many steps, without and with importance weights."""
    for staleness, corrected in itertools.product(STALENESS, (False, True)):
        correction = {"correction": {"weight": {"name": "token", "high": 2.0}}} if corrected else {}
        yield (
            f"staleness {staleness}, {'corrected' if corrected else 'not corrected'}",
            Case(
                part="staleness",
                algorithm={"name": "grpo", **correction},
                staleness=staleness,
            ),
        )


EXAMPLES: dict[str, dict[str, Any]] = {
    "look_up": {"example": "examples/tools/look_up.yaml", "why": "the policy learns to call the tool"},
    "look_up, no tool": {
        "example": "examples/tools/look_up.yaml",
        "overrides": ("rollout.env=~",),
        "why": "control: the same without the tool",
    },
    "sums": {
        "example": "examples/skyrl_gym/sums.yaml",
        "why": "an environment of SkyRL: another try after a wrong reply",
    },
    "house": {
        "example": "examples/gymnasium/house.yaml",
        "algorithm": {"name": "gigpo"},
        "why": "GiGPO, and a reward for each turn",
    },
    "house, critic": {
        "example": "examples/gymnasium/house.yaml",
        "algorithm": {"name": "turn_ppo"},
        "overrides": (
            "stages.rl.algorithm.name=turn_ppo",
            "stages.rl.algorithm.advantage.std_epsilon=~",
            "stages.rl.critic.optimizer.lr=1e-3",
        ),
        "why": "turn-level GAE with a critic, and a reward for each turn",
    },
    "house, outcome": {
        "example": "examples/gymnasium/house.yaml",
        "overrides": (
            "stages.rl.algorithm.name=grpo",
            "stages.rl.algorithm.advantage.gamma=~",
            "rollout.env.arguments.arguments.dense=false",
        ),
        "why": "control: GRPO, and a reward for the door alone",
    },
}
"""Examples with an environment, each beside its controls."""


def _examples() -> Iterator[tuple[str, Case]]:
    for name, change in EXAMPLES.items():
        yield name, Case(part="example", **{"algorithm": {"name": "grpo"}, **change})


# ---------------------------------------------------------------- as sections of a config


def source(function: str, **arguments: Any) -> dict[str, Any]:
    out = {"name": function, "function": f"benchmarks/learning_cases.py:{function}"}
    return out | ({"arguments": arguments} if arguments else {})


def common(seed: int) -> dict[str, Any]:
    """What every run says."""
    return {
        "seed": seed,
        "rewards": {"right": {"function": "exact"}},
        "rollout": {"sampling": {"max_tokens": LENGTH + 2}},
        "machine": {"threads": 1},
        "track": {"trackers": ["jsonl"]},
        "checkpoint": {"interval": 0},
    }


def imitation(seed: int, *, part: str, right_share: float, steps: int) -> dict[str, Any]:
    """The model that all runs of a seed start from, or the teacher that `distill` and `gkd` learn from."""
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "max_position_embeddings": 32,
    }
    schedule = {"type": "cosine", "warmup_steps": 10}
    out = common(seed) | {
        "checkpoint": {"interval": 0, "resume": "fresh"},
        "model": {"scratch": shape},
        "tokenizer": {"build": "chars"},
        "algorithm": {"name": "sft"},
        "data": {
            "max_prompt_tokens": 8,
            "train": [source("demonstrations", part=part, right_share=right_share)],
        },
        "train": {
            "steps": steps,
            "tasks_per_step": 64,
            "optimizer": {"lr": 3e-3, "schedule": schedule},
        },
    }
    del out["rewards"]
    return out


def of_example(case: Case, seed: int) -> dict[str, Any]:
    """The run of an example, as keywords of `whet.train`. Evaluation samples as training does."""
    stages = len(yaml.safe_load(Path(case.example).read_text(encoding="utf-8")).get("stages", ()))
    last = f"stages.{stages - 1}." if stages else ""
    always = ("machine.threads=1", "track.trackers=[jsonl]", "checkpoint.export=false")
    sampled = f"{last}eval.sampling={{temperature: 1.0}}"
    return {"config": case.example, "overrides": [f"seed={seed}", sampled, *always, *case.overrides]}


def run(case: Case, seed: int, *, start: str, teacher: str) -> dict[str, Any]:
    """The sections of one run. Evaluation samples as training does, so that before and after are what is trained."""
    halves = 1 if case.several or case.kind != "online" else 2
    steps = case.steps * halves
    train: dict[str, Any] = {"steps": steps, "optimizer": {"lr": case.lr}}
    out = common(seed) | {"model": {"path": start}, "algorithm": case.algorithm}
    data: dict[str, Any] = {"max_prompt_tokens": 8, "eval": [source("tasks", part="held_out")]}
    if case.kind == "online":
        own = 128 // GROUP_SIZE // halves
        train |= {"tasks_per_step": own, "minibatches": 3 - halves}
        out["rollout"] |= {"group_size": GROUP_SIZE, "sync_interval": case.staleness + 1}
        out["track"] = out["track"] | {"rollouts_interval": 0}
        data["train"] = [source("tasks", part="pool")]
        if RECIPES[case.recipe].expert_loss:  # four demonstrations beside the sixteen tasks
            train["tasks_per_step"] = own + 4
            data["demonstrations"] = [source("demonstrations", part="clean", right_share=1.0)]
    else:
        train["tasks_per_step"] = OFFLINE_ROWS
        clean = source("demonstrations", part="clean", right_share=1.0)
        data["train"] = [{"preferences": source("pairs"), "labels": source("labelled")}.get(case.kind, clean)]
    if reference := ({"path": teacher} if case.taught else {}) | case.reference:
        out["reference"] = reference
    out |= {
        "data": data,
        "train": train,
        "eval": {"interval": steps // LOOKS, "sampling": {"temperature": 1.0}},
    }
    out["checkpoint"] = {"interval": 0, "export": False}
    return out

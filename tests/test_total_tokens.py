"""`data.max_total_tokens` ends rollouts, and `checkpoint.interval` saves at the end of epochs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import whet
from codecs_numbers import Numbers
from whet.config.load import load
from whet.config.plan import plans
from whet.envs.env import EnvStep, World
from whet.rollout.episode import play_groups
from whet.rollout.limits import EpisodeLimits, limits_of
from whet.rollout.scripted import ScriptedEngine
from whet.types import ConfigError, Message, Rollout, Sampling, Task, ToolSpec

ROOT = Path(__file__).parents[1]
ON = 7
"""A token that ends nothing."""


def played(prompts: list[int], *, most: int | None, **options: Any) -> list[Rollout]:
    """One rollout of each prompt of so many tokens, by a policy that never ends by itself."""
    tasks = [Task(uid=n, source="s", prompt="", token_ids=tuple(range(50, 50 + n))) for n in prompts]
    engine = ScriptedEngine(lambda *_: [ON] * 20)
    groups = play_groups(
        engine, tasks, group_size=1, sampling=Sampling(max_tokens=6, min_tokens=4), seed=1, purpose="train",
        decode=str, end_token_ids=[1], timeout_s=5.0, limits=EpisodeLimits(max_total_tokens=most),
        **options,
    )  # fmt: skip
    return [group.rollouts[0] for group in asyncio.run(asyncio.wait_for(groups, 20))]


@pytest.mark.parametrize(
    ("most", "sampled"), [(None, [6, 6, 6]), (100, [6, 6, 6]), (10, [6, 5, 1]), (12, [6, 6, 3])]
)
def test_a_rollout_ends_where_prompt_and_reply_are_long_enough(most: int | None, sampled: list[int]) -> None:
    rollouts = played([2, 5, 9], most=most)
    assert [sum(r.strand.mask) for r in rollouts] == sampled
    assert {r.finish_reason for r in rollouts} == {"length"}
    assert all(r.error is None for r in rollouts)


class Echo:
    """Answers every reply with two tokens."""

    async def first(self) -> list[Message]:
        return [Message("user", "60 61")]

    async def step(self, reply: Message) -> EnvStep:
        return EnvStep(messages=[Message("user", "60 61")], reward=None, done=False)


def test_what_an_environment_says_counts_too() -> None:
    """Four tokens told, then turns of two sampled and two told: the policy speaks at 4, 8 and 12."""
    tasks = [Task(uid=1, source="s", prompt=(Message("user", "50 51"),), token_ids=(50, 51))]
    engine = ScriptedEngine(lambda *_: [ON, 1])
    options: dict[str, Any] = {
        "group_size": 1, "sampling": Sampling(max_tokens=50), "seed": 1, "purpose": "train", "decode": str,
        "end_token_ids": [1], "timeout_s": 5.0, "make_env": lambda task, world: Echo(),
        "codec": Numbers(),
    }  # fmt: skip
    for most, turns, tokens in ((None, 9, 38), (14, 3, 14), (13, 3, 13), (15, 3, 14)):
        (group,) = asyncio.run(
            play_groups(engine, tasks, limits=EpisodeLimits(max_turns=9, max_total_tokens=most), **options)
        )
        (r,) = group.rollouts
        assert (sum(r.strand.mask) + 1) // 2 == turns
        assert (len(r.strand.token_ids), r.error, r.finish_reason) == (tokens, None, "length")


def test_the_limits_of_other_systems_on_turns() -> None:
    """The prompt has 2 tokens and 2 follow, then turns of two sampled and two told.

    tokens_after_prompt (verl): what is sampled and told together. input_tokens (SkyRL): what a reply follows, which is
    4, 8, 12 here. Neither is touched by `max_tokens`, which is for each turn: with 1 every reply is cut, and answered.
    """
    tasks = [Task(uid=1, source="s", prompt=(Message("user", "50 51"),), token_ids=(50, 51))]
    engine = ScriptedEngine(lambda *_: [ON, 1])
    fixed: dict[str, Any] = {
        "group_size": 1, "seed": 1, "purpose": "train", "decode": str, "end_token_ids": [1], "timeout_s": 5.0,
        "make_env": lambda task, world: Echo(), "codec": Numbers(),
    }  # fmt: skip
    cases: list[tuple[dict[str, Any], int, list[int], str]] = [
        ({"tokens_after_prompt": 12}, 50, [2, 2, 2], "context"),
        ({"tokens_after_prompt": 11}, 50, [2, 2, 1], "context"),
        ({"tokens_after_prompt": 10}, 50, [2, 2], "context"),
        ({"input_tokens": 12}, 50, [2, 2, 2], "context"),
        ({"input_tokens": 11}, 50, [2, 2], "context"),
        ({"max_turns": 3}, 4, [2, 2], "tokens"),
        ({"max_turns": 3, "max_tokens_per": "turn"}, 4, [2, 2, 2], "turns"),
        ({"max_turns": 3, "max_tokens_per": "turn"}, 1, [1, 1, 1], "turns"),
        ({"max_turns": 9, "max_tokens_per": "turn", "input_tokens": 10}, 1, [1, 1, 1], "context"),
    ]
    for limits, most, turns, stop in cases:
        (group,) = asyncio.run(
            play_groups(
                engine,
                tasks,
                sampling=Sampling(max_tokens=most),
                limits=EpisodeLimits(observation_tokens=100, **limits),
                **fixed,
            )
        )
        (r,) = group.rollouts
        assert [turn.end - turn.start for turn in r.strand.turns] == turns, limits
        assert (r.error, r.finish_reason, r.stop_reason) == (None, "length", stop), limits
    for limit, said in (
        ({"input_tokens": 3}, "the prompt has 4 tokens"),
        (
            {"tokens_after_prompt": 2},
            "first messages have 2 tokens; rollout.env.tokens_after_prompt=2 leaves none",
        ),
    ):
        given: dict[str, Any] = {
            "sampling": Sampling(max_tokens=4),
            "limits": EpisodeLimits(observation_tokens=100, **limit),
        }
        (group,) = asyncio.run(play_groups(engine, tasks, **given, **fixed))
        assert said in str(group.rollouts[0].error)


class Asks(Echo):
    """Asks the policy about a text of ten tokens."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def step(self, reply: Message) -> EnvStep:
        await self.world.chat([Message("user", " ".join(["60"] * 10))])
        return EnvStep(messages=[], reward=1.0, done=True)


class Described(Numbers):
    """Shows the tools to the policy: ten tokens for each."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return [60] * 10 * len(tools) + super().encode_prompt(messages)


@pytest.mark.parametrize(
    ("tools", "turns", "stop", "error"),
    [
        (0, [2, 2, 2], "tokens", None),
        (1, [2, 2], "context", None),
        (
            2,
            [],
            "fault",
            r"the prompt has 24 tokens .*data\.max_total_tokens=22 .*; raise data\.max_prompt_tokens",
        ),
    ],
)
def test_tools_end_a_rollout_where_the_engine_has_no_more_room(
    tools: int, turns: list[int], stop: str, error: str | None
) -> None:
    """8 tokens of a prompt, 6 of replies and 8 of the environment are 22; the tools are counted nowhere else."""
    env = {"make": "any:Env", "observation_tokens": 8}
    rollout = {"group_size": 2, "sampling": {"max_tokens": 6}, "env": env}
    data = {"train": BASE["data"]["train"], "max_prompt_tokens": 8, "chat": True}
    loaded = load(None, (), {**BASE, "data": data, "rollout": rollout})
    (stage,) = plans(loaded)
    echo = Echo()
    echo.tools = [ToolSpec(f"t{n}") for n in range(tools)]  # type: ignore[attr-defined]
    (group,) = asyncio.run(
        play_groups(
            ScriptedEngine(lambda *_: [ON, 1], max_context=stage.max_sequence_tokens),
            [Task(uid=1, source="s", prompt=(Message("user", "50 51"),), token_ids=(50, 51))],
            group_size=1, sampling=Sampling(max_tokens=6), seed=1, purpose="train", decode=str, end_token_ids=[1],
            timeout_s=20.0, make_env=lambda task, world: echo, codec=Described(), limits=limits_of(loaded.config),
        )
    )  # fmt: skip
    (r,) = group.rollouts
    assert re.search(error, str(r.error)) if error else r.error is None
    assert ([turn.end - turn.start for turn in r.strand.turns], r.stop_reason) == (turns, stop)


@pytest.mark.parametrize(
    ("make", "most", "said"),
    [
        (lambda task, world: Echo(), 5, None),
        (
            lambda task, world: Echo(),
            4,
            r"the prompt has 4 tokens .*max_total_tokens=4 leaves none for a reply",
        ),
        (
            lambda task, world: Echo(),
            3,
            r"the prompt has 4 tokens .*max_total_tokens=3 leaves none for a reply",
        ),
        (lambda task, world: Asks(world), 11, None),
        (
            lambda task, world: Asks(world),
            10,
            r"world.chat has 10 tokens; data.max_total_tokens=10 leaves none",
        ),
    ],
)
def test_where_no_token_is_left_for_a_reply_the_key_is_named(make: Any, most: int, said: str | None) -> None:
    tasks = [Task(uid=1, source="s", prompt=(Message("user", "50 51"),), token_ids=(50, 51))]
    (group,) = asyncio.run(
        play_groups(
            ScriptedEngine(lambda *_: [ON, 1]), tasks, group_size=1, sampling=Sampling(max_tokens=50), seed=1,
            purpose="train", decode=str, end_token_ids=[1], timeout_s=5.0, make_env=make, codec=Numbers(),
            limits=EpisodeLimits(max_total_tokens=most),
        )
    )  # fmt: skip
    (r,) = group.rollouts
    assert (r.error is None) == (said is None), r.error
    assert said is None or re.search(said, str(r.error))


def test_the_plan_counts_every_turn() -> None:
    """16 tokens a reply, 8 a prompt: together, in four turns, and with each of the limits."""
    env = {"make": "games.py:Guess", "max_turns": 4, "observation_tokens": 10}
    chat = {"tokenizer": {"build": "chars", "chat_template": "{{ messages }}"}}

    def longest(**limits: Any) -> int:
        run = {
            **BASE, **chat, "rollout": BASE["rollout"] | {"env": env | limits},
            "data": BASE["data"] | {"max_total_tokens": None, "chat": True},
            "model": {"scratch": BASE["model"]["scratch"] | {"max_position_embeddings": 200}},
        }  # fmt: skip
        return plans(load(None, (), run))[0].max_sequence_tokens

    assert longest() == 8 + 16 + 10
    assert longest(max_tokens_per="turn") == 8 + 4 * 16 + 10
    assert longest(max_tokens_per="turn", tokens_after_prompt=30) == 8 + 30
    assert longest(max_tokens_per="turn", input_tokens=20) == 20 + 16


BASE: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 24,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {
        "train": [{"rows": [{"prompt": f"{n}>", "answer": "a"} for n in range(10)]}], "max_prompt_tokens": 8,
        "max_total_tokens": 9,
    },
    "rewards": {"right": {"function": "exact"}},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 16}},
    "train": {"epochs": 2, "tasks_per_step": 4},
    "checkpoint": {"interval": 0, "keep": None, "export": False},
    "machine": {"threads": 1},
}  # fmt: skip


def test_the_plan_makes_room_for_the_total_alone() -> None:
    (stage,) = plans(load(None, (), BASE))
    assert stage.max_sequence_tokens == 9
    with pytest.raises(
        ConfigError, match=r"data\.max_total_tokens: 8 leaves no token for a reply after a prompt"
    ):
        plans(load(None, ("data.max_total_tokens=8",), BASE))
    assert plans(load(None, ("data.max_prompt_tokens=20", "data.max_total_tokens=24"), BASE)), (
        "24 positions are enough"
    )


@pytest.mark.parametrize(
    ("interval", "saved"),
    [("1 epoch", [3, 5]), ("2 epochs", [5]), (0, [5]), (2, [2, 4, 5]), ([4, "1 epoch"], [3, 4, 5])],
)
def test_checkpoints_at_the_end_of_epochs(tmp_path: Path, interval: Any, saved: list[int]) -> None:
    """Ten rows, four tasks a step: the first epoch is over in step 3, the second in step 5, the last."""
    run = {**BASE, "checkpoint": BASE["checkpoint"] | {"interval": interval}}
    done = whet.train(run_dir=str(tmp_path / "run"), **run)
    assert [m["step"] for m in done.metrics][-1] == 5
    assert sorted(int(p.name.rpartition("-")[2]) for p in (tmp_path / "run/checkpoints").iterdir()) == saved


@pytest.mark.parametrize(("drop_last", "evaluated"), [(False, [3, 5]), (True, [2, 4])])
def test_evaluation_at_the_end_of_epochs(tmp_path: Path, drop_last: bool, evaluated: list[int]) -> None:
    """Ten rows, four tasks a step, two epochs. Where epochs end with their last full step, that is the second."""
    run: dict[str, Any] = {**BASE, "checkpoint": {"interval": 0, "export": False}}
    run["data"] = {
        **BASE["data"],
        "eval": [{"rows": BASE["data"]["train"][0]["rows"]}],
        "exclude_eval": False,
    }
    run["eval"] = {"interval": "1 epoch", "at_start": False, "at_end": False}
    run["train"] = {**BASE["train"], "drop_last": drop_last}
    done = whet.train(run_dir=str(tmp_path / "run"), **run)
    assert [m["step"] for m in done.metrics if "eval/accuracy" in m] == evaluated

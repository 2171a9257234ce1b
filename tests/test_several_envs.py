"""Several environments in one run: each row is played by its own, and a list of them is checked before a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from adapted import answers, played, reply, task, world
from whet.config.checks import hard_problems
from whet.config.code import digests
from whet.config.environments import SEVERAL
from whet.config.load import load
from whet.config.schema import EnvironmentConfig
from whet.envs.env import EnvFault, EnvStep, World
from whet.envs.several import has_env, make, names, one_of_each
from whet.types import ConfigError, Message, Task

COUNT = '''
from whet.envs.env import EnvStep
from whet.types import Message


class Down:
    """Answers with how many turns are left; the reward of each turn is `pays`."""

    def __init__(self, task, *, turns, pays=1.0):
        self.left, self.pays = turns, pays

    @classmethod
    def prepare(cls, arguments):
        if arguments["turns"] < 1:
            from whet.types import ConfigError, Task
            raise ConfigError("turns: expected at least 1")

    def first(self):
        return [Message("user", f"{self.left} left")]

    def step(self, reply):
        self.left -= 1
        return EnvStep([Message("user", f"{self.left} left")], self.pays, done=self.left == 0)


class Later(Down):
    """The same, async, with a world, and made by an async function."""

    def __init__(self, task, world, *, turns, pays=0.5):
        super().__init__(task, turns=turns, pays=pays)
        self.world = world

    async def first(self):
        return super().first()

    async def step(self, reply):
        assert self.world.turn > 0
        return super().step(reply)


async def later(task, world, **arguments):
    return Later(task, world, **arguments)


class Lends(Later):
    """A plain method that gives something to await."""

    def step(self, reply):
        return super().step(reply)
'''


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "count.py"
    file.write_text(COUNT)
    return str(file)


def made(task: Task, world: World, **arguments: Any) -> Any:
    """The environment of a row, or what is awaited for it."""
    return make(task, world, **arguments)


def three(code: str) -> dict[str, Any]:
    return {
        "plain": {},
        "down": {"make": f"{code}:Down", "arguments": {"turns": 5}, "max_turns": 3},
        "later": {"make": f"{code}:later", "arguments": {"turns": 2}},
    }


def test_each_row_is_played_by_the_environment_that_its_column_names(code: str) -> None:
    """By hand: plain is one reply, without a reward or an end of an environment's; down ends after its own limit of 3
    replies, 1.0 each; later is done after 2, 0.5 each."""
    asked = {"envs": three(code), "column": "world"}
    plays = has_env(EnvironmentConfig(make=SEVERAL, arguments=asked))
    columns = {1: {"world": "plain"}, 2: {"world": "down"}, 3: {"world": "later"}}
    scripts = dict.fromkeys(columns, ("a", "b", "c", "d"))
    _, groups = played(SEVERAL, asked, scripts, columns, has_env=plays)
    ended = {uid: (len(g[0].turns), g[0].stop_reason, g[0].reward) for uid, g in groups.items()}
    assert ended == {1: (1, None, None), 2: (3, "turns", 3.0), 3: (2, "done", 1.0)}
    assert all(g[0].error is None for g in groups.values())
    cut = [uid for uid, g in groups.items() if g[0].finish_reason == "length"]
    assert cut == [2], "as where rollout.env.max_turns ends it: algorithm.groups.truncated acts on it"


def test_a_row_without_an_environment_is_a_fault_that_names_the_list(code: str) -> None:
    """A name that is not listed is never played by another one; a row without a name is, if there is a default."""
    named = {"envs": three(code), "column": "world"}
    with pytest.raises(
        EnvFault, match=r"row 4: column 'world' is 'up', which is no environment .*plain, down, later"
    ):
        made(task(4, world="up"), world(), **named)
    with pytest.raises(EnvFault, match="column 'world' is 3,"):
        made(task(4, world=3), world(), **named, default="plain")
    with pytest.raises(EnvFault, match="column 'world' is None"):
        made(task(4), world(), **named)
    assert type(made(task(4), world(), **named, default="down")).__name__ == "FewerTurns"
    with pytest.raises(EnvFault, match="its source is 's'"):
        made(task(4), world(), envs=three(code))
    assert type(made(task(4), world(), envs=three(code), default="down")).__name__ == "FewerTurns"


def test_a_row_without_a_prompt_is_a_fault_where_no_environment_asks(code: str) -> None:
    """Else the policy would answer the system message. Which environment a row has may stand in the row."""
    asked = {"envs": three(code), "column": "world"}
    plays = has_env(EnvironmentConfig(make=SEVERAL, arguments=asked))
    alone = replace(task(4, world="plain"), prompt=(Message("system", "s"),))
    assert plays(alone)
    assert not plays(task(4, world="plain"))
    with pytest.raises(EnvFault, match=r"row 4: .*envs\.plain has no make, and the row has no prompt"):
        made(alone, world(), **asked)


def test_the_environment_itself_plays(code: str) -> None:
    """Without a limit of its own nothing stands between it and the run: what it has beside first and step is there."""
    env = made(task(1), world(), envs={"s": {"make": f"{code}:Down", "arguments": {"turns": 2}}})
    assert type(env).__name__ == "Down"
    assert [s.done for s in answers(env, "a", "b")] == [False, True]


def test_a_limit_of_its_own_ends_what_goes_on_and_nothing_else(code: str) -> None:
    """The last answer has the reward and no messages. Done stays done, also in the last turn."""
    at = world()
    env = made(task(1), at, envs={"s": {"make": f"{code}:Down", "arguments": {"turns": 3}, "max_turns": 2}})
    at.begin_turn()
    assert env.step(reply("a")).messages[0].content == "2 left"
    at.begin_turn()
    assert env.step(reply("b")) == EnvStep([], 1.0, done=True, stop="turns")
    at = world()
    env = made(task(1), at, envs={"s": {"make": f"{code}:Down", "arguments": {"turns": 1}, "max_turns": 1}})
    at.begin_turn()
    assert env.step(reply("a")).stop is None
    at = world()
    env = asyncio.run(
        made(task(1), at, envs={"s": {"make": f"{code}:later", "arguments": {"turns": 3}, "max_turns": 1}})
    )
    at.begin_turn()
    assert asyncio.run(env.step(reply("a"))).stop == "turns"
    at = world()
    env = made(task(1), at, envs={"s": {"make": f"{code}:Lends", "arguments": {"turns": 3}, "max_turns": 1}})
    at.begin_turn()
    assert asyncio.run(env.step(reply("a"))).stop == "turns"


def test_a_host_refuses_a_member_that_cannot_be_played(code: str) -> None:
    for member, said in (
        ({"make": f"{code}:Up"}, r"envs\.b\.make.*has no 'Up'"),
        (
            {"make": f"{code}:Down", "arguments": {"turns": 1, "pay": 2}},
            r"envs\.b: .*'pay' is not an argument of make",
        ),
        ({"make": f"{code}:Down", "arguments": {"turns": 0}}, r"envs\.b: turns: expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            played(SEVERAL, {"envs": {"a": {}, "b": member}}, {1: ("a",)})


def test_one_task_of_each_environment_is_tried(code: str) -> None:
    """A row that needs none is none of them; which environments have no row can be told by their names."""
    env = EnvironmentConfig(make=SEVERAL, arguments={"envs": three(code), "column": "world"})
    tasks = [task(n, world=name) for n, name in enumerate(("plain", "down", "down"))]
    assert {name: found.uid for name, found in one_of_each(env, tasks).items()} == {"down": 1}
    assert names(env) == ["down", "later"]
    assert names(EnvironmentConfig(make=f"{code}:Down")) == []


def config(code: str, **arguments: Any) -> dict[str, Any]:
    """A run of two sources, and the arguments of its environments."""
    return {
        "model": {"scratch": {"hidden_size": 8}},
        "tokenizer": {"build": "chars"},
        "data": {
            "chat": True,
            "train": [
                {"name": "plain", "rows": [{"prompt": "a", "answer": "b"}]},
                {"name": "down", "rows": [{"prompt": "c"}], "rewards": []},
            ],
        },
        "rewards": {"right": {"function": "exact"}},
        "train": {"steps": 1},
        "rollout": {
            "env": {"make": SEVERAL, "max_turns": 4, "arguments": arguments or {"envs": three(code)}}
        },
    }


def written(tmp_path: Path, run: dict[str, Any]) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


def refusal(tmp_path: Path, run: dict[str, Any]) -> str:
    """All problems of a run; none if it can begin."""
    return "; ".join(map(": ".join, hard_problems(load(written(tmp_path, run)).stages[0])))


def test_a_list_that_cannot_be_played_is_refused_before_the_run(tmp_path: Path, code: str) -> None:
    for envs, said in (
        ({}, "rollout.env.arguments.envs: is empty"),
        ({"plain": {}, "dwon": {}}, "data.train[1].name: 'down' is no name of rollout.env.arguments.envs"),
        (
            {"plain": {"mak": 1}, "down": {}},
            "rollout.env.arguments.envs.plain.mak: unknown key; did you mean 'make'?",
        ),
        ({"plain": {"max_turns": 2}, "down": {}}, "envs.plain: has no make"),
        ({"plain": {}, "down": {"make": "a:b", "max_turns": 5}}, "5 is above rollout.env.max_turns=4"),
        ({"plain": {}, "down": {"make": SEVERAL}}, "cannot be several itself"),
        ({"plain": {}, "down": {}}, "data.train[1].rewards: is an empty list, and its environment is none"),
        ({"plain": {}, "down": {"make": 3}}, "envs.down.make: got 3"),
    ):
        assert said in refusal(tmp_path, config(code, envs=envs)), envs
    unscored = config(code, envs={"plain": {}, "down": {"make": "a:b"}})
    for rewards, why in (
        ({}, "there are none"),
        ({"right": {"function": "exact", "weight": 0}}, "every weight"),
    ):
        assert f"envs.plain: has no make, so the rewards score its replies, and {why}" in refusal(
            tmp_path, unscored | {"rewards": rewards}
        )
    taught = unscored | {"rewards": {}, "algorithm": {"name": "distill"}, "reference": {"path": "teacher"}}
    assert refusal(tmp_path, taught) == "", "the teacher's log-probs need no reward"
    nobody_asks = config(code)
    nobody_asks["data"]["train"][0] |= {"prompt": None, "system_prompt": "a"}
    assert "data.train[0].prompt: is null, and its environment is none" in refusal(tmp_path, nobody_asks)
    assert "arguments.envs: must be given" in refusal(tmp_path, config(code, column="world"))
    assert refusal(tmp_path, config(code)) == ""
    listed: dict[str, Any] = {"plain": {}, "down": {}}
    assert "'up' is no name of envs" in refusal(tmp_path, config(code, envs=listed, default="up"))
    assert "default: got 3" in refusal(tmp_path, config(code, envs=listed, default=3))


def test_a_stage_that_samples_nothing_may_learn_from_other_sources(tmp_path: Path, code: str) -> None:
    """SFT plays no row of its data, whatever the stages after it have in common with it."""
    run = config(code)
    shown = {"name": "shown", "rows": [{"prompt": "a", "response": "b"}]}
    sft = {"name": "sft", "algorithm": {"name": "sft"}, "data": {"train": [shown]}}
    rl = {"name": "rl", "data": {"train": run["data"].pop("train")}}
    run["rollout"]["sources"] = {"down": {"max_tokens": 8}}
    stages = load(written(tmp_path, run | {"stages": [sft, rl]})).stages
    assert [problem for stage in stages for problem in hard_problems(stage)] == []


def test_the_code_of_every_member_counts(tmp_path: Path, code: str) -> None:
    """A changed file is another environment: it is in the digests that a resume and the journal compare."""
    loaded = load(written(tmp_path, config(code)))
    assert list(digests(loaded.stages, {})) == [code]

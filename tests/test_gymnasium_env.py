"""Environments of gymnasium: texts and actions, ends and limits, seeds, and replies that are no action."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs the package gymnasium (whet[gymnasium])")

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from adapted import answers, played, reply, task, world
from whet.envs.env import EnvFault, as_step
from whet.envs.frozen_lake import FrozenLake
from whet.envs.gymnasium import GymnasiumEnv
from whet.tables import load_object
from whet.types import ConfigError

ROOT = Path(__file__).parents[1]
MAKE = "whet.envs.gymnasium:make"
LAKE = {"env": "FrozenLake-v1", "arguments": {"is_slippery": False}}
WAY = ["1", "1", "2", "1", "2", "2"]
"""Down, down, right, down, right, right: S 4 8 9 13 14 goal, past the holes 5, 7, 11 and 12 of the 4x4 lake."""

GAMES = '''
import threading

import gymnasium
import numpy as np
from gymnasium import spaces


class Ends(gymnasium.Env):
    """Its steps end as `ends` says: t(erminated), u (truncated), b(oth) or - (goes on)."""

    action_space = spaces.Discrete(3, start=-1)
    observation_space = spaces.Box(0, 9, (2,), np.int64)

    def __init__(self, ends, wins=()):
        self.ends, self.wins, self.took = ends, wins, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.np_random.integers(10), 0]), {"legal": [-1, 1]}

    def step(self, action):
        self.took.append(action)
        turn = len(self.took)
        how = self.ends[turn - 1]
        info = {"win": turn in self.wins, "legal": [0]}
        return np.array([5, turn]), np.float32(turn / 2), how in "tb", how in "ub", info


class Meets(Ends):
    """Each step waits until two episodes of the host are in one: only threads of their own get past it."""

    barrier = threading.Barrier(2)

    def step(self, action):
        self.barrier.wait(20)
        return super().step(action)


class Breaks(Ends):
    def step(self, action):
        raise ZeroDivisionError("the lake is dry")


def say(observation):
    return "rooms " + " ".join(map(str, observation.tolist()))


def say_legal(observation, info, env):
    return f"{info['legal']} of {type(env).__name__}"


def act(text):
    return {"left": -1, "stay": 0, "right": 1}.get(text, 7) if text != "?" else int(text)


def no_text(observation):
    return observation


if "Registered-v3" not in gymnasium.registry:
    gymnasium.register(id="Registered-v3", entry_point=Ends, max_episode_steps=1)
'''


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "whet_test_games.py"
    file.write_text(GAMES)
    return file


def ends(games: Path, how: str, **more: Any) -> dict[str, Any]:
    given = {"ends": how, **more.pop("arguments", {})}
    named = {"say": f"{games}:say", "act": f"{games}:act", **more}
    return {"env": f"{games}:Ends", "arguments": given, **named}


# ---------------------------------------------------------------- texts and actions


def test_numbers_are_told_and_read_without_code_of_ones_own() -> None:
    codec, found = played(MAKE, LAKE, {1: WAY, 2: ["1", "2"]})
    (right,), (wrong,) = found[1], found[2]
    assert codec.results(right) == ["0", "4", "8", "9", "13", "14"]
    assert [turn.reward for turn in right.turns] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert (right.reward, right.stop_reason) == (1.0, "done")
    assert (wrong.reward, wrong.stop_reason, codec.results(wrong)) == (0.0, "done", ["0", "4"])  # 5 is a hole
    assert right.reward_parts == {"env": 1.0, "env/invalid": 0.0, "env/truncated": 0.0}


def test_functions_tell_and_read_and_may_ask_for_the_info_and_the_environment(games: Path) -> None:
    env = GymnasiumEnv(task(), world(), **ends(games, "-t"))
    (first,) = env.first()
    assert first.content.startswith("rooms ")
    steps = answers(env, "left", "right")
    assert [m.content for m in steps[0].messages] == ["rooms 5 1"]
    assert env.inner.unwrapped.took == [-1, 1]
    assert [as_step(step).reward for step in steps] == [0.5, 1.0]
    legal = GymnasiumEnv(task(), world(), **ends(games, "-t", say=f"{games}:say_legal"))
    assert [m.content for m in legal.first()] == ["[-1, 1] of Ends"]
    assert [m.content for m in answers(legal, "stay")[0].messages] == ["[0] of Ends"]


def test_a_reply_that_is_no_action_is_told_so_and_counted_and_the_environment_does_not_hear_of_it(
    games: Path,
) -> None:
    env = GymnasiumEnv(task(), world(), **ends(games, "---t", max_invalid=2, invalid_penalty=0.25))
    env.first()
    steps = answers(env, "?", "left", "up", reply("stay", malformed="no end of the call"))
    assert [step.parts["invalid"] for step in steps] == [1.0, 0.0, 1.0, 1.0]
    assert [step.reward for step in steps] == [-0.25, 0.5, -0.25, -0.25]
    assert [(step.done, step.stop) for step in steps] == [(False, None)] * 3 + [(True, "malformed")]
    assert env.inner.unwrapped.took == [-1]
    told = [step.messages[0].content for step in (steps[0], steps[2])]
    assert told[0] == "This is no action: invalid literal for int() with base 10: '?'"
    assert told[1] == "This is no action: 7 is not in Discrete(3, start=-1)"
    at_once = GymnasiumEnv(task(), world(), **ends(games, "-", invalid="end"))
    at_once.first()
    (step,) = answers(at_once, "up")
    assert (step.done, step.stop, step.reward, step.messages) == (True, "malformed", None, [])


@pytest.mark.parametrize("text", ["", "x", "4", "-1", "1.0", "٣" * 30, "1 1", "--1", "-"])
def test_a_number_outside_its_range_is_no_action(text: str) -> None:
    env = GymnasiumEnv(task(), world(), **LAKE)
    env.first()
    (step,) = answers(env, text)
    assert [m.content for m in step.messages] == ["This is no action: expected a number from 0 to 3"]


# ---------------------------------------------------------------- ends, limits, seeds


def test_what_is_terminated_is_done_and_what_is_truncated_has_a_reason_of_its_own(games: Path) -> None:
    lake = {**LAKE, "arguments": {"is_slippery": False, "max_episode_steps": 3}}
    _, found = played(MAKE, lake, {1: WAY, 2: ["1", "2"]})
    assert [found[uid][0].stop_reason for uid in (1, 2)] == ["truncated", "done"]
    assert found[1][0].reward_parts["env/truncated"] == 1.0
    assert len(found[1][0].turns) == 3
    for how, stop in (("t", None), ("u", "truncated"), ("b", None)):
        env = GymnasiumEnv(task(), world(), **ends(games, how, parts=["win"], arguments={"wins": [1]}))
        env.first()
        (step,) = answers(env, "stay")
        assert (step.done, step.stop, step.parts["win"]) == (True, stop, 1.0)


def test_the_limit_of_the_run_is_another_one() -> None:
    _, found = played(MAKE, LAKE, {1: WAY}, max_turns=2)
    assert found[1][0].stop_reason == "turns"


def test_rollouts_of_a_task_begin_as_its_column_says_or_each_by_itself(games: Path) -> None:
    columns = {uid: {"game": 40 + uid} for uid in (1, 2, 3)}
    scripts = {uid: ["left"] for uid in columns}
    for seed in ("game", None):
        codec, found = played(MAKE, ends(games, "t", seed=seed), scripts, columns, group_size=6, max_turns=1)
        begun = {uid: [codec.results(r)[0] for r in group] for uid, group in found.items()}
        if seed:
            oracle = {uid: f"rooms {gymnasium_draw(40 + uid)} 0" for uid in columns}
            assert begun == {uid: [text] * 6 for uid, text in oracle.items()}
        else:
            assert all(len(set(texts)) > 1 for texts in begun.values())
            again, same = played(MAKE, ends(games, "t"), scripts, columns, group_size=6, max_turns=1)
            assert begun == {uid: [again.results(r)[0] for r in group] for uid, group in same.items()}


def gymnasium_draw(seed: int) -> int:
    return int(gymnasium.utils.seeding.np_random(seed)[0].integers(10))


@pytest.mark.parametrize("value", [None, -1, "7", 1.5, True, 2**31])
def test_a_row_without_a_seed_is_a_fault_that_names_the_column(games: Path, value: Any) -> None:
    env = GymnasiumEnv(task(game=value, other=1), world(), **ends(games, "t", seed="game"))
    with pytest.raises(EnvFault, match=r"the column 'game' .*columns: game, other"):
        env.first()


# ---------------------------------------------------------------- in a host


def test_episodes_that_block_run_at_the_same_time(games: Path) -> None:
    arguments = {**ends(games, "-t"), "env": f"{games}:Meets"}
    _, found = played(MAKE, arguments, {1: ["left", "right"], 2: ["stay", "stay"]})
    assert [found[uid][0].reward for uid in (1, 2)] == [1.5, 1.5]


def test_what_an_environment_raises_is_a_fault_and_no_score(games: Path) -> None:
    arguments = {**ends(games, "t"), "env": f"{games}:Breaks"}
    _, found = played(MAKE, arguments, {1: ["left"]})
    (rollout,) = found[1]
    assert rollout.reward is None
    assert "ZeroDivisionError: the lake is dry" in str(rollout.error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"env": "FrozenLik-v1"}, r"rollout\.env\.arguments\.env='FrozenLik-v1': NameNotFound"),
        ({"arguments": {"slippery": True}}, r"env='FrozenLake-v1': TypeError: .*slippery"),
        ({"env": "CartPole-v1", "arguments": {}}, r"arguments\.say is not given.*Box"),
        ({"says": "x.py:f"}, "says: unknown key; did you mean 'say'"),
        ({"invalid": "ask"}, r"arguments\.invalid: got \"ask\", expected 'tell' or 'end'"),
        ({"max_invalid": 0}, r"max_invalid: got 0, expected a whole number >= 1"),
        ({"invalid_penalty": -1}, r"invalid_penalty: got -1, expected a number >= 0"),
        ({"parts": 3}, r"parts: got 3, expected a list"),
        ({"say": "{games}:tell"}, r"has no 'tell'"),
        ({"say": "{games}:no_text"}, r"say returned int; expected a text"),
    ],
)
def test_a_host_refuses_what_cannot_be_played(games: Path, change: dict[str, Any], said: str) -> None:
    filled = {k: v.format(games=games) if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(ConfigError, match=said):
        played(MAKE, {**LAKE, **filled}, {1: WAY})


def test_a_module_may_register_ids_or_have_the_class(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(games.parent))
    named = {"say": f"{games}:say", "act": f"{games}:act", "arguments": {"ends": "--"}}
    for env, stop in (("whet_test_games:Registered-v3", "truncated"), ("whet_test_games:Ends", None)):
        made = GymnasiumEnv(task(), world(), env=env, **named)
        made.first()
        assert answers(made, "left")[0].stop == stop


def test_without_the_package_the_reason_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "whet.envs.gymnasium")
    with pytest.raises(ConfigError, match=r"it needs the package gymnasium: pip install 'whet\[gymnasium\]'"):
        load_object(MAKE, what="rollout.env.make")


# ---------------------------------------------------------------- the example


def test_the_rewards_of_the_example_add_up_to_one_for_every_way_to_the_door() -> None:
    house = load_object(f"{ROOT}/examples/gymnasium/house.py:House", what="the example")
    begun = set()
    for seed in range(60):
        dense, outcome = house(), house(dense=False)
        said = {env.reset(seed=seed)[0] for env in (dense, outcome)}
        begun |= said
        assert len(said) == 1
        room, totals, solved = said.pop(), [0.0, 0.0], False
        for turn in range(200):
            move = way(room) if turn > 5 else "nesw"[(turn * seed) % 4]
            (room, more, solved, _, _), (_, last, _, _, _) = dense.step(move), outcome.step(move)
            totals = [totals[0] + more, totals[1] + last]
            if solved:
                break
        assert totals == [pytest.approx(1.0), 1.0]
    assert len(begun) == 9


def way(room: str) -> str:
    """By hand: the key is in the north-eastern corner, the door in the south-western one."""
    if room.endswith("*"):
        return "s" if room[0] in "abcdef" else "w"
    return "n" if room[0] in "defghi" else "e"


@pytest.mark.parametrize("slippery", [False, True])
def test_the_ice_of_trinitys_lake_is_that_of_gymnasium(slippery: bool) -> None:
    """Random walks over a lake, beside gymnasium's own environment."""
    board = ["FFHF", "FFFF", "FSFH", "HFFG"]
    for seed in range(40):
        theirs = FrozenLakeEnv(desc=board, is_slippery=slippery)
        state, _ = theirs.reset(seed=seed)
        ours = FrozenLake(task(seed=seed), world(), board=board, slippery=slippery, steps=50)
        for move in [(seed * 7 + n * n) % 4 for n in range(12)]:
            state, reward, done, _, _ = theirs.step(move)
            step = asyncio.run(ours.step(reply(f"```{move + 1}```")))
            assert (ours.place, step.reward, step.done) == (divmod(int(state), 4), float(reward), done)
            if done:
                break

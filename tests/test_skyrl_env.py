"""Environments of SkyRL: its own ones, and classes of its shape; what would rewrite tokens is refused."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from adapted import answers, played, task, world
from whet.envs.env import EnvFault
from whet.envs.skyrl_gym import RUN_CODE, SkyrlEnv
from whet.guard import sandbox
from whet.types import ConfigError, Message

MAKE = "whet.envs.skyrl_gym:make"
SUM = {"reward_spec": {"method": "rule", "ground_truth": "12"}}
ASKED = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer at the end in the exact "
    "format: '#### ANSWER'."
)
LAST = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."

OWN = '''
class Own:
    """The shape of BaseTextEnv, without the package."""

    def __init__(self, env_config, extras):
        self.config, self.extras, self.said, self.closed = env_config, extras, [], False

    def init(self, prompt):
        if self.config.get("changes"):
            return [{"role": "user", "content": "another question"}], {}
        return prompt + [{"role": "user", "content": f"goal {self.extras['goal']}"}], {}

    def step(self, action):
        self.said.append(action)
        out = {
            "observations": [{"role": "user", "content": self.config.hint}],
            "reward": int(action == self.extras["goal"]),
            "done": len(self.said) == 3,
            "metadata": {"any": object()},
        }
        if self.config.get("cuts"):
            out["postprocessed_action"] = action[:1]
        return out

    def close(self):
        self.closed = True

    def get_metrics(self):
        return {"said": len(self.said), "right": "x" in self.said, "words": "no number"}
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py:Own"


# ---------------------------------------------------------------- the package's own


def test_an_environment_of_the_package_is_played_in_a_host_as_it_is() -> None:
    """gsm8k_multi_turn: 1 for the right number, .2 over the turns for another, 0 for none."""
    pytest.importorskip("skyrl_gym", reason="needs the package skyrl-gym (whet[skyrl])")
    scripts = {1: ["hm", "so #### 11", "#### 12"], 2: ["#### 12"], 3: ["a", "b", "#### 7"]}
    arguments = {"env": "gsm8k_multi_turn", "max_turns": 3}
    codec, found = played(MAKE, arguments, scripts, dict.fromkeys(scripts, SUM))
    rewards = {uid: [turn.reward for turn in group[0].turns] for uid, group in found.items()}
    a_number = pytest.approx(0.2 / 3)
    assert rewards == {1: [0.0, a_number, 1.0], 2: [1.0], 3: [0.0, 0.0, a_number]}
    assert [codec.results(found[uid][0]) for uid in (1, 2)] == [[ASKED, LAST], []]
    assert [found[uid][0].reward_parts["env/steps"] for uid in (1, 2, 3)] == [3.0, 1.0, 3.0]
    assert {group[0].stop_reason for group in found.values()} == {"done"}


def test_the_adapter_gives_what_the_environment_gives_when_it_is_called_itself() -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs the package skyrl-gym (whet[skyrl])")
    replies = ["#### 12,", "nothing", "#### $12", "#### 12.0", "####12"]
    itself = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras={**SUM, "max_turns": 5})
    itself.init([{"role": "user", "content": "0"}])
    env = SkyrlEnv(task(**SUM), world(), "gsm8k_multi_turn", max_turns=5)
    assert env.first() == []
    for reply in replies:
        given, oracle = answers(env, reply)[0], itself.step(reply)
        assert [m.to_json() for m in given.messages] == oracle["observations"]
        assert (given.reward, given.done) == (oracle["reward"], oracle["done"])
        if given.done:
            break


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("gsm8k_multi_turns", "is not registered; did you mean 'gsm8k_multi_turn'"),
        *((name, "runs the policy's text as a program") for name in sorted(RUN_CODE)),
        ("none.py:Own", "no such file"),
    ],
)
def test_what_is_not_there_or_runs_code_is_refused_at_the_start(env: str, said: str) -> None:
    pytest.importorskip("skyrl_gym", reason="needs the package skyrl-gym (whet[skyrl])")
    with pytest.raises(ConfigError, match=said):
        played(MAKE, {"env": env}, {1: ["x"]})


@pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")
def test_sql_of_the_policy_reads_its_database_and_makes_no_file(tmp_path: Path) -> None:
    """Where nothing holds it, `ATTACH` makes one wherever the process may write."""
    pytest.importorskip("skyrl_gym", reason="needs the package skyrl-gym (whet[skyrl])")
    file = tmp_path / "spider/database/d/d.sqlite"
    file.parent.mkdir(parents=True)
    with sqlite3.connect(file) as database:
        database.executescript("CREATE TABLE t(x); INSERT INTO t VALUES (41), (42);")
    database.close()
    held, free = tmp_path / "held", tmp_path / "free"
    turns = [
        f"<think>a</think><sql>ATTACH DATABASE '{held}' AS m</sql>",
        "<think>b</think><sql>SELECT max(x) FROM t</sql>",
        "<think>c</think><solution>SELECT max(x) FROM t</solution>",
    ]
    row = {"db_id": "d", "data": "spider", "reward_spec": {"ground_truth": "SELECT 42"}}
    codec, found = played(
        MAKE, {"env": "text2sql", "max_turns": 5, "db_path": str(tmp_path)}, {1: turns}, {1: row}
    )
    refused, told = codec.results(found[1][0])
    assert "unable to open database" in refused
    assert "42" in told
    assert found[1][0].turns[-1].reward == 1.0
    sqlite3.connect(file).execute(
        turns[0].partition("<sql>")[2].replace("held", "free").removesuffix("</sql>")
    )
    assert (held.exists(), free.exists()) == (False, True)


def test_sql_of_the_policy_is_refused_where_nothing_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skyrl_gym", reason="needs the package skyrl-gym (whet[skyrl])")
    monkeypatch.setattr(sandbox, "lacking", lambda: "no Landlock")
    with pytest.raises(
        ConfigError, match=r"runs the policy's text as SQL, which can make files.*no Landlock"
    ):
        SkyrlEnv.prepare({"env": "text2sql"})


def test_without_the_package_a_registered_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'whet\[skyrl\]', or give your class"):
        SkyrlEnv.prepare({"env": "gsm8k_multi_turn"})


# ---------------------------------------------------------------- classes of its shape


def test_a_class_gets_the_columns_and_the_other_arguments(own: str) -> None:
    env = SkyrlEnv(task(goal="x", answer="y"), world(), own, max_turns=4, hint="again", depth={"a": 1})
    assert env.inner.extras == {"goal": "x", "answer": "y", "max_turns": 4}
    assert (env.inner.config.hint, env.inner.config.depth.a) == ("again", 1)
    assert env.first() == [Message("user", "goal x")]
    steps = answers(env, "a", "x", "b")
    assert [step.reward for step in steps] == [0.0, 1.0, 0.0]
    assert [step.messages for step in steps] == [[Message("user", "again")]] * 3
    assert [step.done for step in steps] == [False, False, True]
    assert [step.parts for step in steps] == [
        {"said": 1.0, "right": 0.0},
        {"said": 1.0, "right": 1.0},
        {"said": 1.0, "right": 0.0},
    ]
    env.close()
    assert env.inner.closed


def test_what_the_metrics_say_is_recorded_however_the_episode_ends(own: str) -> None:
    _, found = played(MAKE, {"env": own, "hint": "h"}, {1: ["a", "x"]}, {1: {"goal": "x"}}, max_turns=2)
    (rollout,) = found[1]
    assert (rollout.stop_reason, rollout.reward) == ("turns", 1.0)
    assert (rollout.reward_parts["env/said"], rollout.reward_parts["env/right"]) == (2.0, 1.0)


def test_an_action_that_differs_from_the_reply_is_a_fault_by_name(own: str) -> None:
    columns: dict[int, dict[str, Any]] = {1: {"goal": "x"}, 2: {"goal": "x"}}
    _, found = played(
        MAKE, {"env": own, "hint": "h", "cuts": True}, {1: ["xyz"], 2: ["x", "y", "z"]}, columns
    )
    assert "postprocessed_action that differs from the reply ('x')" in str(found[1][0].error)
    assert found[1][0].reward is None
    assert (found[2][0].error, found[2][0].reward) == (None, 1.0)  # one letter is the same action


def test_a_prompt_that_init_changes_is_a_fault(own: str) -> None:
    env = SkyrlEnv(task(goal="x"), world(), own, changes=True)
    with pytest.raises(EnvFault, match="init of Own changed the prompt"):
        env.first()

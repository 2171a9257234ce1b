"""Tasks of reasoning-gym with several tries: rewards by hand, and only verifiers that the config names."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

import payloads
from adapted import played, reply, task, world
from whet.envs import reasoning_gym as tries
from whet.envs.env import EnvFault, EnvStep
from whet.envs.reasoning_gym import TriesEnv
from whet.guard import sandbox
from whet.types import ConfigError

MAKE = "whet.envs.reasoning_gym:make"
needs_sandbox = pytest.mark.skipif(bool(sandbox.lacking()), reason=f"no sandbox here: {sandbox.lacking()}")


@pytest.fixture(autouse=True)
def _processes() -> Iterator[None]:
    yield
    for judge in tries.judges.values():
        judge.close()
    tries.judges.clear()


def row(name: str = "spell_backward") -> dict[str, Any]:
    """As a source of reasoning-gym gives it."""
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0], default=str))
    return {"answer": entry["answer"], "entry": entry}


def tried(env: TriesEnv, *replies: str) -> list[EnvStep]:
    async def story() -> list[EnvStep]:
        async with asyncio.timeout(100):
            assert await env.first() == []
            return [await env.step(reply(text)) for text in replies]

    return asyncio.run(story())


def test_a_right_reply_ends_the_episode_and_each_try_before_it_takes_its_share() -> None:
    given = row()
    scripts = {
        1: [given["answer"]],
        2: ["x", given["answer"]],
        3: ["x", "y", given["answer"]],
        4: ["x", "y", "z"],
    }
    arguments = {
        "verifiers": "spell_backward",
        "tries": 3,
        "decay": 0.5,
        "feedback": "no ({score}), {left} left",
    }
    codec, found = played(MAKE, arguments, scripts, dict.fromkeys(scripts, given))
    assert [found[uid][0].reward for uid in scripts] == [1.0, 0.5, 0.25, 0.0]
    assert [len(found[uid][0].turns) for uid in scripts] == [1, 2, 3, 3]
    assert [found[uid][0].reward_parts["env/right"] for uid in scripts] == [1.0, 1.0, 1.0, 0.0]
    assert [found[uid][0].reward_parts["env/right_at_once"] for uid in scripts] == [1.0, 0.0, 0.0, 0.0]
    assert codec.results(found[4][0]) == ["no (0), 2 left", "no (0), 1 left"]
    assert [turn.reward for turn in found[3][0].turns] == [0.0, 0.0, 0.25]


def test_a_score_between_counts_where_the_config_says_so() -> None:
    """The oracle is the verifier itself, called here."""
    given = row()
    near = given["answer"] + "s"
    score = reasoning_gym.get_score_answer_fn("spell_backward")(near, given["entry"])
    assert 0 < score < 1
    for exact, wanted in ((True, 0.0), (False, score / 4)):
        env = TriesEnv(task(**given), world(), verifiers="spell_backward", tries=2, decay=0.25, exact=exact)
        assert [step.reward for step in tried(env, "x", near)] == [0.0, pytest.approx(wanted)]


def test_the_answer_may_stand_behind_a_pattern() -> None:
    given = row()
    env = TriesEnv(task(**given), world(), verifiers="spell_backward", pattern="<a>(.*?)</a>")
    steps = tried(env, given["answer"], f"so <a>{given['answer']}</a>")
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.5, True)]
    assert [m.content for m in steps[0].messages] == [tries.FEEDBACK]


def test_the_row_does_not_choose_its_verifier() -> None:
    _, found = played(MAKE, {"verifiers": ["gcd", "lcm"]}, {1: ["x"]}, {1: row()})
    assert found[1][0].reward is None
    assert "requests the verifier 'spell_backward', but the config allows gcd, lcm" in str(found[1][0].error)


def verdict(env: TriesEnv, text: str) -> float | str | None:
    """The reward of one try; 'unscored' where the verifier raised or its process ended."""
    try:
        return tried(env, text)[0].reward
    except EnvFault:
        return "unscored"


@needs_sandbox
def test_code_in_a_reply_does_nothing_where_the_verifier_evaluates_it(tmp_path: Path) -> None:
    """countdown and puzzle24 evaluate the reply: in a process that can write nothing."""
    for name in ("countdown", "puzzle24"):
        with payloads.listening() as port:
            codes = payloads.codes(tmp_path, port.getsockname()[1])
            for code in codes.values():
                env = TriesEnv(task(**row(name)), world(), verifiers=name, tries=1)
                assert verdict(env, code) in ("unscored", pytest.approx(0.0), pytest.approx(0.01))
    assert list(tmp_path.iterdir()) == []


def test_the_processes_of_verifiers_end_with_their_host() -> None:
    before = children()
    played(MAKE, {"verifiers": "spell_backward"}, {1: ["x", "y", "z"]}, {1: row()})
    assert children() == before


def children() -> set[int]:
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(word) for word in text.split()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tries": 0}, r"arguments\.tries: got 0, expected a whole number >= 1"),
        ({"decay": 1.5}, r"arguments\.decay: got 1\.5, expected a number >= 0 and <= 1"),
        ({"feedback": "{lift} left"}, r"KeyError\('lift'\); expected a text, with {left} and {score}"),
        ({"feedback": ""}, "feedback is empty"),
        (
            {"verifiers": "spell_backwards"},
            "is not a verifier of reasoning-gym; did you mean 'spell_backward'",
        ),
        ({"verifiers": []}, "the config must list the allowed verifiers"),
        ({"trys": 2}, "trys: unknown key; did you mean 'tries'"),
    ],
)
def test_a_host_refuses_what_cannot_judge(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        played(MAKE, {"verifiers": "spell_backward", **change}, {1: ["x"]}, {1: row()})


def test_without_verifiers_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"arguments\.verifiers: must be given: text or a list"):
        played(MAKE, {}, {1: ["x"]}, {1: row()})

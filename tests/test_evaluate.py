"""mean@k, pass@k and maj@k by hand."""

from __future__ import annotations

import pytest

from whet.evaluate import accuracy, commonest
from whet.types import Group, Rollout, Task


def reply(answer: str, reward: float | None, *, parts: dict[str, float] | None = None) -> Rollout:
    return Rollout(
        task=Task(uid=0, source="a", prompt=""), index=0, token_ids=[1, 2], mask=[0, 1], logprobs=[0.0, 0.0],
        sample_logprobs=[0.0, 0.0], versions=[-1, 0], finish_reason="stop", text=answer, reward=reward,
        reward_parts=parts or {}, error=None if reward is not None else "reward r: raised",
    )  # fmt: skip


def group(source: str, *replies: Rollout) -> Group:
    return Group(Task(uid=0, source=source, prompt=""), replies)


def test_by_hand() -> None:
    groups = [
        group("a", reply("7", 1.0), reply("7", 1.0), reply("8", 0.0), reply("9", 0.0)),  # majority 7: right
        group("a", reply("3", 0.0), reply("3", 0.0), reply("4", 1.0), reply("5", None)),  # majority 3: wrong
        group("b", reply("1", 0.0), reply("1", 0.0), reply("1", 0.0), reply("1", 0.0)),
    ]
    m = accuracy(groups, success=1.0, reward=None)
    assert m["eval/a/mean@4"] == 3 / 8
    assert m["eval/a/pass@4"] == 1.0
    assert m["eval/a/maj@4"] == 0.5
    assert m["eval/a/unscored"] == 1
    assert m["eval/a/reward_mean"] == pytest.approx(3 / 7)
    assert (m["eval/b/mean@4"], m["eval/b/pass@4"], m["eval/b/maj@4"]) == (0, 0, 0)
    assert m["eval/all/mean@4"] == m["eval/accuracy"] == 3 / 12
    assert m["eval/all/pass@4"] == pytest.approx(2 / 3)
    assert m["eval/all/tasks"] == 3


def test_one_source_has_no_all_and_one_reply_no_majority() -> None:
    m = accuracy([group("a", reply("x", 1.0))], success=1.0, reward=None)
    assert m["eval/a/mean@1"] == m["eval/accuracy"] == 1.0
    assert not [k for k in m if "all" in k or "pass@" in k or "maj@" in k]


def test_success_is_exact_and_may_be_one_part() -> None:
    nearly = reply("x", 0.9999999999999999, parts={"right": 1.0, "style": 0.0})
    assert accuracy([group("a", nearly)], success=1.0, reward=None)["eval/accuracy"] == 0.0
    assert accuracy([group("a", nearly)], success=1.0, reward="right")["eval/accuracy"] == 1.0


def test_the_first_of_equally_common_answers_counts() -> None:
    a, b = reply("a", 1.0), reply("b", 0.0)
    assert commonest([b, a]) is b
    assert commonest([b, a, a]) is a
    assert commonest([reply(" a", 0.0), b, b, a]) is not b

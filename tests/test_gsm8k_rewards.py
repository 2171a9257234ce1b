"""GSM8K's reward, as verl, SkyRL and Cosmos-RL judge it: which number, compared as text."""

from __future__ import annotations

import pytest

from whet.dialects.tables import dialect
from whet.dialects.verl.data import judge
from whet.rewards.builtin import number
from whet.rewards.gsm8k import gsm8k
from whet.rewards.verl import compute_score
from whet.types import Task

TWO = "#### 7 no, wait\n#### 18"


def task(answer: object, source: str = "openai/gsm8k") -> Task:
    return Task(uid=0, source=source, prompt="q", answer=answer)


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("so\n#### 18", "18", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -3", "-3", 1.0),
        ("18", "18", 0.0),
        ("####18", "18", 0.0),  # the space is a part of the mark
        ("#### $18", "18", 0.0),
        ("#### 18.", "18", 0.0),  # text, not numbers
        ("#### 18.0", "18", 0.0),
        (TWO, "7", 1.0),
        (TWO, "18", 0.0),
        ("#### 18", "16 + 2 = <<16+2=18>>18\n#### 18", 1.0),
        ("#### 5", 5, 1.0),
    ],
)
def test_the_first_number_as_text(reply: str, answer: object, score: float) -> None:
    assert gsm8k(reply, task(answer))["score"] == score


def test_the_last_number_of_the_last_characters() -> None:
    assert gsm8k(TWO, task("18"), found="last")["score"] == 1.0
    far = "#### 18" + " and so on" * 30
    assert gsm8k(far, task("18"), found="last")["score"] == 1.0
    assert gsm8k(far, task("18"), found="last", last_characters=300)["score"] == 0.0
    assert gsm8k("#### 18", task("18"), last_characters=0)["score"] == 0.0


def test_an_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="no number after '#### '"):
        gsm8k("#### 1", task("it is ####"))


def test_what_number_takes_and_this_does_not() -> None:
    assert number("#### 18.0", task("18"))["score"] == 1.0


@pytest.mark.parametrize(
    ("version", "two", "far"),
    [("0.4.0", 0.0, 1.0), ("0.4.1", 1.0, 1.0), ("0.5.0", 1.0, 0.0), ("main", 1.0, 0.0)],
)
def test_verls_table_judges_as_the_release_does(version: str, two: float, far: float) -> None:
    values = {row.key: row.default for row in dialect("verl-ppo", version).rows} | {"@version": version}
    arguments = judge(values).get("rewards.score.arguments", {})
    assert compute_score(TWO, task("18"), **arguments)["score"] == two
    assert compute_score("#### 18" + " and so on" * 30, task("18"), **arguments)["score"] == far

"""RLCR: the parts of its score, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from whet.rewards.calibration import rlcr
from whet.types import ConfigError, Task


def task(answer: str | None = "42") -> Task:
    return Task(uid="t", prompt="?", answer=answer, source="s")


def reply(
    answer: str = "42", sure: str = "0.8", *, before: str = "", between: str = "", after: str = ""
) -> str:
    parts = ("<think>so</think>", f"<answer>{answer}</answer>", "<analysis>yes</analysis>")
    return before + between.join((*parts, f"<confidence>{sure}</confidence>")) + after


@pytest.mark.parametrize(
    ("answer", "sure", "score"),
    [
        ("42", "0.8", 0.5 + 0.5 + 0.5 * 0.96 + 0.8e-5),
        ("41", "0.2", 0.5 + 0.5 * 0.96 + 0.2e-5),
        ("41", "0.8", 0.5 + 0.5 * 0.36 + 0.8e-5),
        ("42.0", "1", 0.5 + 0.5 + 0.5 + 2e-5),
        ("41", "1", 0.5 + 2e-5),
        ("41", "0", 0.5 + 0.5 + 1e-5),
    ],
)
def test_the_score_is_form_result_and_calibration(answer: str, sure: str, score: float) -> None:
    assert rlcr(reply(answer, sure), task())["score"] == pytest.approx(score, abs=1e-12)


def test_the_reward_of_the_paper() -> None:
    """y - (y - q)^2, and 1 for the form."""
    weights = {"format": 0, "accuracy": 1, "brier": 1, "mean_confidence": 0, "confidence_one_or_zero": 0}
    for answer, y in (("42", 1), ("41", 0)):
        for q in (0.0, 0.3, 1.0):
            found = rlcr(reply(answer, str(q)), task(), weights=weights)["score"]
            assert found == pytest.approx(1 + y - (y - q) ** 2)


def test_parts_stand_beside_the_score() -> None:
    found = rlcr(reply("41", "0.995"), task(), weights={"accuracy": 2.0})
    assert {name: found[name] for name in ("format", "accuracy", "mean_confidence", "answer")} == {
        "format": 1.0,
        "accuracy": 0.0,
        "mean_confidence": 0.995,
        "answer": "41",
    }
    assert found["brier"] == pytest.approx(1 - 0.995**2)
    assert found["confidence_one_or_zero"] == 1.0
    right = rlcr(reply("42", "0.5"), task(), weights={"accuracy": 2.0})["score"]
    assert right == pytest.approx(0.5 + 2.0 + 0.5 * 0.75 + 0.5e-5), "the others keep their weights"


@pytest.mark.parametrize(
    "text",
    [
        reply(between=" \n\t", after="\n "),
        reply(before="first "),
        reply(before=reply("41", "0.1") + " no: "),
        reply(before="<answer>41</answer>"),
    ],
)
def test_the_last_elements_count(text: str) -> None:
    found = rlcr(text, task())
    assert (found["format"], found["accuracy"], found["mean_confidence"]) == (1.0, 1.0, 0.8)


@pytest.mark.parametrize(
    "text",
    [
        "42",
        reply(after=" that is all"),
        reply(between=" and "),
        reply().replace("<think>", "", 1),
        reply().replace("analysis", "Analysis"),
        reply(before="<answer>"),
        reply(before="<think>a<answer>b</answer></think>"),
        reply().replace("</think><answer>", "<answer>").replace("</answer>", "</answer></think>"),
        "<think>a</think><analysis>b</analysis><answer>42</answer><confidence>0.8</confidence>",
    ],
)
def test_without_the_form_there_is_only_the_confidence(text: str) -> None:
    found = rlcr(text, task())
    assert (found["format"], found["accuracy"], found["brier"]) == (0.0, 0.0, 0.0)
    sure = 0.8 if "<confidence>" in text else 0.0
    assert found["score"] == pytest.approx(sure * 1e-5, abs=1e-12)


@pytest.mark.parametrize("sure", ["", "high", "nan", "inf", "-0.01", "1.01"])
def test_a_confidence_that_is_no_share_has_no_form(sure: str) -> None:
    assert rlcr(reply(sure=sure), task())["score"] == 0.0


@pytest.mark.parametrize(
    "after", ["<confidence>0.1", "</confidence>", "<confidence><confidence>0.1</confidence>"]
)
def test_a_confidence_that_is_not_closed_is_none(after: str) -> None:
    assert rlcr(reply(after=after), task())["score"] == 0.0


@pytest.mark.parametrize(("sure", "extreme"), [("0.009", 1), ("0.01", 0), ("0.99", 0), ("0.991", 1)])
def test_a_confidence_at_an_end(sure: str, extreme: int) -> None:
    assert rlcr(reply(sure=sure), task())["confidence_one_or_zero"] == extreme


def test_a_task_without_an_answer_blames_no_reply() -> None:
    for text in (reply(), "42"):
        with pytest.raises(ValueError, match="has no answer"):
            rlcr(text, task(None))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"acuracy": 1.0}, "did you mean 'accuracy'"),
        ({"format": "0.5"}, r"weights\.format='0\.5': expected a number"),
        ({"format": True}, "expected a number"),
        ({"format": float("inf")}, "expected a number"),
    ],
)
def test_weights_are_numbers_of_its_parts(weights: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rlcr(reply(), task(), weights=weights)

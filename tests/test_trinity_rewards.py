"""Trinity-RFT's rewards, by values worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from whet.rewards.trinity import (
    countdown_reward,
    format_reward,
    math_boxed_reward,
    math_reward,
    toolcall_reward,
)
from whet.types import Json, Task


def task(answer: Json) -> Task:
    return Task(uid="t", prompt="?", answer=answer, source="s")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>48 / 2 = 24</think>\n<answer>72</answer>", 1.1),
        ("<think>48 / 2 = 24</think>\n<answer>71</answer>", 0.1),
        ("so it is 72", 0.9),
        ("so it is 71", -0.1),
        ("<answer>72</answer> but 71", 0.9),
    ],
)
def test_math_is_the_result_and_the_form(response: str, score: float) -> None:
    assert math_reward(response, task("24 in May, so\n#### 72"))["score"] == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "with_think", "score"),
    [
        (r"\boxed{72}", False, 1.0),
        ("72", False, 0.0),
        (r"\boxed{72}", True, 0.8),
        (r"<think>a</think> \boxed{72}", True, 1.0),
        (r"</think>a<think> \boxed{71}", True, -0.2),
    ],
)
def test_boxed_math(response: str, with_think: bool, score: float) -> None:
    told = math_boxed_reward(response, task("72"), with_think=with_think, format_score_coef=0.2)
    assert told["score"] == pytest.approx(score)
    assert told["accuracy"] == float(r"\boxed{72}" in response), "by which dapo_dynamic_sampling judges"


@pytest.mark.parametrize("part", ["<think></think><answer>", "<think>", "<think>\n\n</think>\n<answer>\n"])
def test_a_reply_that_repeats_its_tags_is_judged_like_any_other(part: str) -> None:
    """One expression for the form took hours."""
    assert math_reward(part * 10_000, task("4"))["format_score"] == -0.1
    assert (
        math_reward(part * 10_000 + "<think></think><answer>4</answer>\n", task("4"))["format_score"] == 0.1
    )


CALLS: Json = [{"name": "f", "arguments": {"x": 1}}]
CALL = '<think>a</think><tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
RIGHT = "<answer>6 * 4</answer>"
IN_LINES = "<think>\na\n</think>\n<answer>\n4"


@pytest.mark.parametrize(
    ("reward", "answer", "reply", "score"),
    [
        (toolcall_reward, CALLS, CALL + "<tool_call>" * 100_000, 1.0),
        (countdown_reward, {"target": 24, "numbers": [4, 6]}, RIGHT + "<answer>" * 100_000, 1.0),
        (countdown_reward, {"target": 24, "numbers": [4, 6]}, "</answer>" * 100_000 + RIGHT, 1.0),
        (format_reward, None, IN_LINES + "\n</think>\n<answer>\n" * 100_000 + "\n</answer>", 0.1),
        (format_reward, None, IN_LINES + "\n</think>\n<answer>\n" * 100_000, -0.1),
    ],
)
def test_tags_that_are_repeated_are_read_once(
    reward: Callable[[str, Task], float], answer: Json, reply: str, score: float
) -> None:
    """One expression for a pair of tags took an hour."""
    assert reward(reply, task(answer)) == score


def test_the_form_has_its_tags_in_lines_of_their_own() -> None:
    assert format_reward("<think>\na\n</think>\n<answer>\nb\n</answer>", task(None)) == 0.1
    assert format_reward("<think>a</think><answer>b</answer>", task(None)) == -0.1


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<answer>(4 + 2) * (7 - 3)</answer>", 1.0),
        ("<answer>4 * 2 * 3</answer>", 0.1),
        ("<answer>4 + 2 + 7 + 3</answer>", 0.1),
        ("<answer>2 + 4 + 7 +</answer>", 0.1),
        ("<answer>7 ** 4 ** 3 ** 2</answer>", 0.1),
        ("<answer>4 / (2 - 2) + 7 + 3</answer>", 0.1),
        ("<answer>__import__('os').x(2, 3, 4, 7)</answer>", 0.1),
        ("24", 0.0),
        ("<answer>(4 + 2) * (7 - 3)</answer>\ndone", 0.0),
        ("<answer>1</answer> no, <answer>(4 + 2) * (7 - 3)</answer>", 1.0),
    ],
)
def test_countdown(reply: str, score: float) -> None:
    answer = {"target": 24, "numbers": [7, 2, 4, 3]}
    assert countdown_reward(f"well\n{reply}", task(answer)) == score
    assert countdown_reward(f"well\n{reply}", task(json.dumps(answer))) == score


def test_countdown_divides_exactly() -> None:
    assert (
        countdown_reward("<answer>8 / (3 - 8 / 3)</answer>", task({"target": 24, "numbers": [8, 3, 8, 3]}))
        == 1.0
    )


def test_an_answer_without_a_target_blames_no_reply() -> None:
    with pytest.raises(ValueError, match="needs a target and numbers"):
        countdown_reward("<answer>1</answer>", task("24"))


def test_a_number_of_very_many_digits_is_a_wrong_answer() -> None:
    answer: Json = {"target": 3, "numbers": [1, 2]}
    assert countdown_reward(f"<answer>{'1' * 5000}</answer>", task(answer)) == 0.1

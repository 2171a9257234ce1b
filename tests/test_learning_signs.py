"""Signs that nothing is learned: by hand-made metrics, in real runs, and never where a run learns."""

from __future__ import annotations

import io
import json
import math
import random
import re
from pathlib import Path

import pytest
from rich.console import Console

import whet
from tiny import RUN
from whet.config.keys import lookup
from whet.track import learning, show
from whet.track.learning import SIGNS, signs, trend
from whet.track.monitor import Monitor
from whet.types import Metrics

GOOD = {
    "rollout/count": 8,
    "reward/scored_count": 8,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/mean": 0.5,
    "group/zero_std_frac": 0.5,
    "rollout/finish_length_frac": 0.25,
    "rollout/tokens_mean": 10.0,
    "train/entropy_nats": 1.0,
    "train/approx_kl_k3_nats": 0.001,
    "train/kl_reference_nats": 0.05,
    "train/skipped_steps": 0.0,
    "rollout/calls_mean": 1.0,
    "rollout/malformed_frac": 0.1,
    "reward/part/env/calls/add": 0.5,
    "time/reward_s": 1.5,
    "time/step_s": 4.0,
}
"""A step of a run that learns."""


def names(rows: list[dict[str, float]]) -> list[str]:
    return [sign.name for sign in signs(rows)]


def steps(count: int, **changed: float) -> list[dict[str, float]]:
    return [GOOD | {name.replace("__", "/"): value for name, value in changed.items()}] * count


WRONG = {
    "constant reward": {"reward__min": 1.0, "reward__mean": 1.0, "group__zero_std_frac": 1.0},
    "uniform groups": {"group__zero_std_frac": 1.0},
    "no reply ends": {"rollout__finish_length_frac": 1.0},
    "entropy collapsed": {
        "train__entropy_nats": 0.001, "group__zero_std_frac": 0.95, "reward__mean": 0.4
    },
    "KL exploding": {"train__approx_kl_k3_nats": 0.5},
    "steps skipped": {"train__skipped_steps": 1.0},
    "no tool calls": {"rollout__calls_mean": 0.0},
    "tool unused": {"reward__part__env__calls__add": 0.0},
    "malformed replies": {"rollout__malformed_frac": 0.6},
    "rewards slow": {"time__reward_s": 2.5},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_sign_holds_from_its_window_on_and_goes_with_its_cause(name: str) -> None:
    window = next(sign.window for sign in SIGNS if sign.name == name)
    wrong = steps(window, **WRONG[name])
    assert names(wrong[1:]) == []
    assert names(wrong) == [name]
    assert names(steps(30) + wrong) == [name]
    assert names(wrong + steps(window)) == []


@pytest.mark.parametrize("name", GOOD)
def test_a_sign_is_silent_where_a_number_is_not_recorded(name: str) -> None:
    for sign, wrong in WRONG.items():
        rows = [{k: v for k, v in row.items() if k != name} for row in steps(20, **wrong)]
        assert set(names(rows)) <= {sign, "uniform groups"}


def test_every_sign_has_a_case() -> None:
    assert {sign.name for sign in SIGNS} == {*WRONG, "length pays"}


def test_a_run_that_learns_has_no_sign() -> None:
    assert names(steps(40)) == []
    solved = steps(40, train__entropy_nats=0.001, group__zero_std_frac=0.95, reward__mean=0.98)
    assert names(solved) == []  # nearly deterministic, and right


def test_rewards_that_are_one_number_in_each_step_but_another_one_in_the_next_are_not_constant() -> None:
    rows = [GOOD | {"reward/min": float(n % 2), "reward/max": float(n % 2)} for n in range(5)]
    assert names(rows) == []
    assert names([row | {"group/zero_std_frac": 1.0} for row in rows]) == ["uniform groups"]


def test_length_that_pays_by_hand() -> None:
    """Length doubles over 20 steps. With the reward as its linear function their correlation is 1."""
    length = [10.0 + 10.0 * n / 19 for n in range(20)]
    follows = [GOOD | {"rollout/tokens_mean": x, "reward/mean": 0.02 * x} for x in length]
    assert names(follows) == ["length pays"]
    falls = [GOOD | {"rollout/tokens_mean": x, "reward/mean": 1 - 0.02 * x} for x in length]
    assert names(falls) == []
    flat = [GOOD | {"rollout/tokens_mean": x} for x in length]
    assert names(flat) == []
    little = [GOOD | {"rollout/tokens_mean": 10 + x / 10, "reward/mean": 0.02 * x} for x in length]
    assert names(little) == []  # from 11 to 12 tokens


def test_numbers_that_are_not_there_or_not_finite_are_no_sign() -> None:
    assert signs([{}] * 50) == []
    assert signs([{"train/loss": 1.0, "rollout/count": 8}] * 50) == []  # SFT
    assert names(steps(30, train__approx_kl_k3_nats=math.nan, train__entropy_nats=math.nan)) == []


def test_noise_gives_no_sign_and_no_verdict() -> None:
    """Over many random runs without a trend at most a few are called one: two standard errors are 5 %."""
    judged = []
    for seed in range(200):
        draw = random.Random(seed)
        rows = [GOOD | {"reward/mean": draw.random()} for _ in range(200)]
        assert names(rows) == []
        judged.append(trend(rows).partition(":")[0])
    assert judged.count("no clear trend yet") >= 180


def test_the_trend_in_words() -> None:
    rising = [{"reward/mean": n / 40, "train/loss": 0.0} for n in range(40)]
    assert trend(rising) == "yes: reward 0.113 → 0.863 (first and last quarter of 40 steps)"
    assert trend(rising[::-1]).startswith("no: reward 0.863 → 0.113")
    loss = [{"train/loss": 2.0 - n / 40} for n in range(40)]
    assert trend(loss).startswith("yes: loss 1.89 → 1.14")
    pairs = [{"train/loss": 1.0, "train/accuracy": n / 40} for n in range(40)]
    assert trend(pairs).startswith("yes: accuracy")
    assert trend(rising[:3]).startswith("too early to say: reward 0 → 0.05 in 3 steps")
    assert trend([]) == "no step yet"


# ---------------------------------------------------------------- real runs


def run(tmp_path: Path, *overrides: str, answer: str) -> tuple[str, str]:
    """run.log, and what `whet show` prints."""
    rows = [{"prompt": word, "answer": answer} for word in ("ab", "ba", "aa", "bb")]
    data = {"max_prompt_tokens": 8, "train": [{"name": "words", "rows": rows}]}
    rewards = {"letters": {"function": "exact"}}
    config = {**RUN, "data": data, "rewards": rewards, "checkpoint": {"export": False}, "track": {}}
    whet.train(overrides=[f"run_dir={tmp_path / 'run'}", "train.steps=7", *overrides], **config)
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(show.summary(tmp_path / "run"))
    return (tmp_path / "run" / "run.log").read_text(), console.export_text()


def test_a_constant_reward_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, shown = run(tmp_path, answer="longer than four tokens")
    said = "step 5 of main: constant reward: every reward of the last 5 steps was the same"
    assert log.count("constant reward: every reward") == 1
    assert said in log
    assert capsys.readouterr().out.count("constant reward") == 1
    assert "no: constant reward" in shown
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["reward/mean"] == 0.0 for line in lines)


def test_replies_of_one_token_are_told(tmp_path: Path) -> None:
    log, shown = run(
        tmp_path, "rollout.sampling.max_tokens=1", "rollout.sampling.ignore_eos=true", answer="a"
    )
    assert log.count("no reply ends: every reply") == 1
    assert "a larger rollout.sampling.max_tokens" in log
    assert "no reply ends" in shown


@pytest.mark.parametrize(("mode", "told"), [("in turn", 1), ("beside the update", 0)])
def test_slow_rewards_are_told_where_the_step_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, told: int
) -> None:
    def timings(monitor: Monitor) -> tuple[Metrics, dict[str, float]]:
        monitor.seconds.clear()
        return {"time/reward_s": 6.0, "time/step_s": 10.0}, {}

    monkeypatch.setattr(Monitor, "timings", timings)
    overlap = ["rollout.max_staleness=1"] if mode == "beside the update" else []
    log, shown = run(tmp_path, *overlap, answer="a")
    assert log.count("rewards slow: scoring took more than half") == told
    assert "rewards slow" not in shown  # which has no timings


def test_the_keys_of_the_advice_are_keys() -> None:
    for sign in SIGNS:
        keys = re.findall(
            r"\b(?:rollout|train|algorithm|data|tokenizer|model|checkpoint|reward_workers)\.[a-z_.]+[a-z]",
            sign.advice,
        )
        assert keys, sign.name
        for key in keys:
            assert lookup(key.split(".")) is not None, key
    assert learning.LONGEST == 20

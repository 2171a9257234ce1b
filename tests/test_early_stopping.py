"""Stages that end early, callbacks that stop a run, and evaluations of runs and models with other data."""

import json

import numpy as np
import pytest

import whet
from whet.early_stopping import should_stop
from whet.types import CheckpointError, ConfigError, WhetError

ROWS = [{"prompt": f"{w}>", "answer": w[::-1]} for w in ("ab", "ba", "cab", "bc")]
SCRATCH = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip


def train(run_dir, steps=6, early_stopping=None, reward=None, **more):
    settings = {"steps": steps, "tasks_per_step": 2}
    return whet.train(
        data={"train": ROWS, "eval": ROWS[:2], "exclude_eval": False, "max_prompt_tokens": 16},
        model={"scratch": SCRATCH},
        tokenizer={"build": "chars"},
        rewards=reward or (lambda response, answer: float(response == answer)),
        rollout={"group_size": 2, "sampling": {"max_tokens": 4}},
        algorithm="grpo",
        train=settings if early_stopping is None else {**settings, "early_stopping": early_stopping},
        eval={"interval": 1},
        track={"trackers": ["jsonl"]},
        run_dir=str(run_dir),
        **more,
    )


def steps_of(result):
    return [line["step"] for line in result.metrics if "train/loss" in line]


def stops(values, **settings):
    from whet.config.schema import EarlyStoppingConfig

    return should_stop(values, EarlyStoppingConfig.model_validate(settings))


def test_evaluations_without_improvement_are_counted_since_the_best():
    assert not stops([], patience=1)
    assert not stops([0.5], patience=1)
    assert stops([0.5, 0.5], patience=1)
    assert not stops([0.1, 0.5, 0.4, 0.6, 0.5], patience=2)
    assert stops([0.1, 0.5, 0.4, 0.5], patience=2)
    assert stops([3.0, 2.0, 2.5, 2.0], patience=2, goal="min")
    assert not stops([3.0, 2.0, 2.5, 1.9], patience=2, goal="min")
    # better, but not by more than the threshold; the best moves with it all the same
    assert stops([0.5, 0.55, 0.6], patience=2, threshold=0.1)
    assert not stops([0.5, 0.55, 0.7], patience=2, threshold=0.1)
    assert stops([0.5, float("nan"), float("nan")], patience=2)


def test_a_stage_that_stops_improving_ends_as_after_its_last_step_and_goes_on_with_more_patience(tmp_path):
    run = tmp_path / "run"
    first = train(run, early_stopping={"patience": 2})
    assert first.finished
    assert steps_of(first) == [1, 2]
    assert (run / "export" / "main" / "config.json").is_file()
    state = json.loads((run / "checkpoints" / "0-main-000002" / "state.json").read_text())
    assert state["done"]
    assert state["stopped_early"]["patience"] == 2
    assert steps_of(train(run, early_stopping={"patience": 2})) == [1, 2]
    assert steps_of(train(run, early_stopping={"patience": 3})) == [1, 2, 3]
    assert (run / "export" / "main-step-000002").is_dir()
    assert steps_of(train(run, steps=5)) == [1, 2, 3, 4, 5]
    whole = train(tmp_path / "whole", steps=5)  # an unbroken run is the same
    assert (run / "metrics.jsonl").read_bytes() == (whole.run_dir / "metrics.jsonl").read_bytes()


def test_a_metric_that_no_evaluation_has_is_an_error(tmp_path):
    with pytest.raises(
        WhetError, match=r"train.early_stopping.metric=eval/loss: the evaluation has only eval/"
    ):
        train(tmp_path / "run", early_stopping={"metric": "eval/loss"})


def test_callbacks_see_every_row_and_stop_the_run(tmp_path):
    seen = []

    def on_step(row):
        seen.append(row)
        return row["step"] == 2

    first = train(tmp_path / "run", steps=4, on_step=on_step, on_eval=seen.append)
    assert not first.finished
    assert [(r["step"], "eval/accuracy" in r) for r in seen] == [
        (0, True),
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert {"reward/mean", "time/step_s", "stage"} <= seen[1].keys()
    assert train(tmp_path / "run", steps=4).finished
    whole = train(tmp_path / "whole", steps=4)
    assert (first.run_dir / "metrics.jsonl").read_bytes() == (whole.run_dir / "metrics.jsonl").read_bytes()


def test_an_evaluation_on_other_characters_has_the_tokenizer_of_the_run(tmp_path):
    def length(response):
        return float(len(response))

    run = train(tmp_path / "run", steps=2, reward=length)
    source = {"path": str(tmp_path / "more.jsonl"), "name": "more"}
    (tmp_path / "more.jsonl").write_text(json.dumps({"prompt": "xyz>", "answer": "zyx"}))
    (tmp_path / "same.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
    (line,) = whet.evaluate(
        run.run_dir,
        data=[{"path": str(tmp_path / "same.jsonl"), "name": "same"}, source],
        rewards=length,
        step=2,
    )
    assert line["eval/same/reward_mean"] == run.metrics[-1]["eval/eval/reward_mean"]
    assert line["eval/more/tasks"] == 1


def test_what_a_callback_raises_ends_the_run_with_its_traceback(tmp_path):
    def on_step(row):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        train(tmp_path / "run", on_step=on_step)
    assert "raised by on_step, after step 1 of stage 'main'" in caught.value.__notes__[0]
    with pytest.raises(WhetError, match="on_eval returned 'stop'; expected True"):
        train(tmp_path / "other", on_eval=lambda row: "stop")
    with pytest.raises(WhetError, match=r"on_eval returned array\(.*; expected True"):
        train(tmp_path / "array", on_eval=lambda row: np.array([True, False]))


def test_a_run_is_evaluated_at_one_step_and_on_other_data(tmp_path):
    run = train(tmp_path / "run", steps=2, checkpoint={"interval": 1}).run_dir

    def always(response):
        return 1.0

    found = whet.evaluate(run, data=ROWS[:1], rewards=always, step=1)
    assert [(line["step"], line["eval/accuracy"], line["eval/eval/tasks"]) for line in found] == [
        (1, 1.0, 1.0)
    ]
    assert len(whet.evaluate(run, rewards=always)) == 2
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 0-main-000001, 0-main"):
        whet.evaluate(run, rewards=always, step=7)
    with pytest.raises(ConfigError, match=r"rewards.reward: this was a function passed from Python"):
        whet.evaluate(run)
    for how in ({"overrides": [f"run_dir={tmp_path / 'other'}"]}, {"run_dir": str(tmp_path / "other")}):
        with pytest.raises(ConfigError, match=r"run_dir: what is made of the run .* is written there; leave"):
            whet.evaluate(run, rewards=always, **how)
        with pytest.raises(ConfigError, match=r"run_dir: what is made of the run .* is written there; leave"):
            whet.generate(run, data=ROWS, output=tmp_path / "replies.jsonl", **how)


def test_a_model_is_evaluated_as_its_run_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(tmp_path / "run", steps=2, reward=lambda response: float(len(response)))

    def length(response):
        return float(len(response))

    how = {
        "overrides": ["data.max_prompt_tokens=16"],
        "eval": {"success": 4.0, "sampling": {"max_tokens": 4}},  # nothing is trained: this alone has to fit
    }
    (line,) = whet.evaluate(run.run_dir / "export" / "main", data=ROWS[:2], rewards=length, **how)
    assert line["eval/eval/reward_mean"] == run.metrics[-1]["eval/eval/reward_mean"]
    assert (tmp_path / "runs" / "eval-main" / "bench" / "metrics.jsonl").is_file()
    with pytest.raises(ConfigError, match=r"300 reply tokens \(eval.sampling.max_tokens\)"):
        whet.evaluate(
            run.run_dir / "export" / "main",
            data=ROWS[:2],
            rewards=length,
            eval={"sampling": {"max_tokens": 300}},
        )
    with pytest.raises(ConfigError, match=r"is a model; to evaluate it, give data \(.*\) and rewards \("):
        whet.evaluate(run.run_dir / "export" / "main")

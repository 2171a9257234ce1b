"""Runs of several stages: what a later one cannot begin with is said before the first one trains, and what a stage has
taken is given back at its end."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationMixin

import whet
import whet.stages
from tiny import RUN
from whet.context import Context
from whet.job import Models
from whet.types import WhetError

ROOT = Path(__file__).parents[1]
ASYNC = {"schedule": "async"}
KL = {"kl": {"coef": 0.1}}
CORRECTED = {"correction": {"weight": {"name": "token", "high": 2.0}}}
HELD_OUT = {"eval": [{"path": "tests/data/held_out.jsonl"}]}
STOPPING = {"early_stopping": {"metric": "eval/nothing"}}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"algorithm": KL, "reference": {"path": "nowhere"}}, "reference.path=nowhere: no such folder"),
        ({"algorithm": {"name": "ppo"}, "critic": {"path": "nowhere"}}, "critic.path=nowhere: no such"),
        ({"train": {"trainable": {"nothing": False}}}, "train.trainable: 'nothing' occurs in no name"),
        ({"train": {"engine": "nowhere.py:Engine"}}, "train.engine .*nowhere.py:Engine': cannot load"),
        (
            {
                "rollout": ASYNC,
                "algorithm": CORRECTED,
                "buffer": {"replay": {"queue": True, "priority": "nowhere.py:best"}},
            },
            "buffer.replay.priority 'nowhere.py:best': cannot load",
        ),
        (
            {"data": HELD_OUT, "eval": {"interval": 1}, "train": STOPPING},
            "train.early_stopping.metric=eval/nothing: the evaluation has only eval/held_out/mean@1",
        ),
        (
            {
                "algorithm": {"name": "sft"},
                "data": HELD_OUT | {"overlong": "filter"},
                "eval": {"interval": 1},
                "train": STOPPING,
            },
            "metric=eval/nothing: the evaluation has only .*eval/held_out/loss_nats",
        ),
    ],
)
def test_what_a_later_stage_cannot_begin_with_is_said_before_the_first_trains(
    tmp_path: Path, stage: dict[str, Any], said: str
) -> None:
    sections = RUN | {"stages": [{"name": "first"}, {"name": "second", **stage}]}
    with pytest.raises(WhetError, match=said):
        whet.train(run_dir=str(tmp_path / "run"), **sections)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""


def test_the_reference_of_a_later_stage_may_be_what_an_earlier_one_exports(tmp_path: Path) -> None:
    run = tmp_path / "run"
    second = {"name": "second", "algorithm": KL, "reference": {"path": str(run / "export" / "first")}}
    sections = RUN | {"stages": [{"name": "first"}, second]}
    assert whet.train(run_dir=str(run), **sections).finished
    second["reference"] = {"path": str(run / "export" / "frist")}
    with pytest.raises(WhetError, match="frist: no such folder"):
        whet.train(run_dir=str(tmp_path / "run"), **sections, checkpoint={"resume": "fresh"})


def test_the_models_of_the_first_stage_are_checked_once_and_those_of_a_later_one_again_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    check = whet.stages.check_models

    def noted(context: Context, models: Models) -> None:
        checked.append(context.name)
        check(context, models)

    monkeypatch.setattr(whet.stages, "check_models", noted)
    sections = RUN | {"stages": [{"name": "first"}, {"name": "second"}]}
    assert whet.train(run_dir=str(tmp_path / "run"), **sections).finished
    assert checked == ["first", "second", "second"]


def test_the_copy_that_a_stage_samples_from_is_there_in_this_stage_alone(tmp_path: Path) -> None:
    """It is as large as the policy."""
    apart = {"rollout": {"sync_interval": 2}, "algorithm": CORRECTED}
    stages = [{"name": "before"}, {"name": "apart", **apart}, {"name": "after"}]
    given = RUN | {"stages": stages, "checkpoint": {"export": False}}
    found: dict[str, int] = {}

    def models() -> int:
        gc.collect()
        return sum(isinstance(each, GenerationMixin) for each in gc.get_objects())

    def count(row: dict[str, Any]) -> None:
        found[row["stage"]] = models() - before

    before = models()
    whet.train(run_dir=str(tmp_path / "run"), on_step=count, **given)
    assert found == {"before": 1, "apart": 2, "after": 1}

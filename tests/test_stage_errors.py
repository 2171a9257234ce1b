"""Errors of one stage of several begin with the stage, wherever they are found; the only stage is not named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import whet
from test_trinity import small
from tiny import RUN
from whet.config.faults import EachStage, of_stage
from whet.config.load import load
from whet.config.plan import plans
from whet.config.tree import merge
from whet.data.recognise import with_columns
from whet.types import CheckpointError, ConfigError, DataError, WhetError

ROOT = Path(__file__).parents[1]
STAGE = "stages[1] ('second')"
NO_COLUMN = {"train": [{"path": "tests/data/words.jsonl", "prompt": "nothing"}]}
NO_FILE = {"train": [{"path": "nothing.jsonl"}]}
OTHER_SOURCE = {"sources": {"other": {"temperature": 0.5}}}
NO_STEP = {"epochs": 0.001, "steps": None, "drop_last": "end"}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def refusal(run_dir: Path, sections: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        whet.train(run_dir=str(run_dir), **sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"data": NO_FILE}, "No such data file: nothing.jsonl"),
        ({"data": NO_COLUMN}, "line 1: no column 'nothing'"),
        ({"rewards": {"own": {"function": "nowhere.py:f"}}}, "reward 'own': function 'nowhere.py:f'"),
        (
            {"rollout": {"sampling": {"stop": ["<eos>"]}}},
            "rollout.sampling.stop: '<eos>' has the control token",
        ),
        ({"rewards": {"own": {"model": {"path": "nowhere"}}}}, "rewards.own.model: path=nowhere: no folder"),
        ({"train": NO_STEP}, "train.drop_last=end: "),
        ({"train": {"trainable": {"nothing": False}}}, "train.trainable: 'nothing' occurs in no name"),
        ({"rollout": OTHER_SOURCE}, "rollout.sources.other: no row of data.train has this source"),
        (
            {"algorithm": {"kl": {"coef": 0.1}}, "reference": {"path": "nowhere"}},
            "reference.path=nowhere: no such folder",
        ),
        (
            {
                "data": {"eval": [{"path": "tests/data/held_out.jsonl"}]},
                "eval": {"interval": 1},
                "train": {"early_stopping": {"metric": "eval/nothing"}},
            },
            "train.early_stopping.metric=eval/nothing",
        ),
    ],
)
def test_what_a_stage_cannot_begin_with_begins_with_the_stage(
    tmp_path: Path, stage: dict[str, Any], said: str
) -> None:
    several = {"stages": [{"name": "first"}, {"name": "second", **stage}]}
    told = refusal(tmp_path / "several", RUN | several)
    assert told.startswith(STAGE)
    assert said in told
    assert told.count("stages[1]") == told.count("; stages") + 1, "no problem names it twice"
    alone = refusal(tmp_path / "alone", merge(RUN, stage))
    assert said in alone
    assert "stages" not in alone


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ({"data": NO_FILE}, "No such data file: nothing.jsonl"),
        ({"data": NO_COLUMN}, "tests/data/words.jsonl, line 1: no column 'nothing'"),
        ({"rewards": {"own": {"function": "nowhere.py:f"}}}, "reward 'own': function 'nowhere.py:f'"),
        ({"rewards": {"own": {"model": {"path": "nowhere"}}}}, "rewards.own.model: path=nowhere: no folder"),
        ({"train": NO_STEP}, "train.drop_last=end: "),
        ({"train": {"trainable": {"nothing": False}}}, "train.trainable: 'nothing' occurs in no name"),
        ({"rollout": OTHER_SOURCE}, "rollout.sources.other: no row of data.train has this source"),
    ],
)
def test_what_all_stages_have_at_the_top_level_names_none(
    tmp_path: Path, shared: dict[str, Any], said: str
) -> None:
    several = {"stages": [{"name": "first"}, {"name": "second", "train": {"optimizer": {"lr": 1e-3}}}]}
    assert refusal(tmp_path, merge(RUN, shared) | several).startswith(said)


@pytest.mark.parametrize(
    ("found", "raised"),
    [
        ([DataError("rows: x"), DataError("rows: x")], "rows: x"),
        ([DataError("rows: x"), DataError("rows: y")], "stages[0] ('a'): rows: x"),
        ([DataError("rows: x"), None], "stages[0] ('a'): rows: x"),
        ([DataError("rows: x")], "stages[0] ('a'): rows: x"),
        ([None, DataError("rows: x")], "stages[1] ('b'): rows: x"),
        ([DataError("rows: x"), CheckpointError("z")], "stages[0] ('a'): rows: x"),
    ],
)
def test_all_stages_have_to_be_looked_at_and_to_have_the_same_error(
    found: list[WhetError | None], raised: str
) -> None:
    def look() -> None:
        with EachStage(("a", "b")) as stage:
            for n, error in enumerate(found):
                with stage(n):
                    if error is not None:
                        raise error

    with pytest.raises(WhetError) as caught:
        look()
    assert str(caught.value) == raised


def test_of_the_first_stage_too(tmp_path: Path) -> None:
    stages = [{"name": "first", "train": {"trainable": {"nothing": False}}}, {"name": "second"}]
    told = refusal(tmp_path, RUN | {"stages": stages})
    assert told.startswith("stages[0] ('first'): train.trainable: ")


def test_a_stage_without_steps_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    stages = "stages:\n- name: first\n  train: {steps: 1}\n- name: second\n  train:\n    steps: 0\n"
    file.write_text(yaml.safe_dump(RUN | {"train": {"tasks_per_step": 4}}) + stages)
    at = next(n for n, line in enumerate(file.read_text().splitlines(), 1) if "steps: 0" in line)
    with pytest.raises(ConfigError) as caught:
        plans(load(file))
    assert f"  {file}:{at}: {STAGE}.train.steps: got 0, so nothing is trained" in str(caught.value)
    with pytest.raises(ConfigError, match=r"\n  .*: train\.steps: got 0"):
        plans(load(file, ["stages.first.train.steps=0"]))


def test_the_number_of_steps_of_a_stage_in_a_plan() -> None:
    stages = [{"name": "first"}, {"name": "second", "train": NO_STEP}]
    with pytest.raises(ConfigError) as caught:
        plans(load(None, (), RUN | {"stages": stages}), rows={"second": 100})
    assert str(caught.value).startswith(f"{STAGE}: train.drop_last=end: 100 rows")


def test_foreign_stages_keep_their_place_and_keys(tmp_path: Path) -> None:
    """Trinity-RFT's. What is refused in a run of theirs names the key of the file that it comes from."""
    stages: list[dict[str, Any]] = [{"stage_name": "first"}, {"stage_name": "second"}]
    tree, file = small(mode="both"), tmp_path / "t.yaml"
    tree["buffer"]["explorer_input"]["taskset"]["path"] = "tests/data/words.jsonl"
    file.write_text(yaml.safe_dump(tree | {"stages": stages}))
    with pytest.raises(ConfigError) as caught:
        plans(load(file, ["whet.stages.second.train.steps=0"]))
    override = "override stages.second.train.steps=0"
    assert f"  {override}: {STAGE}.train.steps: got 0, so nothing" in str(caught.value)
    stages[1]["buffer"] = {"explorer_input": {"taskset": {"path": "nothing.jsonl"}}}
    file.write_text(yaml.safe_dump(tree | {"stages": stages}))
    with pytest.raises(DataError) as lost:
        with_columns(load(file))
    assert str(lost.value).startswith(f"{STAGE}: No such data file: nothing.jsonl")
    stages[1]["trainer"] = {"total_steps": 0}
    file.write_text(yaml.safe_dump(tree | {"stages": stages}))
    with pytest.raises(ConfigError) as caught:
        plans(load(file))
    assert "stages[1].trainer.total_steps: got 0, expected" in str(caught.value)
    assert str(caught.value).count("stages[1]") == 1


@pytest.mark.parametrize("kind", [ConfigError, DataError])
@pytest.mark.parametrize("told", ["stages[1].data: x", "stages.b.data: x", "step 1 of stage 'b': x"])
def test_a_stage_is_named_once(kind: type[WhetError], told: str) -> None:
    with pytest.raises(kind) as caught, of_stage(("a", "b"), 1), of_stage(("a", "b"), 1):
        raise kind(told)
    assert str(caught.value) == told
    with pytest.raises(kind) as caught, of_stage(("a", "b"), 1), of_stage(("a", "b"), 1):
        raise kind("data: x")
    assert str(caught.value) == "stages[1] ('b'): data: x"


def test_errors_that_are_of_no_stage_are_left_as_they_are() -> None:
    for error in (CheckpointError("x"), WhetError("x"), ValueError("x")):
        with pytest.raises(type(error)) as caught, of_stage(("a", "b"), 1):
            raise error
        assert str(caught.value) == "x"

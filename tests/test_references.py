"""Several references: each rollout is scored by its own, and by no other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whet
from test_learning import ROOT, SETUP, learn, share_of_a
from test_train_torch import random_groups
from tiny import RUN, tiny_model
from whet.batch import Batch, pack, select, tokens_of
from whet.config.load import load
from whet.config.memory import largest
from whet.config.memory_estimate import phases
from whet.config.plan import plans
from whet.config.schema import ReferenceConfig
from whet.models import kernels
from whet.trained_models import ReferenceChoice, reference_logprobs
from whet.training.engine import Want
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError, DataError, Group

WORDS = str(ROOT / "tests/data/words.jsonl")
OPS = kernels.load("auto")
TWO = ReferenceConfig.model_validate_json(
    '{"models": [{"path": "a", "values": ["even", "both"]}, {"path": "b", "values": ["odd"]}]}'
)


class Reference(TorchEngine):
    """One that keeps what it was asked."""

    def __init__(self, seed: int, cut: MicroBatchPolicy) -> None:
        super().__init__(tiny_model(seed=seed), OPS, cut=cut)
        self.asked: list[Batch] = []

    def forward(self, batch: Batch, want: Want) -> Tensor:
        self.asked.append(batch)
        return super().forward(batch, want)


def teachers(**cut: Any) -> list[Reference]:
    return [Reference(seed, MicroBatchPolicy(**cut)) for seed in (3, 4)]


def labelled(groups: Sequence[Group], labels: Sequence[str], column: str | None = None) -> list[Group]:
    """The groups with these labels of their tasks, taken in turn."""
    out = []
    for n, group in enumerate(groups):
        label = labels[n % len(labels)]
        told: dict[str, Any] = {"source": label} if column is None else {"extra": {column: label}}
        task = replace(group.task, **told)
        out.append(Group(task, tuple(replace(r, task=task) for r in group.rollouts)))
    return out


NAMED: dict[str, Any] = {
    **RUN,
    "data": {"max_prompt_tokens": 8, "train": [{"path": WORDS, "name": "x"}]},
    "algorithm": {"kl": {"coef": 0.1}},
    "reference": {"models": [{"path": "a", "values": ["x"]}, {"path": "b", "values": ["y"]}]},
}


GIVEN = ("algorithm.kl={}", "rewards={}", "rollout={sampling: {max_tokens: 4}}")


def chosen(groups: Sequence[Group], cfg: ReferenceConfig = TWO) -> Batch:
    return replace(pack(groups), reference_R=ReferenceChoice.of(cfg)(groups))


def test_each_rollout_has_the_log_probs_of_its_own_reference_alone() -> None:
    batch = chosen(labelled(random_groups(count=5, strands=True), ["even", "odd"]))
    assert batch.reference_R is not None
    assert batch.reference_R.tolist() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3 + [0] * 3
    engines = teachers()
    found = reference_logprobs(engines, batch)
    whole = [engine.forward(batch, "logprobs") for engine in teachers()]
    assert not torch.equal(whole[0], whole[1])
    mine = batch.reference_R[batch.rollout_N]
    assert torch.equal(found, torch.where(mine == 0, whole[0], whole[1]))
    assert [len(engine.asked) for engine in engines] == [1, 1]
    seen = [engine.asked[0].rollouts for engine in engines]
    assert seen == [9, 6], "no rollout is computed twice"
    for number, engine in enumerate(teachers()):  # as two runs with one teacher, on the parts
        rows = (batch.reference_R == number).nonzero().flatten()
        part = replace(select(batch, rows), reference_R=None)
        assert torch.equal(reference_logprobs([engine], part), found[tokens_of(batch, rows)])


def test_neither_order_nor_micro_batches_change_the_log_probs() -> None:
    groups = labelled(random_groups(count=6), ["even", "odd", "both"])
    batch = chosen(groups)
    found = reference_logprobs(teachers(), batch)
    assert torch.equal(reference_logprobs(teachers(max_tokens=20), batch), found)
    turned = chosen(groups[::-1])
    other = reference_logprobs(teachers(max_rollouts=1, max_tokens=None), turned)
    for group in range(6):
        rows = (batch.group_R == group).nonzero().flatten()
        theirs = (turned.group_R == 5 - group).nonzero().flatten()
        assert torch.equal(found[tokens_of(batch, rows)], other[tokens_of(turned, theirs)])


def test_a_reference_without_rollouts_is_not_asked() -> None:
    engines = teachers()
    reference_logprobs(engines, chosen(labelled(random_groups(count=2), ["odd"])))
    assert [len(engine.asked) for engine in engines] == [0, 1]


def test_the_label_is_the_source_of_the_task_or_a_column() -> None:
    column = TWO.model_copy(update={"column": "teacher"})
    groups = labelled(random_groups(count=2), ["odd", "even"], column="teacher")
    assert ReferenceChoice.of(column)(groups).tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.raises(DataError, match=r"A task of source 's'.*its source is 's'.*'even', 'both', 'odd'"):
        ReferenceChoice.of(TWO)(random_groups(count=2)[1:])
    with pytest.raises(DataError, match="its column 'teacher' is None"):
        ReferenceChoice.of(column)(random_groups(count=1))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reference.path=c"], "reference.path: c: the references are those of reference.models"),
        (["reference.reset_interval=1"], "replace every one of reference.models"),
        (["algorithm.kl.estimator=full"], "reads the output layer of one reference"),
        (["algorithm.name=dpo", *GIVEN], "several references score rollouts"),
        (["reference.models.1.values=[x]"], "'x' is a value of several models"),
        (["reference.models.1.values=[]"], "is empty"),
        (["data.train.0.name=z"], "'z' is a value of no model of reference.models"),
        (["reference.models=[]", "reference.column=teacher"], "reference.models is empty"),
    ],
)
def test_what_does_not_go_with_several_references_is_refused(overrides: list[str], said: str) -> None:
    plans(load(None, [], NAMED))
    with pytest.raises(ConfigError) as e:
        plans(load(None, overrides, NAMED))
    assert said in str(e.value)


def test_the_plan_counts_every_reference() -> None:
    (two,) = plans(load(None, [], NAMED))
    (one,) = plans(load(None, [], {**NAMED, "reference": {"path": "a"}}))
    assert two.references == ("reference-1", "reference-2")
    assert two.memory["reference-1"] == two.memory["reference-2"] == one.memory["reference"]
    assert largest(phases(two)).total > largest(phases(one)).total
    assert not two.reference_saved
    assert two.checkpoint_bytes == one.checkpoint_bytes


# ---------------------------------------------------------------- runs

ROWS = [{"prompt": f"{a}{b}>", "answer": a, "teacher": "ab"[n % 2]} for n, (a, b) in enumerate(
    zip("abcdefgh", "hgfedcba", strict=True)
)]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two teachers with the tokenizer of the runs."""
    found = []
    for seed in (1, 2):
        at = tmp_path_factory.mktemp(f"teacher-{seed}")
        export = {"interval": 0, "export": True}
        train = {"steps": 1, "tasks_per_step": 4, "optimizer": {"lr": 0.05}}
        learn(at, {"name": "grpo"}, checkpoint=export, seed=seed, train=train, data=rows())
        found.append(str(next((at / "run").glob("export/*/config.json")).parent))
    return found[0], found[1]


def rows() -> dict[str, Any]:
    return {"max_prompt_tokens": 8, "train": [{"rows": ROWS}]}


def student(at: Path, reference: dict[str, Any], steps: int = 2, **sections: Any) -> Any:
    values = {
        **SETUP,
        "data": rows(),
        "algorithm": {"name": "distill"},
        "rollout": {"group_size": 2, "sampling": {"max_tokens": 5, "ignore_eos": True}},
        "reference": reference,
    }
    train = {"steps": steps, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}, **sections.pop("train", {})}
    return whet.train(rewards=share_of_a, run_dir=str(at), **{**values, "train": train, **sections})


def both(folders: tuple[str, str]) -> dict[str, Any]:
    models = [{"path": path, "values": [value]} for path, value in zip(folders, "ab", strict=True)]
    return {"models": models, "column": "teacher"}


def advantages(result: Any) -> dict[tuple[int, int], float]:
    """Of the first step, by task and rollout."""
    table = result.rollouts(step=1).to_pylist()
    return {(row["uid"], row["index"]): row["advantage"] for row in table}


def test_a_rollout_learns_from_its_teacher_as_in_a_run_with_that_teacher_alone(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    mixed = student(tmp_path / "both", both(folders))
    alone = [student(tmp_path / name, {"path": path}) for name, path in zip("ab", folders, strict=True)]
    teacher = {str(row["answer"]): "ab".index(row["teacher"]) for row in ROWS}
    of = {row["uid"]: teacher[json.loads(row["answer"])] for row in mixed.rollouts(step=1).to_pylist()}
    assert set(of.values()) == {0, 1}
    found, expected = advantages(mixed), [advantages(each) for each in alone]
    assert found.keys() == expected[0].keys() == expected[1].keys()
    assert all(found[key] == expected[of[key[0]]][key] for key in found)
    assert any(expected[0][key] != expected[1][key] for key in found)


def test_a_stopped_run_goes_on_with_its_teachers(tmp_path: Path, folders: tuple[str, str]) -> None:
    checkpoint = {"checkpoint": {"interval": 1, "export": False}}
    student(tmp_path / "whole", both(folders), 3, **checkpoint)
    for steps in (1, 3):
        student(tmp_path / "parted", both(folders), steps, **checkpoint)
    one, other = (tmp_path / name / "metrics.jsonl" for name in ("whole", "parted"))
    assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / "whole").glob("checkpoints/*/reference*")), "they are read from their folders"


@pytest.mark.parametrize(
    "apart",
    [
        pytest.param(False, id="with the policy", marks=pytest.mark.sweep),
        pytest.param(True, id="separate_ranks"),
    ],
)
def test_ranks_hold_every_teacher(tmp_path: Path, folders: tuple[str, str], apart: bool) -> None:
    here = student(tmp_path / "here", both(folders), 1)
    parallel = {"dp_shard": 2, "separate_ranks": ["reference"] if apart else []}
    there = student(tmp_path / "ranks", both(folders), 1, train={"parallel": parallel})
    found, expected = advantages(there), advantages(here)
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], abs=1e-4) for key in found)


def test_a_task_without_a_teacher_stops_the_run_by_its_name(tmp_path: Path, folders: tuple[str, str]) -> None:
    models = both(folders) | {"column": "school"}
    with pytest.raises(DataError, match="has no reference: its column 'school' is None"):
        student(tmp_path, models)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("reference.path", ["reference={path: nowhere, models: []}"]),
        ("reference.models.path", ["reference={models: [{path: nowhere, values: [x]}]}"]),
        ("critic.path", ["reference={models: []}", "algorithm={name: ppo}", "critic.path=nowhere"]),
    ],
)
def test_a_folder_that_is_none_is_named_by_its_own_key(
    tmp_path: Path, key: str, overrides: list[str]
) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}=nowhere: no such folder"):
        whet.train(overrides=[f"run_dir={tmp_path}", *overrides], **NAMED)


def test_what_is_put_over_the_config_of_a_reference_is_named_by_its_own_key(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    own = f"reference={{models: [], path: {folders[0]}, overrides: {{no_such: 1}}}}"
    with pytest.raises(ConfigError, match=r"^reference\.overrides: no_such is not a key"):
        whet.train(overrides=[f"run_dir={tmp_path}", own], **NAMED)

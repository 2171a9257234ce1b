"""Whole runs of policies with layers of multi-token prediction: on one process and on ranks, resumed, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import whet
from tiny import RUN
from whet.export import export_checkpoint
from whet.types import CheckpointError, ConfigError, Json

ROOT = Path(__file__).parents[1]
CONFIG = RUN | {"checkpoint": {"interval": 1, "keep": None}, "reward_workers": {"count": 1}}
MTP = "model.mtp={layers: 2, coef: 0.5}"
ALONE = "model.mtp={layers: 2, coef: 0.5, detach: model}"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(run_dir: Path, *overrides: str, **more: Any) -> Path:
    whet.train(overrides=[f"run_dir={run_dir}", *overrides], **{**CONFIG, **more})
    return run_dir


def metrics(run_dir: Path) -> list[Json]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def column(run_dir: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(run_dir) if name in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return run(tmp_path_factory.mktemp("finished") / "run", MTP)


def test_layers_that_learn_alone_leave_the_run_as_it_is(tmp_path: Path) -> None:
    """Rewards, samples and weights of the policy; but for skipped rollouts, which a policy without layers need not
    compute, and for clipping by the norm of all gradients."""
    same = ("train.skip_zero_weight=false", "train.optimizer.max_grad_norm=null")
    plain, more = run(tmp_path / "plain", *same), run(tmp_path / "more", ALONE, *same)
    for name in ("reward/mean", "train/loss", "train/entropy_nats", "rollout/tokens_mean"):
        assert column(plain, name) == column(more, name)
    own, other = (
        load_file(next(each.glob("checkpoints/*3/policy/model.safetensors"))) for each in (plain, more)
    )
    assert own.keys() < other.keys()
    assert all(torch.equal(own[n], other[n]) for n in own)


def test_every_rollout_teaches_the_layers(finished: Path) -> None:
    """Those without advantage, too."""
    assert len(column(finished, "train/mtp_loss")) == 3
    assert not column(finished, "train/skipped_rollouts_frac")
    assert any(
        "model.mtp is a term over all tokens" in line
        for line in (finished / "run.log").read_text().splitlines()
    )


def test_a_run_that_goes_on_is_the_run(finished: Path, tmp_path: Path) -> None:
    begun = run(tmp_path / "run", MTP, "train.steps=2")
    run(begun, MTP)
    assert column(begun, "train/mtp_loss") == column(finished, "train/mtp_loss")
    ends = [
        next(each.glob("checkpoints/*3/policy/model.safetensors")).read_bytes() for each in (begun, finished)
    ]
    assert ends[0] == ends[1]


def test_other_layers_are_no_change_for_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises((CheckpointError, ConfigError), match=r"model\.mtp"):
        run(tmp_path / "run", "model.mtp={layers: 1}", "train.steps=4")


def test_ranks_learn_the_same(finished: Path, tmp_path: Path) -> None:
    many = run(tmp_path / "run", MTP, "train.parallel.dp_shard=2")
    for name in ("train/mtp_loss", "train/grad_norm", "reward/mean"):
        assert column(many, name) == pytest.approx(column(finished, name), rel=1e-4)


def test_an_export_has_the_layers(finished: Path, tmp_path: Path) -> None:
    folder = Path(export_checkpoint(str(finished), to=str(tmp_path / "out")))
    found = load_file(folder / "model.safetensors")
    kept = load_file(next(finished.glob("checkpoints/*3/policy/model.safetensors")))
    assert all(torch.equal(found[name], x) for name, x in kept.items())
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], found["model.embed_tokens.weight"])


def test_a_run_from_such_a_folder_trains_or_keeps_its_layers(finished: Path, tmp_path: Path) -> None:
    start = export_checkpoint(str(finished), to=str(tmp_path / "start"))
    of = {"model": {"path": start}, "tokenizer": {}}
    ends = []
    for name, said in (("kept", ()), ("trained", ("model.mtp=distill",))):
        done = run(tmp_path / name, "checkpoint.export=true", "train.steps=1", *said, **of)
        ends.append(load_file(next(done.glob("export/*/model.safetensors"))))
    before = load_file(Path(start) / "model.safetensors")
    layer = "model.layers.1.eh_proj.weight"
    assert torch.equal(ends[0][layer], before[layer])
    assert not torch.equal(ends[1][layer], before[layer])
    assert ends[0].keys() == ends[1].keys() == before.keys()
    assert not torch.equal(ends[0]["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_fine_tuning_teaches_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{n}", "response": "abcabcab"}) for n in range(8)))
    done = run(
        tmp_path / "run",
        MTP,
        "algorithm.name=sft",
        "train.steps=12",
        "train.optimizer.lr=0.02",
        rewards={},
        rollout={"sampling": {"max_tokens": 10}},
        data={"max_prompt_tokens": 8, "train": [{"path": str(rows)}]},
        checkpoint={"interval": 0},
        reward_workers={},
    )
    told = column(done, "train/mtp_loss")
    assert told[-1] < 0.5 * told[0]


def test_critics_and_references_have_none(tmp_path: Path) -> None:
    done = run(tmp_path / "run", MTP, "algorithm.name=ppo", "algorithm.kl.coef=0.1", "train.steps=2")
    critic = load_file(next(done.glob("checkpoints/*2/critic/model.safetensors")))
    assert not [name for name in critic if "eh_proj" in name]
    assert len(column(done, "train/mtp_loss")) == 2

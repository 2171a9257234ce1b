"""Runs whose training is spread over ranks."""

from __future__ import annotations

import filecmp
import json
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import whet.placement
import whet.stages
from forked import Started
from test_lanes import picture
from tiny import LETTERS
from whet.api import train
from whet.config import checks_parallel
from whet.config.load import load
from whet.config.plan import plan
from whet.config.sections.parallel import ParallelConfig
from whet.track import time_report
from whet.track.timeline import read
from whet.training.ranks import Ranks
from whet.types import ConfigError, Json, WhetError

BASE: Json = {
    **LETTERS,
    "algorithm": {"name": "ppo", "kl": {"coef": 0.01}},
    "critic": {"optimizer": {"lr": 1e-3}},
    "train": {"steps": 4, "tasks_per_step": 4, "minibatches": 2, "optimizer": {"lr": 1e-3}},
    "checkpoint": {"interval": 1},
}  # fmt: skip


def given(*overrides: str) -> Any:
    return load(None, overrides, BASE)


def asked(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Any]:
    """What ranks a config starts."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(whet.placement, "Ranks", lambda dims, **how: seen.update({"dims": dims, **how}))
    display: Any = SimpleNamespace(phase=lambda what: None)
    models: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), rank_lines=None)
    cfg = given(*overrides).stages[0]
    whet.placement.open_ranks(models, cfg, plan(cfg), display)
    return seen


def test_one_process_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch) == {}


@pytest.mark.parametrize(
    "override",
    [
        "dp_replicate=4", "dp_shard=4", "tp=2", "cp=2", "pp=2", "reshard_after_forward=false",
        "wrap_min_num_params=100", "prefetch=2", "timeout_s=5", "separate_ranks=[critic]",
    ],
)  # fmt: skip
def test_each_key_changes_what_is_started(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    without = asked(monkeypatch, "train.parallel.dp_shard=2")
    assert without["dims"].world == 2
    assert asked(monkeypatch, "train.parallel.dp_shard=2", f"train.parallel.{override}") != without


def test_experts_and_parts_of_a_pipeline_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = (
        "model.scratch.name=qwen3_moe",
        "model.scratch.num_experts=4",
        "train.parallel.dp_shard=2",
    )
    assert asked(monkeypatch, *mixture)["dims"].ep == 1
    assert asked(monkeypatch, *mixture, "train.parallel.ep=2")["dims"].ep == 2
    seen: list[int] = []
    monkeypatch.setattr(whet.placement, "RankGroup", lambda *args, chunks, **how: seen.append(chunks))
    for chunks in (1, 2):
        cfg = given(
            "model.scratch.num_hidden_layers=4",
            "train.parallel.pp=2",
            f"train.parallel.pipeline_chunks={chunks}",
        )
        models: Any = SimpleNamespace(engine=None, sampler=None)
        start: Any = SimpleNamespace(model=None, weights=None)
        whet.placement.engine_of(models, cfg.stages[0], "policy", start, ranks={"policy": True})  # type: ignore[dict-item]
    assert seen == [1, 2]


def test_all_gpus_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_parallel, "cuda_count", lambda: 8)
    p = ParallelConfig(dp_shard=-1, tp=2)
    assert (checks_parallel.shards(p), checks_parallel.world(p)) == (4, 8)
    cfg = given("train.parallel.dp_shard=-1", "train.parallel.tp=3").stages[0]
    told = dict(checks_parallel.problems(cfg))
    assert "does not divide the 8 GPUs" in told["train.parallel.dp_shard"]
    cfg = given("train.parallel.dp_shard=-1", "machine.device=cpu").stages[0]
    assert "trains on the CPU" in dict(checks_parallel.problems(cfg))["train.parallel.dp_shard"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["train.parallel.pp=2", "train.parallel.pipeline_chunks=2"],
            "the 2 layers of the model cannot be split into 4 parts",
        ),
        (["train.parallel.pipeline_chunks=2"], "there is no pipeline"),
        (
            ["train.parallel.pp=2", "model.scratch.name=mimo"],
            r"parallel.pp: a pipeline cannot be made of the layers of mimo \(model_type\), only of gemma, gpt_oss,",
        ),
        (["train.parallel.ep=2"], "2 does not divide dp_shard=1"),
        (["train.parallel.tp=4"], r"parallel.tp: 4 does not divide the 2 attention heads of the model"),
        (["train.parallel.cp=3"], r"parallel.cp: 3 does not divide the 2 attention heads of the model"),
        (
            ["train.parallel.tp=2", "train.parallel.cp=2"],
            "cp: 2 does not divide the 1 .* tp=2 leaves each rank",
        ),
        (
            ["train.parallel.tp=2", "model.scratch.num_key_value_heads=1"],
            "2 does not divide the 1 key/value heads",
        ),
        (
            ["train.parallel.tp=2", "model.scratch.intermediate_size=49"],
            "2 does not divide the 49 columns of the gated layers",
        ),
        (
            ["train.parallel.dp_shard=2", "train.parallel.ep=2"],
            "has no experts|model's 0 experts; set it to 1",
        ),
        (["train.parallel.dp_shard=-1"], "trains on the CPU; give the number of ranks"),
        (["train.parallel.dp_shard=0"], "0: expected at least 1"),
        (["train.parallel.dp_replicate=16"], "16 ranks would share the 8 rollouts"),
        (["train.parallel.dp_replicate=2", "machine.logprob_parity=on"], "measured, not proved"),
        (["train.parallel.dp_replicate=2", "train.parallel.prefetch=2"], "no tensor is sharded"),
        (["train.parallel.timeout_s=5"], "no ranks"),
        (
            ["train.parallel.dp_shard=2", "train.parallel.ep=2", "train.compile=true"],
            "not tested with expert parallelism",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], said: str) -> None:
    from whet.config.plan import plans

    with pytest.raises(ConfigError, match=said):
        plans(given(*overrides))


def test_the_families_of_pipelines_are_those_of_our_layers() -> None:
    from whet.models.fused_forward import FAMILIES

    assert set(checks_parallel.PIPELINES) == set(FAMILIES)


@pytest.mark.parametrize("where", ["open_weights", "Weights.begin"])
def test_ranks_end_where_their_stage_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A program that has called `whet.train` goes on, and has their memory back."""
    started: list[Ranks] = []

    def noted(*given: Any) -> dict[str, Ranks]:
        found = whet.placement.open_ranks(*given)
        started.extend(found.values())
        return found

    def broken(*given: Any, **more: Any) -> None:
        raise WhetError("no weights today")

    monkeypatch.setattr(whet.stages, "open_ranks", noted)
    monkeypatch.setattr(f"whet.stages.{where}", broken)
    with pytest.raises(WhetError, match="no weights today"):
        train(overrides=[f"run_dir={tmp_path / 'run'}", "train.parallel.dp_shard=2"], **BASE)
    (ranks,) = started
    assert all(line.gone() for line in ranks.lines.lines)


def start(run_dir: Path) -> Started:
    path = run_dir.parent / "config.json"
    path.write_text(json.dumps(BASE))
    log = run_dir.parent / f"{run_dir.name}.log"
    words = ["train", str(path), f"run_dir={run_dir}", "train.parallel.dp_shard=2"]
    return Started(*words, said=log)


def test_a_killed_run_on_ranks_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(overrides=[f"run_dir={whole}", "train.parallel.dp_shard=2"], **BASE)
    process = start(broken)
    until = time.monotonic() + 240
    while not list(broken.glob("checkpoints/*-000002")):
        assert process.poll() is None, (tmp_path / "broken.log").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train(overrides=[f"run_dir={broken}", "train.parallel.dp_shard=2"], **BASE)
    same = ["metrics.jsonl", "export/main/model.safetensors"]
    last = "checkpoints/0-main-000004"
    same += [
        f"{last}/{role}/{f}.safetensors" for role in ("policy", "critic") for f in ("model", "optimizer")
    ]
    _, different, missing = filecmp.cmpfiles(whole, broken, same, shallow=False)
    assert (different, missing) == ([], [])
    check_lanes(whole, broken)


def check_lanes(whole: Path, broken: Path) -> None:
    """Each rank has told what it did; of the killed run's first start what its steps wrote is there."""
    drawn = picture(whole / "timeline.json")
    assert sorted(drawn) == ["rank 0", "rank 1"]
    for spans in drawn.values():
        pieces: Counter[tuple[str, str]] = Counter()
        for s in spans:
            pieces[s.kind, s.name] += s.pieces
        assert {s.step for s in spans if s.name == "policy update"} == {1, 2, 3, 4}
        for work, count in (
            ("policy update", 8), ("critic update", 8), ("policy forward logprobs", 4), ("critic forward values", 4),
            ("reference forward logprobs", 4),
        ):  # fmt: skip
            assert pieces["work", work] == count, work
        assert pieces["work", "policy gather weights"] >= 4
        assert pieces["part", "policy optimizer step"] == 8
        assert pieces["wait", "wait for a command"] > 0
        assert not any("micro-batch" in name for _, name in pieces)
    resumed = picture(broken / "timeline.json")
    assert {s.process for s in resumed["rank 1"]} == {1, 2}
    updates = [(s.step, s.pieces) for s in resumed["rank 1"] if s.name == "policy update"]
    assert {step for step, _ in updates} == {1, 2, 3, 4}
    assert sum(pieces for _, pieces in updates) == 8, "no step is there twice"
    (stage,) = time_report.measure(read(whole / "timeline.json"))
    assert [p.name for p in stage.processes] == ["driver", "rank 0", "rank 1"]
    assert all(0 < p.busy < 1 and len(p.steps) == 4 for p in stage.processes)

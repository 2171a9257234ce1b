"""`whet replay`: a recorded step, computed again, is equal in every bit; a changed bit of the record is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import whet
from recorded import copied, digest, edit, edit_metric, flipped, sampled, trained
from test_journal_runs import drawn, tree_in
from test_quantised import NEEDS
from whet import cli
from whet.envs.env import EnvBroken
from whet.replay import logprobs, view
from whet.replay.run import Replayed, replay
from whet.replay.steps import BEGINNING, Recorded, read, stage_of
from whet.types import CheckpointError, ConfigError

PAIRS = [{"prompt": f"ab{c}", "response": f"{c}ba", "rejected": "zz", "answer": c} for c in "cdefghij"]


def again(run_dir: Path, step: int, stage: int = 0, **how: Any) -> Replayed:
    recorded = read(run_dir)
    return replay(recorded, recorded.step(stage, step, play=how.get("play", False)), **how)


def odd(found: Replayed) -> dict[str, Any]:
    """The columns that differ, with their first difference."""
    return {each.field: each.first for each in found.compared if each.differing}


def called(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


@pytest.fixture(scope="module")
def rl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO with a reference; its policy moves within each step: two epochs of two minibatches."""
    return trained(
        tmp_path_factory.mktemp("rl") / "run",
        algorithm={"name": "grpo", "kl": {"coef": 0.05}},
        train={
            "steps": 4,
            "tasks_per_step": 4,
            "minibatches": 2,
            "update_epochs": 2,
            "optimizer": {"lr": 0.02},
        },
        track={"trackers": ["jsonl"], "batches_interval": 2},
    )


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SFT, DPO, PPO with a critic, overlapped sampling, and weights that are synced every second step."""
    own = {"steps": 4, "tasks_per_step": 4, "optimizer": {"lr": 0.01}}
    pairs = {"train": [{"rows": PAIRS, "name": "pairs"}], "chat": False}
    ahead = {"correction": {"weight": {"name": "token", "high": 2.0}}}
    return trained(
        tmp_path_factory.mktemp("stages") / "run",
        train=own,
        stages=[
            {"name": "sft", "algorithm": {"name": "sft"}, "data": {**pairs, "max_prompt_tokens": 8}},
            {"name": "dpo", "algorithm": {"name": "dpo"}, "data": {**pairs, "max_prompt_tokens": 8}},
            {"name": "ppo", "algorithm": {"name": "ppo", "reward_kl": {"coef": 0.02}}, "train": {"minibatches": 2}},
            {"name": "ahead", "algorithm": {"name": "grpo", **ahead}, "rollout": {"max_staleness": 1}},
            {"name": "stale", "algorithm": {"name": "grpo", **ahead}, "rollout": {"sync_interval": 2}},
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Agents whose tools answer at random; returns their folder."""
    folder = tmp_path_factory.mktemp("agents")
    tree = tree_in(folder)
    tree["train"]["steps"] = 3
    del tree["data"]["eval"], tree["data"]["exclude_eval"], tree["eval"]
    assert whet.train(**tree).finished
    return folder


# ---------------------------------------------------------------- equal


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_each_step_comes_again(rl: Path, step: int) -> None:
    before = digest(rl)
    found = again(rl, step)
    assert odd(found) == {}
    assert found.equal
    counts = {each.field: each.count for each in found.compared}
    tokens = sum(len(row["token_ids"]) for row in found.recorded)
    assert counts["rollouts/rollouts"] == 8
    assert counts["rollouts/token_ids"] == tokens
    assert counts["rollouts/logprobs"] == sum(sum(row["mask"]) for row in found.recorded)
    assert ("batches/update_2/loss_N" in counts) == (step % 2 == 0)
    assert found.step.forward == (1 if step in (1, 3) else 2)
    assert digest(rl) == before


@pytest.mark.parametrize("name", ["sft", "dpo", "ppo", "ahead", "stale"])
def test_every_kind_of_stage(stages: Path, name: str) -> None:
    before, recorded = digest(stages), read(stages)
    stage = recorded.names.index(name)
    for step in (1, 4):
        found = replay(recorded, recorded.step(stage, step))
        assert odd(found) == {}
        losses = [row["update_1/loss_N"] for row in found.batch]
        assert any(x for row in losses if row for x in row)
        assert found.compared[-1].field == "metrics"
        assert found.compared[-1].count > 20
    assert digest(stages) == before


def test_lora_dropout_and_a_record_elsewhere(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run",
        model={"lora": {"rank": 2, "dropout": 0.5}},
        dirs={"rollouts": str(tmp_path / "rollouts"), "checkpoints": str(tmp_path / "saved")},
        track={"trackers": ["jsonl"]},
        checkpoint={"interval": 2, "keep": 1, "export": False},
    )
    before = digest(tmp_path)
    assert again(run, 3).equal
    assert digest(tmp_path) == before


# ---------------------------------------------------------------- the terms of the loss


def test_the_terms_are_those_that_were_trained_on(rl: Path) -> None:
    """The loss of each optimizer step is the sum of loss * weight; ratio, KL and clip by their definitions."""
    found = again(rl, 2)
    clipped = 0
    losses = [0.0] * 4
    for row in found.batch:
        assert row["logp_N"] == row["logp_sample_N"]  # the log-prob match is exact
        for epoch in ("update_1", "update_2"):
            if row[f"{epoch}/loss_N"] is None or row[f"{epoch}/loss_N"][-1] is None:
                continue
            number = row[f"{epoch}/optimizer_step_R"] - 1
            assert number // 2 == int(epoch[-1]) - 1
            columns = (
                row[f"{epoch}/{n}_N"]
                for n in ("logp", "ratio", "loss", "weight", "kl_loss_nats", "clip_frac")
            )
            old, ref, advantage = row["logp_old_N"], row["logp_ref_N"], row["adv_N"]
            for n, (logp, ratio, loss, weight, kl, clip) in enumerate(zip(*columns)):
                losses[number] += loss * weight
                if not row["mask_N"][n]:
                    continue
                assert ratio == pytest.approx(math.exp(logp - old[n]), rel=1e-5)
                gap = ref[n] - logp
                assert kl == pytest.approx(math.exp(gap) - gap - 1, abs=1e-5)
                bound = min(max(ratio, 0.8), 1.2)
                surrogate = max(-advantage[n] * ratio, -advantage[n] * bound)
                assert loss == pytest.approx(surrogate + 0.05 * kl, abs=1e-5)
                assert clip == float(surrogate > -advantage[n] * ratio)
                clipped += clip
    assert clipped > 0
    assert sum(losses) / 4 == pytest.approx(found.numbers["train/loss"], rel=1e-5, abs=1e-7)


def test_terms_of_a_mix_stand_at_their_rollouts(tmp_path: Path) -> None:
    """In the first optimizer step the policy is that before the step: so are its log-probs, rollout by rollout."""
    run = trained(
        tmp_path / "run",
        algorithm={"name": "mix"},
        train={"steps": 2, "tasks_per_step": 4, "minibatches": 2, "optimizer": {"lr": 0.05}},
        data={"demonstrations": [{"rows": PAIRS, "name": "pairs"}]},
    )
    found = again(run, 2)
    assert found.equal
    first = [row for row in found.batch if row["update_1/optimizer_step_R"] == 1]
    later = [row for row in found.batch if row["update_1/optimizer_step_R"] == 2]
    assert len(first) + len(later) == len(found.recorded)
    assert all(row["update_1/logp_N"] == row["logp_N"] for row in first)
    assert all(row["update_1/logp_N"] != row["logp_N"] for row in later)


def test_evaluations_are_left_out_and_their_syncs_are_not(tmp_path: Path) -> None:
    """With sync_interval > 1 an evaluation brings the engine new weights."""
    run = trained(
        tmp_path / "run",
        algorithm={"name": "grpo", "correction": {"weight": {"name": "token", "high": 2.0}}},
        data={"eval": [{"path": "tests/data/held_out.jsonl"}]},
        rollout={"group_size": 2, "sampling": {"max_tokens": 4}, "sync_interval": 3},
        eval={"interval": 2},
    )
    assert again(run, 3).equal


# ---------------------------------------------------------------- one bit


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("logprobs", partial(flipped, kind="f")),
        ("sample_logprobs", partial(flipped, kind="f")),
        ("token_ids", lambda token: token ^ 1),
        ("reward", partial(flipped, kind="d")),
        ("advantage", partial(flipped, kind="d")),
        ("text", lambda text: f"{text}."),
    ],
)
def test_a_changed_bit_is_found_and_named(rl: Path, tmp_path: Path, field: str, change: Any) -> None:
    run = copied(rl, tmp_path / "run")
    file = run / "rollouts/main-step-000003.parquet"
    per_token = field in ("logprobs", "sample_logprobs", "token_ids")
    place = sampled(file, 5)[1] if per_token else None
    old, new = edit(file, 5, field, place, change)
    found = again(run, 3)
    ((column, first),) = odd(found).items()
    assert column == f"rollouts/{field}"
    row = found.recorded[5]
    assert (first.rollout, first.place) == ((row["uid"], row["index"]), place)
    assert (first.a, first.b) == (new, old)
    if isinstance(new, float):
        assert first.values == (new.hex(), old.hex())
    assert not found.only(first.rollout).equal
    others = [name for name in found.names if name != first.rollout]
    assert all(found.only(name).equal for name in others)


def test_a_changed_number_and_a_changed_batch(rl: Path, tmp_path: Path) -> None:
    run = copied(rl, tmp_path / "run")
    old, new = edit_metric(run, 4, "train/grad_norm", lambda x: flipped(x, "d"))
    was, now = edit(run / "batches/main-step-000004.parquet", 2, "adv_N", -1, lambda x: flipped(x, "f"))
    found = odd(again(run, 4))
    assert found.keys() == {"metrics", "batches/adv_N"}
    assert (found["metrics"].field, found["metrics"].a, found["metrics"].b) == ("train/grad_norm", new, old)
    assert (found["batches/adv_N"].a, found["batches/adv_N"].b) == (now, was)


def test_a_rollout_that_is_gone(rl: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    run = copied(rl, tmp_path / "run")
    file = run / "rollouts/main-step-000001.parquet"
    pq.write_table(pq.read_table(file).slice(1), file)
    found = odd(again(run, 1))
    assert found.keys() == {"rollouts/rollouts"}
    assert (found["rollouts/rollouts"].a, found["rollouts/rollouts"].b) == ("absent", "there")


# ---------------------------------------------------------------- where it starts


def starts(recorded: Recorded) -> list[tuple[str, int, str | None, int]]:
    return [(recorded.names[s.stage], s.step, s.start and s.start.name, s.forward) for s in recorded.steps()]


def test_from_the_last_checkpoint_or_the_beginning(rl: Path, tmp_path: Path) -> None:
    begin, two = BEGINNING, "0-main-000002"
    assert starts(read(rl)) == [
        ("main", 1, begin, 1), ("main", 2, begin, 2), ("main", 3, two, 1), ("main", 4, two, 2)
    ]  # fmt: skip
    run = copied(rl, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    assert starts(read(run))[-1] == ("main", 4, begin, 4)
    assert again(run, 4).equal


def test_a_damaged_checkpoint_is_named_and_the_start_before_it_used(rl: Path, tmp_path: Path) -> None:
    run = copied(rl, tmp_path / "run")
    with (run / "checkpoints/0-main-000002/policy/model.safetensors").open("r+b") as file:
        file.truncate(100)
    found = again(run, 3)
    assert found.equal
    assert found.step.start is not None
    assert (found.step.start.name, found.step.forward) == (BEGINNING, 3)
    assert "model.safetensors has 100 bytes" in found.notes[0]
    assert "run_dir" not in found.notes[0]
    recorded = read(run)
    alone = replace(recorded, starts=[s for s in recorded.starts if s.checkpoint])
    with pytest.raises(CheckpointError, match="Put the checkpoint back from a copy"):
        replay(alone, alone.step(0, 3))


def test_through_the_stages_before(stages: Path, tmp_path: Path) -> None:
    """From the end of a stage, and through the whole of one whose checkpoints are gone."""
    assert ("dpo", 1, "0-sft-000004", 1) in starts(read(stages))
    run = copied(stages, tmp_path / "run")
    for name in ("0-sft-000004", "1-dpo-000002", "1-dpo-000004"):
        shutil.rmtree(run / "checkpoints" / name)
    assert ("ppo", 1, "0-sft-000002", 2 + 4 + 1) in starts(read(run))
    assert again(run, 1, 2).equal


def test_rollouts_that_waited_in_the_checkpoint_are_said(stages: Path, tmp_path: Path) -> None:
    """Overlapped: those of step 3 are sampled in step 2, so they are sampled again only from before it."""
    recorded = read(stages)
    assert ("ahead", 3, "2-ppo-000004", 3) in starts(recorded)
    whole = again(stages, 3, 3)
    run = copied(stages, tmp_path / "run")
    for path in (run / "checkpoints").glob("[012]-*"):
        shutil.rmtree(path)
    assert ("ahead", 3, "3-ahead-000002", 1) in starts(read(run))
    found = again(run, 3, 3)
    assert whole.equal
    assert found.equal
    assert not any("waited" in note for note in whole.notes)
    assert any(note.startswith("8 of 8 rollouts waited in the checkpoint") for note in found.notes)


def test_a_branch_holds_from_where_it_began(rl: Path, tmp_path: Path) -> None:
    run = copied(rl, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/0-main-000004")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run_dir"] = str(run)
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(config))
    whet.train(tmp_path / "other.yaml", change=True, overrides=["train.optimizer.lr=0.001"])
    recorded = read(run)
    assert [s.start and s.start.name for s in recorded.steps()] == [
        None,
        None,
        "0-main-000002",
        "0-main-000002",
    ]
    assert "a different config after step 2 of stage 'main' (train.optimizer.lr)" in recorded.step(0, 1).why
    assert again(run, 4).equal


def test_without_the_optimizer_only_the_next_step(rl: Path, tmp_path: Path) -> None:
    run = copied(rl, tmp_path / "run")
    state = run / "checkpoints/0-main-000002/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "contents": ["model"]}))
    assert starts(read(run))[2:] == [("main", 3, "0-main-000002", 1), ("main", 4, BEGINNING, 4)]


# ---------------------------------------------------------------- agents


def test_agents_are_told_the_same_and_never_asked(agents: Path) -> None:
    run, asked = agents / "run", drawn(agents)
    before = digest(run)
    found = again(run, 3)
    assert odd(found) == {}
    assert any(len(row["turns"]) == 3 for row in found.recorded)
    assert drawn(agents) == asked
    assert "the journal keeps answers of environments since the oldest" in read(run).step(0, 1).why
    assert digest(run) == before


def test_played_agents_draw_other_answers(agents: Path) -> None:
    asked = drawn(agents)
    before = digest(agents / "run")
    found = again(agents / "run", 3, play=True)
    assert len(drawn(agents)) > len(asked)
    assert "rollouts/messages" in odd(found)
    assert digest(agents / "run") == before


def test_an_answer_that_is_not_in_the_journal(agents: Path, tmp_path: Path) -> None:
    run = copied(agents / "run", tmp_path / "run")
    shutil.rmtree(run / "journal")
    with pytest.raises(EnvBroken, match=r"the journal has no answer to what rollout \d of task \d+ asks"):
        again(run, 3)


def test_another_agent_is_told_of_and_not_asked(agents: Path) -> None:
    file, asked = agents / "agent.py", drawn(agents)
    text = file.read_text()
    try:
        file.write_text(text.replace('"abc"', '"xyz"'))
        found = again(agents / "run", 3)
    finally:
        file.write_text(text)
    assert found.equal
    assert drawn(agents) == asked
    assert any("agent.py' has changed since the run" in note for note in found.notes)


# ---------------------------------------------------------------- what has changed since


def test_another_reward_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def length(response, task):\n    return float(len(response))\n")
    run = trained(tmp_path / "run", rewards={"length": {"function": f"{file}:length"}})
    assert again(run, 3).notes[1:] == []
    file.write_text("def length(response, task):\n    return float(len(response)) + 1.0\n")
    found = again(run, 3)
    assert "rewards.py' has changed since the run: " in found.notes[0]
    assert odd(found)["rollouts/reward"].a + 1.0 == odd(found)["rollouts/reward"].b
    assert "rollouts/token_ids" not in odd(found)


def test_other_data_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"a{c}", "answer": c} for c in "bcdefghijklm"]
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = trained(tmp_path / "run", data={"train": [{"path": str(data)}], "max_prompt_tokens": 8})
    data.write_text(data.read_text().replace('"b"', '"c"'))
    with pytest.raises(CheckpointError, match="Data source 'words' has changed"):
        again(run, 3)
    assert again(run, 1).notes[0] == f"data {data} has changed since the run"


def test_a_changed_column_that_a_reward_reads_is_refused(tmp_path: Path) -> None:
    data, file = tmp_path / "words.jsonl", tmp_path / "rewards.py"
    file.write_text("def bonus(response, task, extra):\n    return float(extra)\n")

    def write(sign: int) -> None:
        rows = [{"prompt": f"a{c}", "answer": c, "extra": sign * n} for n, c in enumerate("bcdefghijklm")]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    own = {
        "data": {"train": [{"path": str(data)}], "max_prompt_tokens": 8},
        "rewards": {"bonus": {"function": f"{file}:bonus"}},
    }
    write(1)
    run = trained(tmp_path / "run", **own, train={"steps": 3})
    write(-1)
    with pytest.raises(CheckpointError, match="Data source 'words' has changed"):
        again(run, 3)
    found = again(run, 1)
    assert found.notes[0] == f"data {data} has changed since the run"
    assert "rollouts/reward" in odd(found)
    with pytest.raises(CheckpointError, match="Data source 'words' has changed"):
        trained(run, **own, train={"steps": 4})
    assert again(run, 1).notes == found.notes, "a start that was refused trained no step"


# ---------------------------------------------------------------- asynchronous runs


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        tmp_path_factory.mktemp("async") / "run",
        rollout={"group_size": 2, "sampling": {"max_tokens": 4}, "schedule": "async", "max_staleness": 1},
        checkpoint={"interval": 1, "keep": None, "export": False},
    )


def test_async_steps_are_refused_and_their_tokens_scored_again(asynchronous: Path) -> None:
    before, recorded = digest(asynchronous), read(asynchronous)
    assert {s.start for s in recorded.steps()} == {None}
    assert "rollout.schedule=async" in recorded.step(0, 3).why
    refused = called("replay", str(asynchronous), "--step", "3")
    assert isinstance(refused.exception, ConfigError)
    assert "--logprobs recomputes" in str(refused.exception)
    assert "weights for --logprobs" in called("replay", str(asynchronous)).output
    for step in (1, 2, 3):
        found = logprobs.rescored(recorded, 0, step)
        assert (found.equal, found.close, found.unknown) == (True, False, {})
        rows = recorded.file("rollouts", 0, step)
        assert rows is not None
        assert sum(each.count for each in found.compared) == sum(len(sampled(rows, n)) for n in range(8))
    assert digest(asynchronous) == before


def test_a_changed_log_prob_is_found_by_its_version(asynchronous: Path, tmp_path: Path) -> None:
    run = copied(asynchronous, tmp_path / "run")
    file = run / "rollouts/main-step-000003.parquet"
    place = sampled(file, 4)[0]
    old, new = edit(file, 4, "logprobs", place, lambda x: flipped(x, "f"))
    found = logprobs.rescored(read(run), 0, 3)
    (first,) = (each.first for each in found.compared if each.differing)
    assert (first.a, first.b, first.place) == (new, old, place)
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)
    with pytest.raises(ConfigError, match="none of these has a checkpoint"):
        logprobs.rescored(read(run), 0, 3)


@NEEDS["int8"]
def test_log_probs_of_an_engine_of_other_arithmetic(tmp_path: Path) -> None:
    """They differ, and it is said why. A replay samples with this engine again."""
    run = trained(tmp_path / "run", rollout={"quantization": "int8"}, train={"steps": 1, "tasks_per_step": 4})
    shown = called("replay", str(run), "--step", "1", "--logprobs")
    assert (shown.exit_code, logprobs.rescored(read(run), 0, 1).close) == (1, True)
    assert "differ without a fault" in " ".join(shown.output.split())
    assert again(run, 1).equal


def test_log_probs_by_a_damaged_checkpoint(asynchronous: Path, tmp_path: Path) -> None:
    run = copied(asynchronous, tmp_path / "run")
    whole = logprobs.rescored(read(run), 0, 3)
    for file in (run / "checkpoints").glob("*/policy/model.safetensors"):
        file.write_bytes(b"")
    recorded = read(run)
    if any(each.field.startswith("logprobs by the beginning") for each in whole.compared):
        assert logprobs.rescored(recorded, 0, 3).unknown
    else:
        with pytest.raises(CheckpointError, match="put it back from a copy"):
            logprobs.rescored(recorded, 0, 3)


def test_log_probs_need_no_data(tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"a{c}", "answer": c}) + "\n" for c in "bcdefghijklm"))
    held = {"path": str(data), "name": "held"}
    sources = {"train": [{"path": str(data)}], "eval": [held], "exclude_eval": False, "max_prompt_tokens": 8}
    sampled = {"sources": {"held": {"sampling": {"temperature": 0.5}}}}
    run = trained(tmp_path / "run", data=sources, eval=sampled, train={"steps": 1, "tasks_per_step": 4})
    data.unlink()
    assert logprobs.rescored(read(run), 0, 1).equal


def test_log_probs_of_an_overlapped_step_by_the_weights_before(stages: Path) -> None:
    """Those of step 4 were sampled after step 2, by the weights of checkpoint ahead 2."""
    found = logprobs.rescored(read(stages), 3, 4)
    assert found.equal
    assert "3-ahead-000002" in found.compared[0].field


# ---------------------------------------------------------------- the command


def test_the_command_prints_tables_and_exits_by_the_verdict(rl: Path, tmp_path: Path) -> None:
    shown = called("replay", str(rl), "--step", "3")
    assert shown.exit_code == 0
    assert "equal in every bit" in shown.output
    assert "main step 3, from 0-main-000002, 1 step run" in shown.output
    run = copied(rl, tmp_path / "run")
    file = run / "rollouts/main-step-000003.parquet"
    place = sampled(file, 5)[1]
    _, new = edit(file, 5, "logprobs", place, lambda x: flipped(x, "f"))
    shown = called("replay", str(run), "--step", "3", "--rollout", "5")
    assert shown.exit_code == 1
    assert "not equal" in shown.output
    assert new.hex() in shown.output
    assert "terms of the loss, update epoch 2, optimizer step " in shown.output
    assert called("replay", str(run), "--step", "3", "--rollout", "4").exit_code == 0


def test_nothing_to_compare_is_not_equal(stages: Path) -> None:
    """Rollouts of given replies are recorded in the first step alone; the step's numbers are of all rollouts."""
    assert called("replay", str(stages), "--stage", "sft", "--step", "2").exit_code == 0
    shown = called("replay", str(stages), "--stage", "sft", "--step", "2", "--rollout", "1")
    assert shown.exit_code == 1
    assert "nothing compared" in shown.output
    assert "equal in every bit" not in shown.output


def test_the_command_gives_json(rl: Path) -> None:
    listed = json.loads(called("replay", str(rl), "--json").output)
    assert [(s["step"], s["start"], s["steps_run"]) for s in listed["steps"]][2] == (3, "0-main-000002", 1)
    found = json.loads(called("replay", str(rl), "--step", "2", "--json").output)
    assert found["equal"]
    assert all(c["equal"] == c["compared"] for c in found["compared"])
    one = json.loads(called("replay", str(rl), "--step", "2", "--task", "5", "--index", "1", "--json").output)
    assert one["rollout"] == [5, 1]
    assert one["recorded"] == one["recomputed"]
    assert one["batch"]["logp_N"] == one["recorded"]["logprobs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout", "1"], "give --step N"),
        (["--step", "9"], "steps there: main: 1 to 4"),
        (["--step", "1", "--stage", "sft"], "the run has the stages main"),
        (["--step", "1", "--rollout", "99"], "step 1 has 8 rollouts, of the tasks 0, 1, 2, 3"),
        (["--step", "1", "--task", "77"], "--task 77 --index 0"),
        (["--step", "1", "--logprobs", "--play"], "leave out"),
        (["--index", "1"], "give --step N"),
        (["--step", "1", "--index", "1"], "give --task UID"),
        (["--step", "1", "--rollout", "1", "--index", "0"], "give --task UID"),
        (["--step", "1", "--rollout", "1", "--task", "2"], "give one of them"),
    ],
)
def test_what_is_not_there_is_named(rl: Path, words: list[str], said: str) -> None:
    found = called("replay", str(rl), *words)
    assert isinstance(found.exception, ConfigError)
    assert said in str(found.exception)


def test_the_stage_of_a_step(stages: Path) -> None:
    recorded = read(stages)
    assert stage_of(recorded, None, 3) == 4
    assert stage_of(recorded, "sft", 3) == 0
    assert view.listing_json(recorded)["steps"][0]["stage"] == "sft"


def test_sigterm_in_the_middle_leaves_no_folder(rl: Path, tmp_path: Path) -> None:
    """As Ctrl-C: schedulers and service managers send it."""
    replaying = subprocess.Popen(
        [sys.executable, "-m", "whet", "replay", str(rl), "--step", "4"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("whet-replay-*/run")) and replaying.poll() is None:
        time.sleep(0.01)
    replaying.terminate()
    _, said = replaying.communicate(timeout=60)
    assert replaying.returncode in (130, 0), said  # 0: it was too late
    assert "Traceback" not in said
    assert list(tmp_path.glob("whet-*")) == []

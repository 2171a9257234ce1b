"""`whet diff`: where two runs part, by the first bit that differs, and what their records tell of why."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from recorded import copied, edit, edit_metric, flipped, sampled, trained
from whet import cli
from whet.diff.runs import RunDiff, compared
from whet.diff.view import UNKNOWN
from whet.track import compare
from whet.track.history import since_last_start
from whet.types import DataError

TRAIN = {"steps": 3, "tasks_per_step": 4, "optimizer": {"lr": 0.01}}
STEP_2 = "rollouts/main-step-000002.parquet"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("base") / "run", train=TRAIN)


def diff(a: Path, b: Path) -> tuple[RunDiff, str, int]:
    """What is found, what is printed, the exit code."""
    shown = CliRunner().invoke(cli.app, ["diff", str(a), str(b)])
    return compared(a, b), " ".join(shown.output.split()), shown.exit_code


@pytest.mark.parametrize("text", ["train: 3", "model: {scratch: 4}"])
def test_a_config_that_no_run_writes_is_named(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """And a run resumes in spite of it: its config is given."""
    other = copied(base, tmp_path / "other")
    (other / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=f"config.yaml of {base} or {other}: cannot be read"):
        compared(base, other)
    assert since_last_start(other, {"train": {"steps": 3}}) == []
    assert f"changes since the last start are not logged: {other / 'config.yaml'}" in caplog.text


# ---------------------------------------------------------------- equal


def test_equal_runs(base: Path, tmp_path: Path) -> None:
    """Of another name, with other checkpoints: equal in every bit."""
    again = trained(tmp_path / "run", train=TRAIN, checkpoint={"interval": 1, "export": False})
    found, said, code = diff(base, again)
    assert found.equal
    assert (found.equal_to, found.longer, found.why) == (("main", 3), {}, [])
    assert {c.key: c.kind for c in found.config} == {"checkpoint.interval": "free"}
    assert (found.environment, found.code, found.data) == ([], [], [])
    assert code == 0
    assert said.endswith("equal in every bit up to main step 3")


def test_a_longer_run(base: Path, tmp_path: Path) -> None:
    longer = trained(tmp_path / "run", train={**TRAIN, "steps": 4})
    found, said, code = diff(base, longer)
    assert (found.equal, code) == (True, 0)
    assert found.longer == {str(longer): 1}
    assert f"up to main step 3; lines that are only in {longer}: 1" in said


def test_rollouts_that_one_record_lacks_are_not_called_equal(base: Path, tmp_path: Path) -> None:
    less = tmp_path / "less"
    shutil.copytree(base, less)
    (less / "rollouts" / "main-step-000002.parquet").unlink()
    found, said, code = diff(base, less)
    assert (found.equal, found.uncompared, code) == (True, 1, 0)
    assert "step 3; lines whose rollouts only one record has, not compared: 1" in said


def test_numbers_that_only_one_run_has_hide_no_difference(base: Path, tmp_path: Path) -> None:
    """Another version of whet measures more."""
    newer = copied(base, tmp_path / "newer")
    file = newer / "metrics.jsonl"
    lines = [json.loads(line) | {"train/measured": 1.0} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, said, code = diff(base, newer)
    assert (found.equal, found.only, code) == (True, {str(newer): ["train/measured"]}, 0)
    assert f"numbers that only {newer} has, which are not compared: train/measured" in said
    edit_metric(newer, 3, "train/loss", lambda x: x + 1.0)
    found, said, code = diff(base, newer)
    assert found.parting is not None
    assert (found.parting.step, [each.field for each in found.parting.metrics]) == (3, ["train/loss"])
    # one that both have, but not in every line, is compared
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[1]["train/loss"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(base, newer)
    assert found.parting is not None
    assert (found.parting.step, found.parting.metrics[0].b) == (2, compare.ABSENT)


# ---------------------------------------------------------------- known causes


def test_another_learning_rate(base: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "run", train={**TRAIN, "optimizer": {"lr": 0.02}})
    found, said, code = diff(base, other)
    assert found.parting is not None
    assert (found.parting.step, found.parting.rollouts) == (1, [])
    assert [each.field for each in found.parting.metrics] == ["train/lr"]
    assert found.why == ["config: train.optimizer.lr: 0.01 -> 0.02 is known to change numbers"]
    assert code == 1
    assert "the first step differs" in said


def test_another_seed(base: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "run", train=TRAIN, seed=1)
    found, said, _ = diff(base, other)
    assert found.parting is not None
    assert found.parting.first is not None
    assert found.parting.first.field == "token_ids"
    assert found.parting.first.rollout == (0, 0)
    assert found.why == ["config: seed: 0 -> 1 is known to change numbers"]
    assert "first rollout that differs: task 0, rollout 0, token " in said


def test_a_change_in_a_later_stage_is_no_cause(tmp_path: Path) -> None:
    def two(name: str, **second: Any) -> Path:
        stages = [{"name": "one"}, {"name": "two", **second}]
        return trained(tmp_path / name, train={**TRAIN, "steps": 1}, stages=stages)

    a, b = two("a"), two("b", train={"optimizer": {"lr": 0.5}})
    found = compared(a, b)
    assert found.parting is not None
    assert (found.parting.stage, found.equal_to) == ("two", ("one", 1))
    assert [why.split(":")[1].strip() for why in found.why] == ["stages.two.train.optimizer.lr"]
    edit_metric(b, 1, "reward/mean", lambda x: flipped(x, "d"), stage="one")
    found = compared(a, b)
    assert found.parting is not None
    assert (found.parting.stage, found.equal_to, found.why) == ("one", None, [])


def test_other_code_and_other_data(tmp_path: Path) -> None:
    reward, data = tmp_path / "rewards.py", tmp_path / "words.jsonl"

    def run(name: str, score: str, answer: str) -> Path:
        reward.write_text(f"def length(response, task):\n    return {score}\n")
        rows = [{"prompt": f"a{c}", "answer": answer} for c in "bcdefghijklm"]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = {"train": [{"path": str(data)}], "max_prompt_tokens": 8}
        rewards = {"length": {"function": f"{reward}:length"}}
        return trained(tmp_path / name, train={**TRAIN, "steps": 1}, rewards=rewards, data=sources)

    first = run("a", "float(len(response))", "x")
    found = compared(first, run("b", "float(len(response)) + 1", "x"))
    assert [why.partition(":")[0] for why in found.why] == ["code"]
    assert found.parting is not None
    assert found.parting.first is not None
    assert found.parting.first.field == "reward"
    found = compared(first, run("c", "float(len(response))", "y"))
    assert [why.partition(":")[0] for why in found.why] == ["data"]
    assert found.data[0][0] == str(data)


def test_another_machine(base: Path, tmp_path: Path) -> None:
    other = copied(base, tmp_path / "run")
    manifest = json.loads((other / "manifest.json").read_text())
    start = manifest["starts"][-1]
    start["arithmetic"]["digest"], start["cpu"], start["packages"]["whet"] = (
        "0123456789abcdef",
        "a CPU",
        "0.0.1",
    )
    (other / "manifest.json").write_text(json.dumps(manifest))
    found = compared(base, other)
    assert found.equal
    assert {name for name, _, _ in found.environment} == {"arithmetic.digest", "cpu", "packages.whet"}
    assert found.why == []
    edit_metric(other, 3, "train/loss", lambda x: x + 1.0)
    found = compared(base, other)
    assert [why.partition(":")[0] for why in found.why] == ["arithmetic", "whet"]
    assert "'0123456789abcdef'" in found.why[0]


def test_a_branch(base: Path, tmp_path: Path) -> None:
    other = copied(base, tmp_path / "run")
    manifest = json.loads((other / "manifest.json").read_text())
    change = {"stage": "main", "key": "train.optimizer.lr", "old": 0.01, "new": 0.1, "kind": "branch"}
    for step, told in ((2, 1), (3, 0)):
        (other / "manifest.json").write_text(json.dumps({**manifest, "changes": [{**change, "step": step}]}))
        if told:
            edit_metric(other, 3, "train/lr", lambda x: 0.1)
        assert len(compared(base, other).why) == told


# ---------------------------------------------------------------- unknown causes


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("token_ids", lambda token: token ^ 1),
        ("logprobs", partial(flipped, kind="f")),
        ("reward", partial(flipped, kind="d")),
    ],
)
def test_one_bit_of_a_rollout(base: Path, tmp_path: Path, field: str, change: Any) -> None:
    other = copied(base, tmp_path / "run")
    place = None if field == "reward" else sampled(other / STEP_2, 3)[-1]
    old, new = edit(other / STEP_2, 3, field, place, change)
    found, said, code = diff(base, other)
    assert found.parting is not None
    assert (found.parting.stage, found.parting.step, found.parting.metrics) == ("main", 2, [])
    assert found.equal_to == ("main", 1)
    first = found.parting.first
    assert first is not None
    assert (first.field, first.place, first.a, first.b) == (field, place, old, new)
    assert first.rollout == (5, 1)
    assert UNKNOWN in said
    assert "equal up to main step 1" in said
    assert code == 1
    if isinstance(new, float):
        assert f"{old.hex()} in A, {new.hex()} in B" in said


def test_one_bit_of_a_number_as_json(base: Path, tmp_path: Path) -> None:
    other = copied(base, tmp_path / "run")
    old, new = edit_metric(other, 3, "train/loss", lambda x: flipped(x, "d"))
    shown = CliRunner().invoke(cli.app, ["diff", str(base), str(other), "--json"])
    found = json.loads(shown.output)
    assert shown.exit_code == 1
    assert (found["equal"], found["equal_to"], found["why"]) == (False, ["main", 2], [])
    (metric,) = found["parts_at"]["metrics"]
    assert (metric["field"], metric["a"], metric["b"]) == ("train/loss", old, new)
    assert (metric["a_hex"], metric["b_hex"]) == (old.hex(), new.hex())


def test_runs_without_a_common_step(base: Path, tmp_path: Path) -> None:
    other = copied(base, tmp_path / "run")
    (other / "metrics.jsonl").write_text("")
    found, said, code = diff(base, other)
    assert (found.equal, code) == (False, 1)
    assert "no step is in both records" in said
    with pytest.raises(DataError, match="is not a run directory"):
        compared(base, tmp_path / "nothing")


# ---------------------------------------------------------------- comparing


def test_numbers_are_equal_by_their_bits() -> None:
    nan = float("nan")
    assert compare.same(nan, nan)
    assert not compare.same(0.0, -0.0)
    assert compare.differing([1.0, 0.0, nan], [1.0, -0.0, nan]) == [1]
    assert compare.differing([1, 2, 3], [1, 2]) == [2]
    assert compare.differing([None, 1.0], [0.5, 1.0]) == [0]
    assert compare.differing([], []) == []
    assert not compare.same({"a": [1.0]}, {"a": [float(np.nextafter(1.0, 2.0))]})
    assert not compare.same(True, 1)
    assert compare.pair(0.1, float(np.nextafter(0.1, 1))) == ("0x1.999999999999ap-4", "0x1.999999999999bp-4")
    assert compare.pair(0.1, 0.2) == ("0.1", "0.2")


def row(uid: int, index: int, **values: Any) -> dict[str, Any]:
    tokens = {"token_ids": [1, 2, 3, 4, 5], "mask": [0, 1, 0, 1, 1], "strand_tokens": [2, 3]}
    return {
        "uid": uid,
        "index": index,
        **tokens,
        "logprobs": [0.0, -1.0, 0.0, -2.0, -3.0],
        "reward": 1.0,
        **values,
    }


def test_a_token_is_named_by_its_strand() -> None:
    a = [row(7, 0), row(7, 1)]
    b = [row(7, 0), row(7, 1, logprobs=[9.0, -1.0, 0.0, -2.5, -3.0], reward=None)]
    found = {each.field: each for each in compare.rollouts(a, b)}
    assert found["logprobs"].count == 6  # sampled tokens; what stands at others says nothing
    assert found["logprobs"].differing == 1
    first = found["logprobs"].first
    assert first is not None
    assert (first.rollout, first.strand, first.place, first.a, first.b) == ((7, 1), 1, 1, -2.0, -2.5)
    assert first.where == "task 7, rollout 1, strand 1, token 1"
    assert found["reward"].first == compare.ValueDifference("reward", 1.0, None, (7, 1))
    assert found["token_ids"].differing == 0


def test_rollouts_in_another_order_or_with_more_tokens() -> None:
    a, b = [row(1, 0), row(2, 0)], [row(2, 0), row(1, 0)]
    assert [each.field for each in compare.rollouts(a, b) if each.differing] == ["rollouts"]
    more = [row(1, 0, token_ids=[1, 2, 3, 4, 5, 6], mask=[0, 1, 0, 1, 1, 1], strand_tokens=[2, 4])]
    found = {each.field: each for each in compare.rollouts([row(1, 0)], more)}
    first = found["token_ids"].first
    assert first is not None
    assert (first.a, first.b, first.strand, first.place) == ("absent", 6, 1, 3)
    assert found["rollouts"].differing == 0


@pytest.mark.parametrize("compared", [compare.rollouts, compare.batches])
def test_a_rollout_that_is_there_twice_is_not_equal(compared: Any) -> None:
    """Else one of both would be compared, and the other passed over."""
    a, b = [row(1, 0, reward=7.0), row(1, 0), row(2, 0)], [row(1, 0), row(2, 0)]
    for mine, theirs, said in ((a, b, ("2 times there", "there")), (b, a, ("there", "2 times there"))):
        (odd,) = (each for each in compared(mine, theirs) if each.differing)
        assert odd.field == "rollouts"
        assert (odd.first.a, odd.first.b, odd.first.rollout) == (*said, (1, 0))


def test_a_column_of_a_batch_that_one_side_lacks_is_not_equal() -> None:
    whole = [{"uid": 1, "index": n, "reward_R": 0.5, "adv_N": [1.0, 2.0]} for n in (0, 1)]
    for lacking, values in (("reward_R", (0.5, "absent")), ("adv_N", ([1.0, 2.0], "absent"))):
        part = [{name: value for name, value in each.items() if name != lacking} for each in whole]
        for mine, theirs, said in ((whole, part, values), (part, whole, values[::-1])):
            (odd,) = (each for each in compare.batches(mine, theirs) if each.differing)
            assert (odd.field, odd.count, odd.differing) == (lacking, 2, 2)
            assert odd.first is not None
            assert (odd.first.a, odd.first.b) == said

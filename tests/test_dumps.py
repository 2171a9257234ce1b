"""Dumps: files for other programs at the user's places, whole after a kill and a resume, and nobody else's deleted."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whet
from whet.config.load import load
from whet.config.plan import plans
from whet.dialects.tables import dialect
from whet.dialects.translate import translate
from whet.track.dumps import encoded, files, rows_of
from whet.track.record import RunDirectory
from whet.types import ConfigError, Message, Rollout, Task, WhetError

HERE = Path(__file__).parent
CONFIG = """
name: dumps
seed: 3
model:
  scratch:
    {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
     max_position_embeddings: 64}
tokenizer: {build: chars}
data: {max_prompt_tokens: 16, train: [{path: tests/data/words.jsonl, limit: 16}]}
rewards: {letters: {function: "tests/resume/rewards.py:shared_letters"}}
rollout: {group_size: 2, sampling: {max_tokens: 4}}
train: {steps: 2, tasks_per_step: 4}
checkpoint: {export: false}
track: {trackers: [jsonl]}
machine: {threads: 1}
"""


def rollout(uid: int = 0, *, source: str = "gsm8k", reward: float = 1.0) -> Rollout:
    task = Task(uid=uid, source=source, prompt=(Message("user", f"{uid}+1?"),), answer={"n": uid + 1})
    return Rollout.one_strand(
        task=task,
        index=0,
        token_ids=[1, 2],
        mask=[0, 1],
        logprobs=[0.0, -0.5],
        sample_logprobs=[0.0, -0.5],
        versions=[-1, 0],
        finish_reason="stop",
        text=f"{uid + 1}",
        reward=reward,
        reward_parts={"acc": reward, "score": 0.25},
    )


def write(directory: RunDirectory, step: int) -> None:
    batch = pa.table({"uid": [step], "logp_N": [[-0.5, float("nan")]]})
    directory.write_rollouts("rl", step, [rollout(step), rollout(step + 1)], advantages=[0.5, None])
    directory.write_eval("rl", step, [rollout(step), rollout(9, source="a/b")], numbers={"eval/mean": 0.5})
    directory.write_batch("rl", step, batch)


def templates(folder: Path) -> dict[str, str]:
    return {
        "rollouts": f"{folder}/rollouts/{{step}}.jsonl",
        "eval": f"{folder}/eval/step_{{step}}/{{source}}.jsonl",
        "batches": f"{folder}/{{stage}}-{{step}}.parquet",
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_row_has_verls_names_and_the_parts_of_the_reward_by_theirs() -> None:
    [row] = rows_of([rollout(3)], stage="rl", step=7, advantages=[0.5])
    assert row == {
        "input": "user: 3+1?", "output": "4", "gts": {"n": 4}, "score": 1.0, "step": 7, "stage": "rl",
        "source": "gsm8k", "uid": 3, "index": 0, "finish_reason": "stop", "advantage": 0.5, "acc": 1.0,
        "reward_score": 0.25,
    }  # fmt: skip
    assert "advantage" not in rows_of([rollout()], stage="rl", step=7)[0]


def test_the_suffix_says_the_format_and_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    rows = [
        {"a": 1, "b": float("nan"), "c": {"x": 1}},
        {"a": 2, "b": 0.5, "c": "t", "d": [1.0, float("inf")]},
    ]
    lines = [json.loads(line) for line in encoded(rows, ".jsonl").decode().splitlines()]
    assert lines == [{"a": 1, "b": None, "c": {"x": 1}}, {"a": 2, "b": 0.5, "c": "t", "d": [1.0, None]}]
    (tmp_path / "t.parquet").write_bytes(encoded(rows, ".parquet"))
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert table == [
        {"a": 1, "b": None, "c": '{"x": 1}', "d": None},
        {"a": 2, "b": 0.5, "c": '"t"', "d": "[1.0, null]"},
    ]


def test_an_answer_of_many_digits_is_text_in_a_table(tmp_path: Path) -> None:
    """Arrow has no such integer, and none beside a float that the float would not have exactly."""
    rows = [{"gts": 10**30, "n": 2**60 + 1, "x": {"y": float("nan")}}, {"gts": 7, "n": 0.5, "x": None}]
    (tmp_path / "t.parquet").write_bytes(encoded(rows, ".parquet"))
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == [
        {"gts": str(10**30), "n": str(2**60 + 1), "x": '{"y": null}'},
        {"gts": "7", "n": "0.5", "x": None},
    ]


@pytest.mark.parametrize("source", ["", ".", ".."])
def test_a_source_leads_to_no_other_folder(source: str) -> None:
    rows = rows_of([rollout(source=source)], stage="rl", step=5)
    assert [path for path, _ in files("d/{source}/{step}.jsonl", stage="rl", step=5, rows=rows)] == [
        Path("d/_/5.jsonl")
    ]


def test_a_file_for_each_source_and_one_for_the_numbers() -> None:
    rows = rows_of([rollout(1), rollout(2, source="a/b"), rollout(3, source="a_b")], stage="rl", step=5)
    made = dict(files("d/{stage}/{step}/{source}.jsonl", stage="rl", step=5, rows=rows, numbers={"x": 2.0}))
    assert {str(path): data.count(b"\n") for path, data in made.items()} == {
        "d/rl/5/gsm8k.jsonl": 1,
        "d/rl/5/a_b.jsonl": 2,
        "d/rl/5/aggregated_results.jsonl": 1,
    }
    assert json.loads(made[Path("d/rl/5/aggregated_results.jsonl")]) == {"step": 5, "stage": "rl", "x": 2.0}
    assert len(list(files("d/{step}.jsonl", stage="rl", step=5, rows=rows, numbers={"x": 2.0}))) == 1


@pytest.mark.parametrize("at", [-1, 0, 1, 2])
@pytest.mark.parametrize("torn", [b"", b'{"stage": "rl", "step": 3, "pa'])
def test_dumps_of_a_resumed_run_are_those_of_the_unbroken_one(tmp_path: Path, at: int, torn: bytes) -> None:
    for name in ("whole", "broken"):
        directory = RunDirectory(tmp_path / name, ["rl"], dumps=templates(tmp_path / f"dump-{name}"))
        for step in range(3):
            write(directory, step)
        directory.sync()
        directory.close()
    ledger = tmp_path / "broken" / "dumps.jsonl"
    ledger.write_bytes(ledger.read_bytes() + torn)
    again = RunDirectory(tmp_path / "broken", ["rl"], dumps=templates(tmp_path / "dump-broken"))
    again.truncate_to(0, at)
    left = contents(tmp_path / "dump-broken")
    assert {name for name in left if "rollouts" in name} == {f"rollouts/{n}.jsonl" for n in range(at + 1)}
    assert len(left) == 5 * (at + 1), "rollouts, three of the evaluation, the batch"
    for step in range(at + 1, 3):
        write(again, step)
    assert contents(tmp_path / "dump-broken") == contents(tmp_path / "dump-whole")


def test_what_a_kill_left_of_a_dump_is_removed_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", ["rl"], dumps=templates(tmp_path / "dump"))
    write(directory, 0)
    directory.close()
    before = contents(tmp_path / "dump")
    folder = tmp_path / "dump" / "rollouts"
    (folder / ".0.jsonl.new-ab12cd34").write_text("half")
    others = [folder / ".other.jsonl.new-ab12cd34", folder / ".0.jsonl"]
    for other in others:
        other.write_text("somebody else's")
    RunDirectory(tmp_path / "run", ["rl"], dumps=templates(tmp_path / "dump")).close()
    for other in others:
        other.unlink()
    assert contents(tmp_path / "dump") == before


def test_what_another_has_written_is_not_deleted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", ["rl"], dumps=templates(tmp_path / "dump"))
    write(directory, 1)
    other, mine = tmp_path / "dump/rollouts/1.jsonl", tmp_path / "dump/rollouts/2.jsonl"
    other.write_text("theirs\n")
    mine.write_text("never written by the run\n")
    directory.truncate_to(0, -1)
    assert contents(tmp_path / "dump") == {
        "rollouts/1.jsonl": b"theirs\n",
        "rollouts/2.jsonl": b"never written by the run\n",
    }


def test_a_dump_may_be_taken_away_before_the_next_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", ["rl"], dumps=templates(tmp_path / "dump"))
    write(directory, 1)
    (tmp_path / "dump/rollouts/1.jsonl").unlink()
    directory.sync()
    (directory.write_batch("rl", 2, pa.table({"uid": [2]}))).unlink()
    with pytest.raises(WhetError, match="cannot write"):
        directory.sync()  # of the record itself nothing may go


def test_stages_must_not_write_over_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"track.dump.rollouts='d/\{step\}.jsonl': add \{stage\}"):
        RunDirectory(tmp_path / "run", ["a", "b"], dumps={"rollouts": "d/{step}.jsonl"})
    RunDirectory(tmp_path / "run", ["a", "b"], dumps={"rollouts": "d/{stage}-{step}.jsonl"}).close()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("track.dump.rollouts=d/all.jsonl", "each step would overwrite the previous one"),
        ("track.dump.rollouts='d/{step}.pkl'", "ends in .jsonl or .parquet"),
        ("track.dump.rollouts='d/{sttep}.jsonl'", "no other braces"),
        ("track.dump.rollouts='{time}/{step}.jsonl'", "only if run_dir contains it"),
        ("track.batches_interval=1 track.dump.batches='{source}-{step}.jsonl'", "no other braces"),
        (
            "track.batches_interval=1 track.dump.batches='{step}.jsonl' track.dump.rollouts='{step}.jsonl'",
            "give different paths",
        ),
        ("track.dump.batches='{step}.jsonl'", "no batches are written"),
        ("track.dump.eval='{step}.jsonl'", "nothing to evaluate"),
        ("track.rollouts_interval=0 track.dump.rollouts='{step}.jsonl'", "no rollouts are written"),
    ],
)
def test_a_path_that_cannot_be_meant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    monkeypatch.chdir(HERE.parent)
    (tmp_path / "run.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=said):
        plans(load(tmp_path / "run.yaml", override.split()))


def test_verls_two_folders() -> None:
    tree = {"trainer": {"rollout_data_dir": "a/b", "validation_data_dir": "c/"}}
    made = translate(tree, dialect("verl-ppo"), origins={})
    assert made.tree["track"]["dump"]["rollouts"] == "a/b/{step}.jsonl"
    assert made.tree["track"]["dump"]["eval"] == "c/{step}.jsonl"


def test_a_run_leaves_its_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parent)
    dump = tmp_path / "dump"
    more = [f"run_dir='{tmp_path}/run-{{time}}'", f"track.dump.rollouts='{dump}/{{time}}/{{step}}.jsonl'"]
    (tmp_path / "run.yaml").write_text(CONFIG)
    result = whet.train(tmp_path / "run.yaml", overrides=more)
    [folder] = dump.iterdir()
    assert folder.name == result.run_dir.name.removeprefix("run-")
    record = {p.name: pq.read_table(p).to_pylist() for p in (result.run_dir / "rollouts").glob("*.parquet")}
    assert record
    for name, rows in record.items():
        step = int(name.removesuffix(".parquet").rpartition("-")[2])
        lines = [json.loads(line) for line in (folder / f"{step}.jsonl").read_text().splitlines()]
        assert [(x["output"], x["score"], x["step"]) for x in lines] == [
            (row["text"], row["reward"], step) for row in rows
        ]

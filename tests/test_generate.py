"""`whet generate`: replies beside the rows that ask, goes on after a kill, loses no row, and says what is wrong."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

import whet
from test_early_stopping import ROWS, SCRATCH, train
from whet import generation as module
from whet.cli import app
from whet.config.load import load
from whet.config.plan import describe, plans
from whet.export import export_checkpoint
from whet.generation import AHEAD, FOLDER, in_order
from whet.types import CheckpointError, ConfigError, DataError, Group, Json, Rollout, Task, WhetError

PROMPTS: list[dict[str, Json]] = [
    {"prompt": "ab>", "id": 7, "extra": {"level": 1, "tags": ["x"]}},
    {"prompt": "cab>", "id": 8, "extra": {"level": 2, "tags": []}},
    {"prompt": "bc>", "id": 9, "extra": {"level": 3, "tags": ["y", "z"]}},
]
LIMITS = ("data.max_prompt_tokens=16", "rollout.sampling.max_tokens=4")
SAMPLED = ("eval.samples=3", "eval.sampling.temperature=1.0", *LIMITS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    length = lambda response: float(len(response))  # noqa: E731
    return train(folder / "run", steps=2, checkpoint={"interval": 1}, reward=length).run_dir


@pytest.fixture
def model(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return run / "export" / "main"


def jsonl(path: Path, rows: list[dict[str, Json]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(model: Path, data: Any, out: str = "out.jsonl", *more: str, **sections: Any) -> Path:
    return whet.generate(model, data=data, output=out, overrides=[*SAMPLED, *more], **sections)


# ---------------------------------------------------------------- files


def test_every_column_and_the_replies(model: Path, tmp_path: Path) -> None:
    found = lines(made(model, jsonl(tmp_path / "p.jsonl", PROMPTS)))
    assert [{k: v for k, v in row.items() if k != "responses"} for row in found] == PROMPTS
    assert all(len(row["responses"]) == 3 for row in found)
    assert len({text for row in found for text in row["responses"]}) > 3
    assert not (tmp_path / "out.jsonl.part").exists()


def test_parquet_stays_parquet(model: Path, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(PROMPTS).append_column("small", pa.array([1, 2, 3], pa.int8()))
    pq.write_table(table.replace_schema_metadata({"huggingface": "{}"}), tmp_path / "p.parquet")
    out = made(model, str(tmp_path / "p.parquet"), "out.parquet")
    found = pq.read_table(out)
    assert found.select(table.column_names).equals(table.replace_schema_metadata(None))
    assert found.schema.field("responses").type == pa.list_(pa.string())
    assert not found.schema.metadata
    same = lines(made(model, str(tmp_path / "p.parquet"), "same.jsonl"))
    assert found.to_pylist() == same


def test_files_of_other_columns_are_written_together(model: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", PROMPTS)
    jsonl(tmp_path / "b.jsonl", [{"prompt": "a>", "note": "n"}])
    data = [{"path": str(tmp_path / "a.jsonl"), "limit": 2}, {"path": str(tmp_path / "b.jsonl")}]
    sources = {"b": {"samples": 1}}
    found = pq.read_table(made(model, data, "out.parquet", eval={"sources": sources})).to_pylist()
    assert [(row["id"], row["note"], len(row["responses"])) for row in found] == [
        (7, None, 3),
        (8, None, 3),
        (None, "n", 1),
    ]


def test_rows_from_python(model: Path) -> None:
    assert [row["id"] for row in lines(made(model, PROMPTS))] == [7, 8, 9]


def test_rows_that_a_stage_was_given_are_read_from_the_run(tmp_path: Path) -> None:
    stage = {"name": "rl", "data": {"train": PROMPTS, "eval": PROMPTS, "exclude_eval": False}}
    whet.train(
        model={"scratch": SCRATCH}, tokenizer={"build": "chars"}, rewards=lambda response, id: 0.0,
        rollout={"group_size": 2, "sampling": {"max_tokens": 4}}, train={"steps": 1, "tasks_per_step": 2},
        data={"max_prompt_tokens": 16}, checkpoint={"export": False}, stages=[stage],
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    out = whet.generate(tmp_path / "run", output=tmp_path / "out.jsonl")
    assert [row["id"] for row in lines(out)] == [7, 8, 9]


def test_a_value_that_the_format_does_not_hold(model: Path, tmp_path: Path) -> None:
    mixed: list[dict[str, Json]] = [{"prompt": "a>", "x": 1}, {"prompt": "b>", "x": "one"}]
    with pytest.raises(DataError, match=r"cannot be written as parquet \(.*give a file that ends in .jsonl"):
        made(model, jsonl(tmp_path / "p.jsonl", mixed), "out.parquet")
    with pytest.raises(DataError, match=r"cannot be written as parquet"):  # it has no columns of nothing
        made(model, [{"prompt": "a>", "x": {}}], "out.parquet")
    assert not list(tmp_path.glob("*out.parquet*")), "it is told before a reply is sampled"
    assert lines(made(model, str(tmp_path / "p.jsonl")))[1]["x"] == "one"


# ---------------------------------------------------------------- who replies


def test_the_replies_are_those_of_an_evaluation(run: Path, model: Path, tmp_path: Path) -> None:
    evaluated = pq.read_table(run / "eval" / "main-step-000002.parquet").to_pylist()
    out = whet.generate(run, output=tmp_path / "out.jsonl")
    assert [row["responses"] for row in lines(out)] == [[row["text"]] for row in evaluated]
    assert [row["prompt"] for row in lines(out)] == [row["prompt"] for row in ROWS[:2]]
    same = whet.generate(model, data=ROWS[:2], output=tmp_path / "model.jsonl", overrides=LIMITS)
    assert [row["responses"] for row in lines(same)] == [row["responses"] for row in lines(out)]


def test_a_step_of_a_run(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 0-main-000001, 0-main"):
        whet.generate(run, output=tmp_path / "out.jsonl", step=7)
    evaluated = pq.read_table(run / "eval" / "main-step-000001.parquet").to_pylist()
    out = whet.generate(run, output=tmp_path / "out.jsonl", step=1)
    assert [row["responses"] for row in lines(out)] == [[row["text"]] for row in evaluated]


def test_a_run_in_which_nothing_can_be_written_is_to_be_exported(run: Path, tmp_path: Path) -> None:
    """Another run_dir, the advice to other commands, is refused here."""
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns(FOLDER))
    (tmp_path / "run" / FOLDER).write_text("")
    with pytest.raises(
        WhetError, match=r"cannot write .*give an export of the run \(`whet export RUN -o FOLDER`\)"
    ):
        whet.generate(tmp_path / "run", output=tmp_path / "out.jsonl")


def test_a_stage_without_prompts_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "response": "ab"} for row in ROWS]
    first = {"name": "first", "algorithm": "sft", "data": {"train": rows}, "train": {"steps": 1}}
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    second = {"name": "second", "data": {"train": path, "eval": path, "exclude_eval": False}}
    whet.train(
        model={"scratch": SCRATCH}, tokenizer={"build": "chars"}, rewards=lambda response, answer: 0.0,
        rollout={"group_size": 2, "sampling": {"max_tokens": 4}}, train={"steps": 1, "tasks_per_step": 2},
        data={"max_prompt_tokens": 16},
        checkpoint={"export": False, "keep": None}, stages=[first, second], run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    for out in ("out.jsonl", "out.parquet"):
        with pytest.raises(ConfigError, match=r"stage 'first' has no prompts \(data\.eval\)"):
            whet.generate(tmp_path / "run", output=tmp_path / out, stage="first")
        assert not (tmp_path / out).exists()


def test_a_config_with_its_own_model_and_file(model: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "p.jsonl", PROMPTS)
    (tmp_path / "g.yaml").write_text(
        f"model: {model}\ndata: {{eval: p.jsonl, max_prompt_tokens: 16}}\ntrack: {{dump: {{replies: own.jsonl}}}}\n"
        "eval: {samples: 3, sampling: {temperature: 1.0}}\nrollout: {sampling: {max_tokens: 4}}\n"
    )
    done = CliRunner().invoke(app, ["generate", "g.yaml"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "own.jsonl"
    assert lines(tmp_path / "own.jsonl") == lines(made(model, str(tmp_path / "p.jsonl")))
    (tmp_path / "j.yaml").write_text("rewards: {r: {function: format, arguments: {pattern: '.*'}}}\n")
    assert "mean@3         1" in CliRunner().invoke(app, ["eval", "j.yaml", "--offline", "own.jsonl"]).stdout


# ---------------------------------------------------------------- prompts that are too long


def test_a_prompt_that_is_too_long(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "p.jsonl", PROMPTS)
    with pytest.raises(DataError, match=r"p.jsonl, line 2: its prompt has 4 tokens, the limit is 3"):
        made(model, data, "out.jsonl", "data.max_prompt_tokens=3")
    capsys.readouterr()
    filtered = made(model, data, "a.jsonl", "data.max_prompt_tokens=3", "data.overlong=filter")
    assert [row["id"] for row in lines(filtered)] == [7, 9]
    assert "1 of 3 rows are left out: their prompts are too long" in capsys.readouterr().out
    cut = made(model, data, "b.jsonl", "data.max_prompt_tokens=3", "data.overlong=truncate_left")
    assert [row["id"] for row in lines(cut)] == [7, 8, 9]
    assert "the prompts of 1 of 3 rows are truncated" in capsys.readouterr().out
    parquet = made(model, data, "a.parquet", "data.max_prompt_tokens=3", "data.overlong=filter")
    assert pq.read_table(parquet).to_pylist() == lines(filtered)


# ---------------------------------------------------------------- stopped, killed, wrong


def test_a_command_goes_on_where_it_was(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = jsonl(tmp_path / "p.jsonl", PROMPTS)
    whole = lines(made(model, data, "whole.jsonl"))
    added: list[list[str]] = []
    add = module.Kept.add

    def counted(kept: module.Kept, replies: list[str]) -> None:
        added.append(replies)
        add(kept, replies)

    def broken(kept: module.Kept, replies: list[str]) -> None:
        if kept.rows == 2:
            raise WhetError("stopped here")
        add(kept, replies)

    monkeypatch.setattr(module.Kept, "add", broken)
    with pytest.raises(WhetError, match="stopped here"):
        made(model, data)
    part = tmp_path / "out.jsonl.part"
    assert len(part.read_bytes().splitlines()) == 3
    part.write_bytes(part.read_bytes() + b'["half of')  # the kill came within a line
    monkeypatch.setattr(module.Kept, "add", counted)
    with pytest.raises(
        ConfigError, match=r"out.jsonl.part has replies of a command with other prompts, .*other"
    ):
        made(model, data, "out.jsonl", "eval.sampling.temperature=0.5")
    assert lines(made(model, data)) == whole
    assert added == [whole[2]["responses"]]


@pytest.mark.parametrize("kind", ["a run", "a model"])
def test_replies_of_other_weights_at_the_same_place_are_not_gone_on_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A run that was trained anew, or a folder that a later export has replaced."""

    def broken(kept: module.Kept, replies: list[str]) -> None:
        if kept.rows == 2:
            raise WhetError("stopped here")
        add(kept, replies)

    monkeypatch.chdir(tmp_path)
    data, add = jsonl(tmp_path / "p.jsonl", PROMPTS), module.Kept.add
    target = tmp_path / "target"
    shutil.copytree(run if kind == "a run" else run / "export/main", target)
    monkeypatch.setattr(module.Kept, "add", broken)
    with pytest.raises(WhetError, match="stopped here"):
        made(target, data)
    monkeypatch.setattr(module.Kept, "add", add)
    shutil.rmtree(target)
    if kind == "a run":
        length = lambda response: -float(len(response))  # noqa: E731
        train(target, steps=2, checkpoint={"interval": 1}, reward=length)
    else:
        export_checkpoint(str(run), to=str(target), step=1)
    with pytest.raises(ConfigError, match=r"out.jsonl.part has replies of a command with .* another model"):
        made(target, data)


@pytest.mark.parametrize("content", [b"a line of mine\n", b"a line of mine", b'{"same": 7}\n', b"\0\n" * 3])
def test_a_file_of_another_program_is_left_alone(model: Path, tmp_path: Path, content: bytes) -> None:
    part = tmp_path / "out.jsonl.part"
    part.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"out.jsonl.part has replies of .*, or is no file of replies; move it"
    ):
        made(model, jsonl(tmp_path / "p.jsonl", PROMPTS))
    assert part.read_bytes() == content


def test_a_first_line_that_was_not_finished_is_written_again(model: Path, tmp_path: Path) -> None:
    part = tmp_path / "out.jsonl.part"
    part.write_bytes(b'{"same": "')
    assert len(lines(made(model, jsonl(tmp_path / "p.jsonl", PROMPTS)))) == len(PROMPTS)


def commanded(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "whet", "generate", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )


SLOW = """
import time
from whet.generation import Kept

add = Kept.add

def slow(self, replies):
    time.sleep(0.05)
    add(self, replies)

Kept.add = slow
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)])
def test_a_process_that_is_ended(model: Path, tmp_path: Path, number: int) -> None:
    """Of the command that is ended each row takes 50 ms, so that it does not end by itself before."""
    rows = [{"prompt": f"{'abc' * (n % 4)}a>", "n": n} for n in range(150)]
    (tmp_path / "slow.py").write_text(SLOW)
    data = jsonl(tmp_path / "p.jsonl", rows)
    words = (str(model), "--data", data, "-o", "out.jsonl", "rollout.max_num_seqs=6", *SAMPLED)
    part, first = tmp_path / "out.jsonl.part", commanded(*words, "imports=[slow.py]", cwd=tmp_path)
    while not (part.exists() and part.read_bytes().count(b"\n") > 5):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.01)
    first.send_signal(number)
    said = first.communicate(timeout=60)[0]
    assert first.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), said
    assert "Traceback" not in said
    assert not (tmp_path / "out.jsonl").exists()
    assert 5 < part.read_bytes().count(b"\n") < 150
    again = made(model, data, "out.jsonl", "rollout.max_num_seqs=6")
    assert lines(again) == lines(made(model, data, "whole.jsonl"))
    assert [row["n"] for row in lines(again)] == list(range(150))


def test_what_is_wrong_is_said_before_anything_runs(model: Path, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "p.jsonl", PROMPTS)
    (tmp_path / "there.jsonl").write_text("")
    cases = {
        "there.jsonl exists; move it away, or give another file": ("there.jsonl", data, []),
        "expected a name that ends in .jsonl or .parquet": ("out.csv", data, []),
        "'{step}.jsonl': expected no braces": ("{step}.jsonl", data, []),
        "expected a file on this machine": ("s3://b/out.jsonl", data, []),
        "names no file for the replies": (None, data, []),
        "has no prompts (data.eval)": ("out.jsonl", None, []),
        "3 greedy replies to a task are all the same": ("out.jsonl", data, ["eval.sampling.temperature=0"]),
        "`whet generate` trains nothing": ("out.jsonl", data, ["train.steps=3"]),
        "`whet generate` scores nothing": ("out.jsonl", data, ["eval.success=0.5"]),
        "`whet generate` samples eval.samples replies": ("out.jsonl", data, ["rollout.group_size=2"]),
    }
    for said, (out, prompts, more) in cases.items():
        with pytest.raises(ConfigError) as e:
            whet.generate(model, data=prompts, output=out, overrides=[*SAMPLED, *more])
        assert said in str(e.value)
    with pytest.raises(ConfigError, match="is not a run directory"):
        whet.generate(model, data=data, output="out.jsonl", step=3)
    assert not list(tmp_path.glob("out*"))


def test_columns_that_are_not_there_or_would_be_hidden(model: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match="'question'"):
        made(model, [{"path": jsonl(tmp_path / "p.jsonl", PROMPTS), "prompt": "question"}])
    asked = [*PROMPTS, {"prompt": "a>", "responses": ["x"]}]
    with pytest.raises(DataError, match=r"q.jsonl, line 4: has a column 'responses'"):
        made(model, jsonl(tmp_path / "q.jsonl", asked))


def test_a_column_that_is_not_there_is_named_by_the_key_of_a_translated_file(
    model: Path, tmp_path: Path
) -> None:
    verl = Path(__file__).parents[1] / "examples" / "from_verl.yaml"
    given = f"data.val_files={jsonl(tmp_path / 'p.jsonl', PROMPTS)}"
    named = f"actor_rollout_ref.model.path={model}", "data.prompt_key=question"
    with pytest.raises(DataError, match=r"In a verl-ppo file `prompt` is data\.prompt_key\.$"):
        whet.generate(verl, output="out.jsonl", overrides=[given, *named])


def test_a_reply_that_cannot_be_sampled_is_not_an_empty_one(tmp_path: Path) -> None:
    rollout = Rollout.one_strand(
        task=Task(uid=4, source="a", prompt=""), index=1, token_ids=[1], mask=[0], logprobs=[0.0],
        sample_logprobs=[0.0], versions=[-1], finish_reason="abort", text="", error="the engine is gone",
    )  # fmt: skip
    with module.Kept(tmp_path / "k", "s") as kept, pytest.raises(WhetError) as e:
        module.check_sampled(Group(rollout.task, (rollout,)), kept)
    assert "reply 2 to row 5 could not be sampled: the engine is gone" in str(e.value)


def test_on_a_full_disk_another_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = "the disk is full; free space there, or give another file: -o FILE"
    with pytest.raises(WhetError, match=said):
        module.whole(tmp_path / "out.jsonl", full, iter(()))
    with module.Kept(tmp_path / "k", "s") as kept, open("/dev/full", "wb", buffering=0) as file:
        monkeypatch.setattr(kept, "file", file)
        with pytest.raises(WhetError, match=said):
            kept.add(["a"])
        monkeypatch.undo()


def test_two_commands_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        module.Kept(tmp_path / "k", "s"),
        pytest.raises(ConfigError, match="is being written by another process"),
        module.Kept(tmp_path / "k", "s"),
    ):
        pass


# ---------------------------------------------------------------- sampled at once


def test_groups_come_in_order_while_slow_ones_are_waited_for() -> None:
    running = most = begun = 0

    async def ask(task: Task) -> Group:
        nonlocal running, most, begun
        running, begun = running + 1, begun + 1
        most = max(most, running)
        await asyncio.sleep(0.05 if task.uid == 0 else 0)
        running -= 1
        return Group(task, ())

    async def collect(groups: AsyncIterator[Group]) -> list[int]:
        found = []
        async for group in groups:
            found.append(group.task.uid)
            if group.task.uid == 0:
                assert begun == AHEAD * 3, "as many go on behind a slow one, and no more"
        return found

    tasks = (Task(uid=n, source="a", prompt="") for n in range(40))
    assert asyncio.run(collect(in_order(tasks, ask, at_once=3))) == list(range(40))
    assert most == 3


# ---------------------------------------------------------------- plans


def test_the_plan_of_a_file_of_replies(model: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "p.jsonl", PROMPTS)
    given = {"model": str(model), "data": {"eval": "p.jsonl"}, "track": {"dump": {"replies": "out.parquet"}}}
    loaded = load(None, [*LIMITS, "eval.samples=2", "eval.sampling.temperature=0.6"], given)
    (planned,) = plans(loaded, trains=False)
    console = Console(width=200)
    with console.capture() as told:
        console.print(describe([planned]))
    assert "2 to each row of data.eval, temperature 0.6" in told.get()
    assert "optimizer" not in told.get()
    with pytest.raises(
        ConfigError, match=r"only `whet generate` writes replies, and there is no training data"
    ):
        plans(loaded)
    trained = load(None, (), {**given, "data": {"train": "p.jsonl"}, "rewards": {"r": "exact"}})
    with pytest.raises(ConfigError, match=r"only `whet generate` writes replies: run `whet generate"):
        plans(trained)

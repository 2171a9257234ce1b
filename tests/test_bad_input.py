"""What a user can get wrong ends, through the real command line, in one clear message, and nothing is lost."""

from __future__ import annotations

import errno
import filecmp
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import whet
import whet.models.exports
from whet import checkpoint
from whet.cli import main
from whet.models.optim import Optimizer
from whet.track import files
from whet.track.files import RunLock
from whet.types import CheckpointError, ConfigError

ROOT = Path(__file__).parents[1]
BROKEN = "tests/broken"
CONFIG = """
model:
  scratch:
    {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 32}
tokenizer: {build: chars}
data: {max_prompt_tokens: 8, train: [{path: tests/data/words.jsonl}]}
rewards: {right: {function: exact}}
rollout: {group_size: 2, sampling: {max_tokens: 4}}
train: {steps: 3, tasks_per_step: 4, optimizer: {lr: 1e-2}}
checkpoint: {interval: 1}
machine: {threads: 1}
reward_workers: {count: 1}
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def train(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`whet train config.yaml run_dir=... OVERRIDES`: the exit code and all that was said."""
    monkeypatch.chdir(ROOT)

    def run(run_dir: Path, *overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["whet", "train", str(config), f"run_dir={run_dir}", *overrides])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that CONFIG is, undisturbed. Not to be written to."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "config.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        whet.train(folder / "config.yaml", run_dir=str(folder / "run"))
    return folder / "run"


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """That run, stopped after its second step."""
    path = tmp_path / "stopped"
    shutil.copytree(finished, path)
    shutil.rmtree(path / "checkpoints" / "0-main-000003")
    shutil.rmtree(path / "export")
    return path


def assert_same_run(a: Path, b: Path) -> None:
    names = [
        str(p.relative_to(a))
        for part in ("metrics.jsonl", "checkpoints", "export")
        for p in [a / part, *(a / part).rglob("*")]
        if p.is_file()
    ]
    assert len(names) > 5
    assert filecmp.cmpfiles(a, b, names, shallow=False)[1:] == ([], [])


# ---------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"path: {BROKEN}/cut.jsno", "No such data file: tests/broken/cut.jsno; did you mean 'cut.json' or"),
        (f"path: {BROKEN}/cut.jsonl", "cut.jsonl, line 2: not JSON: Expecting ',' delimiter at column 33"),
        (f"path: {BROKEN}/cut.json", "cut.json: not JSON: Expecting value at column 36"),
        (f"path: {BROKEN}/cells.csv", "cells.csv, line 3: the number of cells differs from the 2 columns"),
        (f"path: {BROKEN}/cut.parquet", "cut.parquet: not a readable parquet file"),
        (f"path: {BROKEN}/empty.jsonl", "'empty' is empty: no rows in tests/broken/empty.jsonl"),
        (f"path: {BROKEN}/texts.json", "texts.json, row 1: a row must be an object with named columns"),
        (f"path: {BROKEN}/other_column.jsonl", "line 1: no column 'prompt'; columns: word, answer"),
        (f"path: {BROKEN}/long.jsonl", "long.jsonl, line 1: its prompt has 17 tokens, the limit is 8. Raise data.max_"),
        (f'function: "{BROKEN}/functions.py:nothing"', "'tests/broken/functions.py' has no 'nothing'"),
        (f'function: "{BROKEN}/functions.py:rows"', "raised TypeError: rows() missing 1 required positional"),
        (
            f'function: "{BROKEN}/functions.py:rows", arguments: {{count: 2}}',
            "raised ZeroDivisionError: after one of 2 (",
        ),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read(source: str, said: str, train: Run, tmp_path: Path) -> None:
    code, out = train(tmp_path / "run", f"data.train=[{{{source}}}]")
    assert said in out
    assert out.count(source.partition(": ")[2][:20]) <= 2, "the place is named once"
    assert len(out.strip().splitlines()) == 1
    assert code == (2 if "has no" in said else 1)


def test_long_prompts_are_dropped_or_cut_and_counted(train: Run, tmp_path: Path) -> None:
    long = f"data.train=[{{path: {BROKEN}/long.jsonl}}]"
    code, out = train(tmp_path / "filter", long, "data.overlong=filter")
    assert (code, "3 rows, 2 kept; 1 overlong_prompt_dropped" in out) == (0, True)
    code, out = train(tmp_path / "cut", long, "data.overlong=truncate_left")
    assert (code, "3 rows, 3 kept; 1 overlong_prompt_cut" in out) == (0, True)


def test_nothing_left_to_train_on(train: Run, tmp_path: Path) -> None:
    all_long = f"data.train=[{{path: {BROKEN}/all_long.jsonl}}]"
    code, out = train(tmp_path / "run", all_long, "data.overlong=filter")
    assert (code, "is empty after filtering: 0 kept, 1 overlong_prompt_dropped, 1 rows" in out) == (1, True)
    code, out = train(tmp_path / "run", "data.eval=[{path: tests/data/words.jsonl}]")
    assert (code, "is empty after filtering: 124 held_out" in out) == (1, True)


# ---------------------------------------------------------------- models


def test_a_model_folder_without_its_tokenizer(finished: Path, train: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(finished / "export" / "main", model)
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer.json\)"):
        whet.data.tokenizer.load_tokenizer(whet.config.schema.TokenizerConfig(), model_path=str(model))


def test_a_model_that_is_not_there_is_named_by_its_key(config: Path, train: Run, tmp_path: Path) -> None:
    there = re.sub(r"model:\n  scratch:\n.*\n", "model: {path: Qwen/Qwen3-0.6B}\n", CONFIG)
    config.write_text(there.replace("tokenizer:", "#"))
    code, out = train(tmp_path / "run")
    assert code == 2
    assert (
        "No folder Qwen/Qwen3-0.6B (model.path or tokenizer.path). Models are read from local folders only"
        in out
    )


# ---------------------------------------------------------------- checkpoints

FILES = [
    "manifest.json",
    "state.json",
    "tokenizer.json",
    "policy/model.safetensors",
    "policy/optimizer.safetensors",
]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_no_damage_to_a_checkpoint_is_read(finished: Path, tmp_path: Path, damage: Any, name: str) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(finished / "checkpoints", root)
    newest, before = root / "0-main-000003", root / "0-main-000002"
    assert {str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()} == set(FILES)
    checkpoint.read_state(newest)
    damage(newest / name)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_state(newest)
    assert str(newest) in str(caught.value)
    assert f"checkpoint.resume={before} resumes from the previous checkpoint" in str(caught.value)
    checkpoint.read_state(before)


def test_a_damaged_checkpoint_that_was_named_is_refused_and_the_advice_leads_to_the_same_run(
    finished: Path, train: Run, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    newest = run_dir / "checkpoints/0-main-000003"
    cut(newest / "state.json")
    code, out = train(run_dir, f"checkpoint.resume={newest}")
    assert code == 1
    advised = out.partition("checkpoint.resume=")[2].split()[0]
    code, out = train(run_dir, f"checkpoint.resume={advised}")
    assert code == 0, out
    assert_same_run(finished, run_dir)


def test_without_a_name_the_run_goes_on_from_the_one_before_and_says_what_is_lost(
    finished: Path, train: Run, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    (run_dir / "checkpoints/0-main-000003/policy/model.safetensors").unlink()
    code, out = train(run_dir)
    said = " ".join(out.split())
    assert code == 0, out
    assert "0-main-000003: policy/model.safetensors is missing" in said
    assert "0-main-000002 instead: 1 steps are lost and trained again" in said
    assert_same_run(finished, run_dir)
    for path in checkpoint.all_in(run_dir / "checkpoints"):
        flip(path / "policy/model.safetensors")
    code, out = train(run_dir)
    said = " ".join(out.split())
    assert code == 1
    assert "0-main-000003: policy/model.safetensors has changed" in said
    assert (
        "all 2 checkpoints here are damaged; put a copy of one back, or start a new run in another run_dir"
        in said
    )
    assert "checkpoint.resume=" not in said, "of one that is damaged, too"


@pytest.mark.parametrize(
    ("text", "said"), [("", "it is empty"), ("{", "it is not JSON: Expecting property name")]
)
def test_a_manifest_that_is_no_json_says_so_and_what_to_do(
    finished: Path, tmp_path: Path, text: str, said: str
) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(finished / "checkpoints", root)
    (root / "0-main-000003/manifest.json").write_text(text)
    after = rf".*; checkpoint.resume={root}/0-main-000002 resumes from the previous"
    with pytest.raises(
        checkpoint.Damaged, match=rf"not a complete checkpoint \(manifest.json: {said}{after}"
    ):
        checkpoint.read_state(root / "0-main-000003")


SIZE = [10, "0" * 64]


@pytest.mark.parametrize(
    "said",
    [
        {},
        [],
        None,
        {"files": {}},
        {"files": [["state.json", 1]]},
        {"files": {"state.json": "x"}},
        {"files": {"state.json": [10]}},
        {"files": {"state.json": SIZE, "../../other": SIZE}},
        {"files": {"state.json": SIZE, "/etc/passwd": SIZE}},
        {"files": {"state.json": [10**400, "0"]}},
        "[" * 100_000,
        '{"files": ' + "9" * 10_000 + "}",
    ],
)
def test_a_manifest_of_anything_is_a_damaged_checkpoint(finished: Path, tmp_path: Path, said: Any) -> None:
    path = tmp_path / "0-main-000003"
    shutil.copytree(finished / "checkpoints/0-main-000003", path)
    (path / "manifest.json").write_text(said if isinstance(said, str) else json.dumps(said))
    with pytest.raises(checkpoint.Damaged, match="0-main-000003"):
        checkpoint.read_state(path)


def test_a_manifest_that_does_not_list_what_is_there_is_a_damaged_checkpoint(
    finished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "0-main-000003"
    shutil.copytree(finished / "checkpoints/0-main-000003", path)
    said = json.loads((path / "manifest.json").read_text())
    del said["files"]["policy/model.safetensors"]
    (path / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(checkpoint.Damaged, match=r"does not list the file policy/model.safetensors"):
        checkpoint.read_state(path)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "three"},
        {"record": 3},
        {"config": None},
        {"tasks": {"deep": [[]]}},
        {"tasks": json.loads("[" * 480 + "]" * 480)},
        {"buffer": []},
        {"value_scale": {"mean": 1}},
        {"ledger": "x"},
    ],
)
def test_a_state_of_anything_is_one_clear_error(
    change: dict[str, Any], stopped: Path, train: Run, tmp_path: Path
) -> None:
    path = stopped / "checkpoints/0-main-000002"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | change))
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest(path)))
    code, out = train(stopped, f"checkpoint.resume={path}")
    assert code == 1
    assert "Traceback" not in out
    assert "state.json" in out or "a different config" in out


# ---------------------------------------------------------------- gradients


def overflowing(monkeypatch: pytest.MonkeyPatch, updates: set[int]) -> None:
    """These optimizer steps, counted from 0, have a gradient that is not finite."""
    clip = Optimizer.clip
    monkeypatch.setattr(
        Optimizer, "clip", lambda own: float("inf") if own.step_count in updates else clip(own)
    )


def test_rollouts_whose_update_was_skipped_are_not_booked_as_trained(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, {0, 1, 2})
    keys = ("train.minibatches=2", "algorithm.dynamic_sampling=false", "machine.logprob_parity=off")
    code, out = train(tmp_path / "run", *keys)
    assert code == 0, out
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    lost, learned = "ledger/rejected/skipped_update_rollouts", "ledger/trained_rollouts"
    booked = [(line.get(lost, 0), line.get(learned, 0)) for line in lines if "train/loss" in line]
    assert booked == [(8, 0), (4, 4), (0, 8)]
    said = " ".join(out.split())
    assert "step 1: the norm of the gradient was not finite in 2 of 2 optimizer steps" in said
    assert "1 of 2 optimizer steps, which were skipped; 2 of 4 groups were not trained on" in said


def test_updates_that_are_skipped_again_and_again_end_the_run(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, set(range(100)))
    keys = ("algorithm.dynamic_sampling=false", "train.max_skipped_steps=1", "machine.logprob_parity=off")
    code, out = train(tmp_path / "run", *keys)
    assert code == 1
    assert "optimizer step 2: the norm of the gradient is inf." in " ".join(out.split())


def test_a_run_of_which_every_update_was_skipped_is_an_error(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, set(range(100)))
    keys = ("algorithm.dynamic_sampling=false", "train.max_skipped_steps=50", "machine.logprob_parity=off")
    for _ in range(2):  # again: the same answer, not that of a finished run
        code, out = train(tmp_path / "run", *keys)
        assert code == 1, out
        assert "every update was skipped because its gradient was not finite" in " ".join(out.split())
        assert "Traceback" not in out


# ---------------------------------------------------------------- the record


@pytest.mark.parametrize("damage", [Path.unlink, cut, empty])
def test_a_run_does_not_go_on_over_a_record_with_a_hole(
    damage: Any, stopped: Path, train: Run, tmp_path: Path
) -> None:
    damage(stopped / "metrics.jsonl")
    code, out = train(stopped)
    said = " ".join(out.split())
    assert code == 1
    assert (
        f"{stopped}/metrics.jsonl is damaged: when {stopped}/checkpoints/0-main-000002 was written it began with"
        in said
    )
    advised = said.partition("checkpoint.resume=")[2].split()[0]
    assert train(tmp_path / "other", f"checkpoint.resume={advised}")[0] == 0


def test_a_record_that_was_written_twice_is_mended_and_files_that_are_gone_are_named(
    finished: Path, stopped: Path, train: Run
) -> None:
    metrics = stopped / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() * 2)
    (stopped / "rollouts/main-step-000001.parquet").unlink()
    cut(stopped / "rollouts/main-step-000002.parquet")
    code, out = train(stopped)
    said = " ".join(out.split())
    assert code == 0, out
    assert "lines of steps that it already has are dropped" in said
    assert (
        "is incomplete: rollouts/main-step-000001.parquet, rollouts/main-step-000002.parquet, which" in said
    )
    assert metrics.read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_run_that_went_back_drops_the_later_checkpoints(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(finished / "checkpoints", root)
    checkpoint.Saver(root, keep=checkpoint.Keep(1)).save({}, {"stage": 0, "stage_name": "main", "step": 1})
    assert [p.name for p in checkpoint.all_in(root)] == ["0-main-000001"]


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("nowhere", "no such folder"),
        ("", "is not a complete checkpoint"),
        ("export/main", "is not a complete checkpoint"),
    ],
)
def test_a_folder_that_is_no_checkpoint(
    finished: Path, train: Run, tmp_path: Path, resume: str, said: str
) -> None:
    code, out = train(tmp_path / "run", f"checkpoint.resume={finished / resume}")
    assert (code, said in out) == (1, True)


@pytest.mark.parametrize("state", ["stopped", "finished"])
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.optimizer.lr=0.5", "train.optimizer.lr: 0.01 -> 0.5"),
        ("seed=4", "seed: 0 -> 4"),
        ("model.scratch.hidden_size=64", "model.scratch.hidden_size: 32 -> 64"),
    ],
)
def test_another_config_is_refused_and_the_run_is_left_as_it_was(
    state: str, override: str, key: str, train: Run, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(state), run_dir)
    before = {
        p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.name not in ("run.log", "lock")
    }
    code, out = train(run_dir, override)
    assert code == 1
    assert key in out
    assert {p: p.read_bytes() for p in before} == before


def test_other_data_is_refused(stopped: Path, config: Path, train: Run, tmp_path: Path) -> None:
    lines = Path(ROOT / "tests/data/words.jsonl").read_text().splitlines()
    data = tmp_path / "words.jsonl"
    data.write_text("\n".join(lines[:-1]))
    config.write_text(CONFIG.replace("checkpoint: {interval: 1}", "checkpoint: {interval: 2}"))
    source = f"data.train=[{{path: {data}}}]"
    assert train(tmp_path / "run", source)[0] == 0
    for late in ("checkpoints/0-main-000003", "export"):
        shutil.rmtree(tmp_path / "run" / late)
    data.write_text("\n".join(lines[1:]))
    code, out = train(tmp_path / "run", source)
    assert (code, "'words' has changed since the run was saved" in out) == (1, True)


def test_an_old_run_may_not_be_written_over(finished: Path, train: Run) -> None:
    code, out = train(finished, "checkpoint.resume=never")
    assert (code, "already holds a run and checkpoint.resume=never" in out) == (1, True)


# ---------------------------------------------------------------- the disk


def test_a_full_disk_keeps_the_last_checkpoint_and_the_same_command_goes_on(
    finished: Path, train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_path = files.sync_path

    def full(path: Path) -> None:
        if "0-main-000002.new" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync_path(path)

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_path", full)
        code, out = train(run_dir)
    assert code == 1
    assert "0-main-000002: the disk is full; free space there, or give another run_dir" in out
    assert "the disk is full" in (run_dir / "run.log").read_text(), "the cause stands in run.log, too"
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["0-main-000001"]
    code, out = train(run_dir)
    assert (code, "resuming from" in out) == (0, True)
    assert_same_run(finished, run_dir)


def test_a_run_that_ended_before_its_export_makes_it_later(
    finished: Path, train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise CheckpointError("cannot write the export")

    with monkeypatch.context() as patch:
        patch.setattr(whet.models.exports, "export", broken)
        assert train(tmp_path / "run")[0] == 1
    assert train(tmp_path / "run")[0] == 0
    assert_same_run(finished, tmp_path / "run")
    assert "holds a finished run" in train(tmp_path / "run")[1]


def test_a_run_directory_that_is_a_file_or_in_use(train: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        code, out = train(run_dir)
        assert (code, "a file stands where a folder is needed" in out) == (1, True)
    with RunLock(tmp_path / "run"):
        code, out = train(tmp_path / "run")
    assert (code, "is in use by process" in out) == (1, True)


def test_a_log_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whet.track.log.setup_logging(tmp_path, level="info")
    logger = logging.getLogger("whet")
    logger.handlers[0].stream = open("/dev/full", "w")  # type: ignore[attr-defined]  # noqa: SIM115
    logger.info("a line")
    whet.track.log.close_logging()
    assert capsys.readouterr().err == ""
    assert logger.propagate
    assert not logger.handlers


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("exat", 2, "function 'exat' is not known; did you mean 'exact'?"),
        (f"{BROKEN}/none.py:f", 2, "no such file"),
        (f"{BROKEN}/functions.py:rasing", 2, "has no 'rasing'; did you mean 'raising'?"),
        (f"{BROKEN}/functions.py:number", 2, "expected a function or class"),
        ("builtins:max", 2, "'builtins:max' does not say which parameters it takes"),
        (f"{BROKEN}/functions.py:wrong_parameters", 2, "takes (x, y); expected (response, task, ...)"),
        (f"{BROKEN}/functions.py:raising", 1, "8 of 8 rollouts of this step are unscored"),
    ],
)
def test_rewards_that_cannot_be_used(function: str, code: int, said: str, train: Run, tmp_path: Path) -> None:
    got, out = train(tmp_path / "run", f'rewards.right.function="{function}"')
    assert (got, said in out) == (code, True), out
    if (tmp_path / "run").exists():
        assert said in (tmp_path / "run" / "run.log").read_text(), "what a failed start leaves says why"
    if code == 1:
        assert "reward right: raised ValueError: bad luck (functions.py:" in out

"""Options of checkpoints, exports, run directories, reward processes and imports, each by its effect on a real run."""

from __future__ import annotations

import filecmp
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import whet
from tiny import RUN
from whet import checkpoint
from whet.config.load import load
from whet.config.plan import plans
from whet.config.resuming import free_changes
from whet.config.secrets import dump, is_secret, learn
from whet.export import export_checkpoint
from whet.track import run_paths
from whet.types import CheckpointError, ConfigError, Task, WhetError

ROOT = Path(__file__).parents[1]
CONFIG = RUN | {"checkpoint": {"interval": 1, "export": False}, "reward_workers": {"count": 1}}

Train = Callable[..., whet.Result]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """`train(run_dir, "key=value" ...)`: that run, in this process."""
    monkeypatch.chdir(ROOT)
    return lambda run_dir, *overrides, **more: whet.train(
        overrides=[f"run_dir={run_dir}", *overrides], **{**CONFIG, **more}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that CONFIG is, every checkpoint kept. Not to be written to."""
    path = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        whet.train(overrides=[f"run_dir={path}", "checkpoint.keep=null"], **CONFIG)
    return path


def stopped(finished: Path, run_dir: Path, step: int) -> Path:
    """A copy of the finished run as it was after a step."""
    shutil.copytree(finished, run_dir)
    for path in checkpoint.all_in(run_dir / "checkpoints")[step:]:
        shutil.rmtree(path)
    return run_dir


def refused(*overrides: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plans(load(None, overrides, {**CONFIG, **more}))
    return str(caught.value)


def steps_of(run_dir: Path) -> list[int]:
    return [int(p.name[-6:]) for p in checkpoint.all_in(run_dir / "checkpoints")]


def same(a: Path, b: Path, *names: str) -> None:
    for name in names:
        assert filecmp.cmp(a / name, b / name, shallow=False), name


LAST = "checkpoints/0-main-000003"
WEIGHTS = f"{LAST}/policy/model.safetensors"

# ---------------------------------------------------------------- what is kept and read


@pytest.mark.parametrize(("keep", "kept"), [("null", [1, 2, 3]), ("1", [3]), ("2", [2, 3])])
def test_how_many_checkpoints_stay(train: Train, tmp_path: Path, keep: str, kept: list[int]) -> None:
    train(tmp_path / "run", f"checkpoint.keep={keep}")
    assert steps_of(tmp_path / "run") == kept


def test_the_plan_says_that_every_checkpoint_stays() -> None:
    from whet.config.describe import describe

    table = describe(plans(load(None, ["checkpoint.keep=null"], CONFIG)))
    from rich.console import Console

    with (console := Console(width=200)).capture() as shown:
        console.print(table)
    assert "every checkpoint kept" in shown.get()


def test_without_the_optimizer_a_checkpoint_is_small_and_goes_on_only_when_asked(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, "checkpoint.save_contents=[model]", "checkpoint.keep=null")
    same(finished, run_dir, "metrics.jsonl", WEIGHTS)
    whole, small = (r / LAST / "policy/optimizer.safetensors" for r in (finished, run_dir))
    assert small.stat().st_size < 200 < whole.stat().st_size
    for path in checkpoint.all_in(run_dir / "checkpoints")[2:]:
        shutil.rmtree(path)
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"has no optimizer.*checkpoint\.load_contents=\[model\]"):
        train(run_dir)
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert train(run_dir, "checkpoint.load_contents=[model]").finished
    assert steps_of(run_dir)[-1] == 3


def test_loading_weights_alone_begins_with_new_moments_where_the_schedule_was(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    a, b = (stopped(finished, tmp_path / name, 2) for name in "ab")
    train(a)
    same(finished, a, "metrics.jsonl", WEIGHTS, f"{LAST}/policy/optimizer.safetensors")
    train(b, "checkpoint.load_contents=[model]")
    assert not filecmp.cmp(finished / WEIGHTS, b / WEIGHTS, shallow=False)
    with safe_open(b / LAST / "policy/optimizer.safetensors", "np") as file:
        counts = json.loads(file.metadata()["counts"])
        taken = {float(file.get_tensor(n)) for n in file.keys() if n.startswith("steps.")}  # noqa: SIM118
    assert (counts["steps"], taken) == (3, {1.0})
    first = [read["train/lr"] for read in whet.Result(b, True).metrics]
    assert first == [read["train/lr"] for read in whet.Result(finished, True).metrics]


@pytest.mark.parametrize("held", [None, "model", ["model", 1], [["model"]]])
def test_a_state_that_does_not_say_what_is_held_is_named(held: Any, tmp_path: Path) -> None:
    with pytest.raises(checkpoint.Damaged, match=r"state\.json does not list the contents of the checkpoint"):
        checkpoint.check_contents(tmp_path, {"contents": held}, ("model",))


@pytest.mark.parametrize("key", ["save_contents", "load_contents"])
def test_without_the_model_nothing_can_go_on(key: str) -> None:
    assert "no run can resume" in refused(f"checkpoint.{key}=[optimizer]")


def test_load_is_refused_where_nothing_is_loaded() -> None:
    said = refused("checkpoint.resume=never", "checkpoint.load_contents=[model]")
    assert "checkpoint.load_contents[0]: has no effect: checkpoint.resume=never reads no checkpoint" in said


# ---------------------------------------------------------------- exports


def test_exports_on_the_way_are_the_policy_of_their_step(train: Train, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(
        run_dir,
        "checkpoint.export_interval=2",
        "checkpoint.export=true",
        "train.steps=4",
        "checkpoint.keep=null",
    )
    assert sorted(p.name for p in (run_dir / "export").iterdir()) == ["main", "main-step-000002"]
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export/main-step-000002").state_dict()
    with safe_open(run_dir / "checkpoints/0-main-000002/policy/model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert (file.get_tensor(name) == model[name]).all()


def test_the_last_step_is_exported_as_one_of_them_where_the_stage_is_not(
    train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "run", "checkpoint.export_interval=3")
    assert [p.name for p in (tmp_path / "run/export").iterdir()] == ["main-step-000003"]


def test_a_disk_that_is_full_at_an_export_leaves_no_half_of_one_and_the_run_goes_on_later(
    finished: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, rename = tmp_path / "run", os.rename

    def full(old: Path, new: Path) -> None:
        if run_dir / "export" == Path(new).parent:
            raise OSError(28, "No space left on device")
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            train(run_dir, "checkpoint.export_interval=1")
    assert list((run_dir / "export").iterdir()) == []
    train(run_dir, "checkpoint.export_interval=1")
    assert len(list((run_dir / "export").iterdir())) == 3
    same(finished, run_dir, "metrics.jsonl", WEIGHTS)


def test_a_stage_that_goes_on_keeps_the_export_of_its_step_that_was_made_by_hand(
    train: Train, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, "checkpoint.export=true", "train.steps=1")
    export_checkpoint(str(run_dir), dtype="bfloat16")
    train(run_dir, "checkpoint.export=true", "train.steps=2")
    names = sorted(p.name for p in (run_dir / "export").iterdir())
    assert names == ["main", "main-step-000001", "main-step-000001-2"]
    kinds = [AutoModelForCausalLM.from_pretrained(run_dir / "export" / name).dtype for name in names]
    assert list(map(str, kinds)) == ["torch.float32", "torch.bfloat16", "torch.float32"]


def test_what_a_kill_in_an_export_leaves_is_swept_away(finished: Path, train: Train, tmp_path: Path) -> None:
    run_dir = stopped(finished, tmp_path / "run", 2)
    for name in (".main-step-000003.new-abc", "main-step-000001"):
        (run_dir / "export" / name).mkdir(parents=True)
    train(run_dir)
    assert [p.name for p in (run_dir / "export").iterdir()] == ["main-step-000001"]


# ---------------------------------------------------------------- folders elsewhere


def test_folders_elsewhere_hold_the_files_and_the_run_directory_links_to_them(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    run_dir, data = tmp_path / "run", tmp_path / "data"
    folders = [
        f"dirs.checkpoints={data}/saved",
        f"dirs.export={data}/models",
        f"dirs.rollouts={data}/rollouts",
    ]
    train(run_dir, "checkpoint.export=true", *folders)
    assert sorted(p.name for p in (data / "saved").glob("0-*")) == ["0-main-000002", "0-main-000003"]
    assert (data / "models/main/model.safetensors").is_file()
    assert len(list((data / "rollouts").glob("*.parquet"))) == 3
    same(finished, run_dir, "metrics.jsonl", WEIGHTS, "rollouts/main-step-000003.parquet")
    shutil.rmtree(data / "saved/0-main-000003")
    train(run_dir, "checkpoint.export=true", *folders)
    same(finished, run_dir, "metrics.jsonl", WEIGHTS)


def test_a_folder_of_another_run_is_left_alone(train: Train, tmp_path: Path) -> None:
    shared = f"dirs.checkpoints={tmp_path}/saved"
    train(tmp_path / "a", shared)
    before = sorted((tmp_path / "saved").rglob("*"))
    with pytest.raises(ConfigError, match=rf"belongs to the run in {tmp_path}/a"):
        train(tmp_path / "b", shared)
    assert sorted((tmp_path / "saved").rglob("*")) == before
    before = sorted((tmp_path / "a/rollouts").iterdir())
    with pytest.raises(ConfigError, match="has files of another origin"):
        train(tmp_path / "b", f"dirs.rollouts={tmp_path}/a/rollouts")
    assert sorted((tmp_path / "a/rollouts").iterdir()) == before


def test_a_run_does_not_lose_its_files_by_a_changed_folder(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    run_dir = stopped(finished, tmp_path / "run", 2)
    with pytest.raises(ConfigError, match=rf"this run has its files in {run_dir}/checkpoints"):
        train(run_dir, f"dirs.checkpoints={tmp_path}/saved")
    train(tmp_path / "new", f"dirs.checkpoints={tmp_path}/one")
    with pytest.raises(ConfigError, match=rf"this run has its files in {tmp_path}/one"):
        train(tmp_path / "new", f"dirs.checkpoints={tmp_path}/two")


def test_a_folder_that_cannot_be_made_is_one_clear_error(train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WhetError, match=r"cannot write .*/file/saved: a file stands where a folder is needed"
    ):
        train(tmp_path / "run", f"dirs.checkpoints={tmp_path}/file/saved")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run_dir=a/b", "dirs.checkpoints=a"], "contains run_dir"),
        (["run_dir=a/b", "dirs.checkpoints=a/b"], "contains run_dir"),
        (
            ["dirs.rollouts=x", "dirs.eval=x", "data.eval=[{path: tests/data/held_out.jsonl}]"],
            "give two different folders",
        ),
        (["run_dir=a", "dirs.checkpoints=b/{time}"], "only if run_dir contains it"),
        (["run_dir=a-{time}-{time}"], "once"),
        (["run_dir=a-{seed}"], "no other braces"),
        (["dirs.eval=x"], "nothing to evaluate"),
        (["dirs.rollouts=x", "track.rollouts_interval=0"], "no rollouts are written"),
        (["dirs.export=x"], "nothing is exported"),
    ],
)
def test_folders_that_cannot_be(overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert said in refused(*overrides)


# ---------------------------------------------------------------- never, fresh, {time}


def test_never_refuses_what_holds_a_run_and_fresh_moves_it_aside(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    folders = [f"dirs.checkpoints={tmp_path}/saved", f"dirs.rollouts={run_dir}/mine"]
    train(run_dir, *folders)
    with pytest.raises(CheckpointError, match=r"already holds a run.*checkpoint\.resume=fresh"):
        train(run_dir, "checkpoint.resume=never", *folders)
    (run_dir / "note.txt").write_text("the first")
    train(run_dir, "checkpoint.resume=fresh", "seed=5", *folders)
    assert not (run_dir / "note.txt").exists()
    assert not filecmp.cmp(finished / WEIGHTS, run_dir / WEIGHTS, shallow=False)
    (aside,) = tmp_path.glob("run.before-*")
    assert (aside / "note.txt").read_text() == "the first"
    same(finished, aside, "metrics.jsonl", WEIGHTS, "rollouts/main-step-000003.parquet")
    assert (aside / "checkpoints").resolve().parent == tmp_path.resolve()
    shutil.rmtree((aside / "checkpoints").resolve() / "0-main-000003")
    old = (aside / "checkpoints").resolve()
    train(aside, f"dirs.checkpoints={old}", f"dirs.rollouts={aside}/mine")
    same(finished, aside, "metrics.jsonl", WEIGHTS)


def test_fresh_in_an_empty_place_moves_nothing(finished: Path, train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", "checkpoint.resume=fresh")
    same(finished, tmp_path / "run", "metrics.jsonl", WEIGHTS)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def test_fresh_does_not_move_a_run_that_is_alive(finished: Path, train: Train, tmp_path: Path) -> None:
    run_dir = stopped(finished, tmp_path / "run", 2)
    command = [sys.executable, "-c", HOLD, str(run_dir / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(WhetError, match="is in use by"):
            train(run_dir, "checkpoint.resume=fresh")
        other.stdin.close()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_kill_while_a_run_is_moved_aside_loses_no_file(
    finished: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, saved = tmp_path / "run", f"dirs.checkpoints={tmp_path}/saved"
    train(run_dir, saved)
    before = {p.read_bytes() for p in tmp_path.rglob("*.safetensors")}
    rename, clock = Path.rename, iter(["20260101-000000", "20260101-000001"])
    monkeypatch.setattr(run_paths, "now", lambda: next(clock))

    def killed(self: Path, to: Path) -> Path:
        if self == run_dir:
            raise KeyboardInterrupt
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            train(run_dir, "checkpoint.resume=fresh", "seed=5", saved)
    assert {p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before
    train(run_dir, "checkpoint.resume=fresh", "seed=5", saved)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"run.before-20260101-000001", "saved.before-20260101-000000", "run", "saved"} <= names
    assert before <= {p.read_bytes() for p in tmp_path.rglob("*.safetensors")}
    same(finished, tmp_path / "run.before-20260101-000001", "metrics.jsonl")


def test_the_time_in_run_dir_stays_while_the_run_goes_on(
    finished: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(["20260101-000000", "20260101-000001", "20260101-000002", "20260101-000003"])
    monkeypatch.setattr(run_paths, "now", lambda: next(clock))
    pattern, saved = f"{tmp_path}/a-{{time}}/run", f"dirs.checkpoints={tmp_path}/saved-{{time}}"
    first = train(pattern, saved).run_dir
    assert first == tmp_path / "a-20260101-000000/run"
    assert (tmp_path / "saved-20260101-000000/0-main-000003").is_dir()
    assert yaml.safe_load((first / "config.yaml").read_text())["run_dir"] == str(first)
    shutil.rmtree(first / LAST)
    assert train(pattern, saved).run_dir == first, "unfinished: it goes on"
    same(finished, first, "metrics.jsonl", WEIGHTS)
    assert train(pattern, saved).run_dir == tmp_path / "a-20260101-000002/run", "finished: a new one"
    shutil.rmtree(tmp_path / "a-20260101-000002/run" / LAST)
    assert train(pattern, saved, "checkpoint.resume=never").run_dir == tmp_path / "a-20260101-000003/run"


def test_a_new_run_is_later_by_name_though_the_clock_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one by name is the one that resumes."""
    monkeypatch.setattr(run_paths, "now", lambda: "20260101-000000")
    assert run_paths.stamp_after([]) == run_paths.stamp_after(["20251231-235959"]) == "20260101-000000"
    assert run_paths.stamp_after(["20260101-000000"]) == "20260101-000001"
    assert run_paths.stamp_after(["20250101-000000", "20261231-235959"]) == "20270101-000000"
    assert run_paths.stamp_after(["99999999-999999"]) == "20260101-000000"


def test_only_directories_of_the_pattern_count(tmp_path: Path) -> None:
    for name in (
        "r-20260101-000001",
        "r-20250101-000009",
        "r-20270101-000000-x",
        "q-20280101-000000",
        "r-2029",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "r-20300101-000000").write_text("a file")
    assert run_paths.stamps(f"{tmp_path}/r-{{time}}") == ["20250101-000009", "20260101-000001"]
    assert run_paths.stamps(f"{tmp_path}/nowhere/{{time}}/x") == []


# ---------------------------------------------------------------- batches


def test_batches_hold_what_was_trained_on_token_by_token(train: Train, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, "track.batches_interval=2", "train.steps=4")
    assert [p.name for p in sorted((run_dir / "batches").iterdir())] == [
        "main-step-000002.parquet",
        "main-step-000004.parquet",
    ]
    played = pq.read_table(run_dir / "rollouts/main-step-000002.parquet").to_pylist()
    trained = {
        (row["uid"], row["index"]): row
        for row in pq.read_table(run_dir / "batches/main-step-000002.parquet").to_pylist()
    }
    compared = 0
    for row in played:
        if row["advantage"] is None:
            continue
        batch = trained.pop((row["uid"], row["index"]))
        assert batch["token_ids_N"] == row["token_ids"]
        mask = np.array(row["mask"], dtype=bool)
        assert batch["mask_N"] == mask.tolist()
        assert (
            np.array(batch["logp_sample_N"])[mask].tolist() == np.array(row["sample_logprobs"])[mask].tolist()
        )
        assert np.mean(np.array(batch["adv_N"])[mask]) == pytest.approx(row["advantage"], abs=1e-6)
        assert (batch["reward_R"], batch["length_S"]) == (np.float32(row["reward"]), [len(mask)])
        compared += 1
    assert compared == 8
    assert not trained


def test_batches_that_a_resumed_run_will_write_again_are_dropped(
    finished: Path, train: Train, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, "track.batches_interval=1", "checkpoint.keep=null")
    whole = {p.name: p.read_bytes() for p in (run_dir / "batches").iterdir()}
    for path in checkpoint.all_in(run_dir / "checkpoints")[1:]:
        shutil.rmtree(path)
    train(run_dir, "track.batches_interval=2", "checkpoint.keep=null")
    assert sorted(p.name for p in (run_dir / "batches").iterdir()) == [
        "main-step-000001.parquet",
        "main-step-000002.parquet",
    ]
    assert (run_dir / "batches/main-step-000002.parquet").read_bytes() == whole["main-step-000002.parquet"]
    same(finished, run_dir, "metrics.jsonl", WEIGHTS)


# ---------------------------------------------------------------- environment of rewards


def telling(response: str, task: Task) -> float:
    """1 where the variables are there; says in its exception what it saw, where they are not."""
    if (os.environ.get("JUDGE_KEY"), os.environ.get("PLACE")) == ("sk-veryverysecret", "here"):
        return 1.0
    raise ValueError("nothing was given")


ENV = {"JUDGE_KEY": "sk-veryverysecret", "PLACE": "here"}


def test_rewards_get_their_variables_and_no_secret_is_written(train: Train, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(
        run_dir,
        rewards=telling,
        reward_workers={"env": ENV},
        track={"trackers": ["jsonl"], "log_level": "debug"},
    )
    assert "JUDGE_KEY" not in os.environ
    assert all(line["reward/mean"] == 1.0 for line in whet.Result(run_dir, True).metrics)
    for path in run_dir.rglob("*"):
        assert not path.is_file() or b"veryverysecret" not in path.read_bytes(), path
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["reward_workers"]["env"] == {
        "JUDGE_KEY": "***",
        "PLACE": "here",
    }


def test_another_secret_is_no_change_and_another_variable_is_one() -> None:
    def config(**env: str) -> Any:
        return load(None, (), {**CONFIG, "reward_workers": {"env": env}}).config

    before = dump(config(JUDGE_KEY="a", PLACE="b"))
    assert free_changes(before, dump(config(JUDGE_KEY="c", PLACE="b"))) == []
    assert [c.key for c in free_changes(before, dump(config(JUDGE_KEY="a", PLACE="c")))] == [
        "reward_workers.env"
    ]
    assert before["reward_workers"]["env"] == {"JUDGE_KEY": "***", "PLACE": "b"}


def test_a_secret_in_a_log_line_is_struck_out(tmp_path: Path) -> None:
    from whet.track.log import close_logging, setup_logging

    learn({"reward_workers": {"env": ENV}})
    setup_logging(tmp_path, level="info")
    logging.getLogger("whet.test").info("the judge said: bad key sk-veryverysecret")
    close_logging()
    assert "bad key <redacted:reward_workers.env.JUDGE_KEY>" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"JUDGE_KEY": "***"}, r"reward_workers.env.JUDGE_KEY='${oc.env:JUDGE_KEY}'"),
        ({"A=B": "x"}, "cannot be an environment variable"),
        ({"A": 8000}, "reward_workers.env"),
    ],
)
def test_variables_that_cannot_be(env: dict[str, Any], said: str) -> None:
    assert said in refused(reward_workers={"env": env})


@pytest.mark.parametrize("name", ["API_KEY", "hf_token", "DB_PASSWORD", "CLIENT_SECRET", "AUTHORIZATION"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "PATH", "PLACE"])
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


# ---------------------------------------------------------------- imports


def both(response: str, task: Task) -> float:
    """1 where the reward process has run the imported file, and before this function was loaded."""
    return float(any(getattr(module, "WHET_TEST_MARK", 0) == 1 for module in list(sys.modules.values())))


def test_imports_run_here_and_in_the_reward_processes(train: Train, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    pids_file = str(tmp_path / "pids")
    code.write_text(
        f"import os\nWHET_TEST_MARK = 1\nwith open({pids_file!r}, 'a') as f:\n    print(os.getpid(), file=f)\n"
    )
    train(tmp_path / "run", f"imports=[{code}]", rewards=both)
    assert all(line["reward/mean"] == 1.0 for line in whet.Result(tmp_path / "run", True).metrics)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == len(set(pids)) == 2
    assert pids[1] == str(os.getpid()), "the reward processes first: they are forked before torch is there"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\nraise ValueError('boom')\n", r"ValueError: boom \(.*mine\.py, line 2\)"),
        ("def f(:\n", r"SyntaxError: .* \(.*mine\.py, line 1\)"),
        ("import json\n\njson.loads('{')\n", r"JSONDecodeError"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(.*mine\.py, line 2\)"),
        ("import no_such_package_of_whet\n", r"No module named .*mine\.py, line 1\)"),
    ],
)
@pytest.mark.parametrize("rewarded", [True, False])
def test_an_import_that_fails_is_named_with_its_line(
    train: Train, tmp_path: Path, code: str, said: str, rewarded: bool
) -> None:
    (tmp_path / "mine.py").write_text(code)
    sft = {} if rewarded else {
        "rewards": {},
        "algorithm": {"name": "sft"},
        "rollout": {"sampling": {"max_tokens": 8}},
        "reward_workers": {},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf"imports: .*mine\.py'.*{said}"):
        train(tmp_path / "run", f"imports=[{tmp_path / 'mine.py'}]", **sft)


@pytest.mark.parametrize(
    ("given", "said"), [("nowhere/x.py", "no such file"), ("a-b", "neither 'package.module'")]
)
def test_imports_that_cannot_be(given: str, said: str) -> None:
    assert said in refused(f"imports=[{given}]")

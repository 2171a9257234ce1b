"""What may change when a run goes on: every key has a class, advice can be followed, changes are told and kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import whet
from tiny import RUN
from whet import checkpoint
from whet.cli import app
from whet.config import memory, resuming
from whet.config.keys import column, keys
from whet.config.load import load
from whet.config.memory_estimate import check_memory
from whet.config.plan import plans
from whet.config.resuming import changes, class_of, fingerprint
from whet.config.secrets import dump
from whet.track import manifest, show
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, ConfigError, Task, WhetError

ROOT = Path(__file__).parents[1]
CONFIG = RUN | {"checkpoint": {"interval": 1, "keep": None, "export": False}}

Train = Callable[..., whet.Result]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def train(run_dir: Path, *overrides: str, **more: Any) -> whet.Result:
    return whet.train(overrides=[f"run_dir={run_dir}", *overrides], **{**CONFIG, **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that CONFIG is. Not to be written to."""
    path = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train(path)
    return path


def moved(run_dir: Path, to: Path) -> Path:
    """A copy that does not know that it was made elsewhere."""
    shutil.copytree(run_dir, to)
    config = to / "config.yaml"
    config.write_text(config.read_text().replace(str(run_dir), str(to)))
    return to


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run as it was after two steps."""
    run_dir = moved(finished, tmp_path / "run")
    shutil.rmtree(checkpoint.all_in(run_dir / "checkpoints")[2])
    return run_dir


def metrics(run_dir: Path) -> bytes:
    return (run_dir / "metrics.jsonl").read_bytes()


def record_of(run_dir: Path) -> dict[str, bytes]:
    """Every file of a run by its name; without those that say what was tried."""
    said = ("run.log", "lock", "stacks")
    found = ((str(path.relative_to(run_dir)), path) for path in run_dir.rglob("*") if path.is_file())
    return {name: path.read_bytes() for name, path in found if not name.startswith(said)}


def history(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "manifest.json").read_text()).get("changes", [])


def config(*overrides: str, **more: Any) -> Any:
    return load(None, overrides, {**CONFIG, **more}).config


def told(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Changes between two configs: their classes by key."""
    return {c.key: c.kind for c in changes(dump(config(*old)), dump(config(*new)))}


# ---------------------------------------------------------------- classes


def test_every_key_belongs_to_exactly_one_class() -> None:
    rows = list(column("resume").items())
    known = {".".join(path) for path in keys()}
    assert [key for key, _ in rows if key not in known] == []
    for leaf in (key for key in keys().values() if key.section is None):
        above = {".".join(leaf.path[:n]) for n in range(1, len(leaf.path) + 1)}
        found = [kind for key, kind in rows if key in above]
        assert len(found) == 1, f"{'.'.join(leaf.path)}: {found}; give it one class in config/keys.tsv"
        assert class_of(leaf.path) == found[0]


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.scratch.num_hidden_layers=2", "identity"),
        ("train.optimizer.name=sgd", "identity"),
        (
            "buffer.replay.queue=true",
            "identity",
        ),  # groups that wait in one place would have none in the other
        ("buffer.replay.share=0.5", "numbers"),
        ("train.optimizer.lr=0.5", "numbers"),
        ("algorithm.entropy_coef=0.1", "numbers"),
        ("train.micro_batch_tokens=32", "rounding"),
        ("train.gradient_checkpointing=true", "rounding"),
        ("train.offload=[optimizer]", "rounding"),
        ("machine.threads=2", "rounding"),
        ("rollout.timeout_s=5", "free"),
        ("reward_workers.memory_mb=5", "free"),
        ("sync.timeout_s=5", "free"),
        ("eval.samples=2", "free"),
        ("checkpoint.keep=7", "free"),
        ("track.rollouts_interval=3", "free"),
        ("machine.memory_mb=9999", "free"),
    ],
)
def test_the_class_of_a_change(key: str, kind: str) -> None:
    assert list(told((), (key,)).values()) == [kind]


def test_more_steps_are_free_where_no_schedule_ends_with_them() -> None:
    cosine = "train.optimizer.schedule.type=cosine"
    assert told((), ("train.steps=9",)) == {"train.steps": "free"}
    assert told((cosine,), (cosine, "train.steps=9")) == {"train.steps": "numbers"}
    ends = (cosine, "train.optimizer.schedule.total_steps=6")
    assert told(ends, (*ends, "train.steps=9")) == {"train.steps": "free"}


def test_evaluations_are_free_where_they_do_not_bring_weight_syncs_along() -> None:
    rarely = "rollout.sync_interval=2"
    assert told((), ("eval.interval=2",)) == {"eval.interval": "free"}
    assert told((rarely,), (rarely, "eval.interval=2")) == {"eval.interval": "numbers"}


def test_other_data_changes_the_tokens_only_of_a_checkpoint_that_did_not_keep_its_tokenizer(
    tmp_path: Path,
) -> None:
    other = config("data.train=[{path: other.jsonl}]")

    def kinds(saved: Any) -> list[str]:
        return [c.kind for c in resuming.taken(tmp_path, saved, other, at=("main", 1), change=True)]

    saved = fingerprint(config())
    with pytest.raises(CheckpointError, match=r"data.train\[0\].path"):  # as version 0.2 wrote it
        kinds(saved)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert kinds(saved) == ["numbers"]


def test_a_run_on_other_data_keeps_its_built_tokenizer(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "words.jsonl", tmp_path / "run"
    lines = Path("tests/data/words.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines))
    source = f"data.train=[{{path: {data}}}]"
    train(run_dir, source)
    shutil.rmtree(checkpoint.all_in(run_dir / "checkpoints")[2])
    new = json.loads(lines[0]) | {"prompt": "\u00e9\u00e8\u00ea>", "answer": "\u00ea\u00e8\u00e9"}
    data.write_text("\n".join([json.dumps(new)] * len(lines)))
    train(run_dir, source, change=True)
    first, *_, last = (p / "tokenizer.json" for p in checkpoint.all_in(run_dir / "checkpoints"))
    assert first.read_bytes() == last.read_bytes()
    assert "\u00e9" not in last.read_text()
    data.unlink()  # an export needs no data
    assert CliRunner().invoke(app, ["export", str(run_dir), "-o", str(tmp_path / "model")]).exit_code == 0
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_stage_is_compared_as_it_is_resolved() -> None:
    base = {**CONFIG, "stages": [{"name": "a"}, {"name": "b", "train": {"steps": 5}}]}
    other = {**CONFIG, "stages": [{"name": "a", "train": {"steps": 3}}, {"name": "b", "train": {"steps": 6}}]}
    found = changes(dump(load(None, (), base).config), dump(load(None, (), other).config))
    assert [(c.key, c.old, c.new, c.kind) for c in found] == [("stages.b.train.steps", 5, 6, "free")]
    everywhere = changes(dump(load(None, (), base).config), dump(load(None, ("seed=3",), base).config))
    assert [c.key for c in everywhere] == ["seed"], "once, not by stage"


def test_an_algorithm_of_another_version_changes_what_it_says_and_nothing_else() -> None:
    """Its method, and so the learning rate that the method has by itself, is not known here."""
    of_old = dump(config("train.optimizer.lr=null")) | {"algorithm": {"name": "grpo", "gone": 1}}
    other = of_old | {"seed": 3}
    assert [c.key for c in changes(of_old, other)] == ["seed"]
    bare = {**of_old, "algorithm": {"name": "gone", "loss": {"clip_low": 0.1}}}
    moved = {**of_old, "algorithm": {"name": "gone", "loss": {"clip_low": 0.2}}}
    assert [c.key for c in changes(bare, moved)] == ["algorithm.loss.clip_low"], "a table without a name"


def test_keys_of_another_version_are_no_change() -> None:
    """A checkpoint of an older version lacks new keys, which then have their defaults, and may have some that are gone;
    it remembers free keys, too."""
    old = fingerprint(config())
    del old["train"]["temperature"], old["reference"], old["data"]["train"][0]["weight"]
    old |= {"abandoned": {"key": 3}, "reward_workers": {"timeout_s": 4.0}}
    old["train"]["abandoned"], old["train"]["micro_batch_tokens"] = True, 7
    assert resuming.taken(Path("c"), old, config(), at=("main", 1), change=False) == []
    with pytest.raises(CheckpointError, match=r"train\.temperature: null -> 0\.5"):
        resuming.taken(Path("c"), old, config("train.temperature=0.5"), at=("main", 1), change=False)


def test_long_values_are_told_from_where_they_differ() -> None:
    """Both were told by their beginnings, which were the same."""
    prompt = "You are a helpful assistant. Think before you answer, and end with the number alone. " * 3
    was, now = (
        config(f"data.train=[{{path: tests/data/words.jsonl, system_prompt: '{prompt}{end}'}}]")
        for end in ("Be brief.", "Be thorough.")
    )
    (text,) = [str(c) for c in changes(dump(was), dump(now)) if c.key.endswith("system_prompt")]
    key, _, told = text.partition(": ")
    assert (key, told) == (
        "data.train[0].system_prompt",
        '...he number alone. Be brief." -> ...he number alone. Be thorough."',
    )


def test_a_rate_that_is_not_given_is_that_of_its_method() -> None:
    at, none = "train.optimizer.lr", ("train.optimizer.lr=null",)
    assert told(none, (f"{at}=1e-6",)) == {}
    assert told((f"{at}=2e-6",), none) == {at: "numbers"}
    sft = "algorithm.name=sft"
    (change,) = changes(dump(config(sft, f"{at}=1e-6")), dump(config(sft, *none)))
    assert (change.key, change.old, change.new) == (at, 1e-6, 1e-5)


# ---------------------------------------------------------------- going on


def test_what_the_checkpoint_holds_may_not_mean_something_else(stopped: Path) -> None:
    for change in (False, True):
        with pytest.raises(CheckpointError) as caught:
            train(stopped, "model.scratch.intermediate_size=64", change=change)
        said = str(caught.value)
        assert "model.scratch.intermediate_size: 32 -> 64: give the old value, or start a new run" in said
        assert "--change" not in said


def test_other_numbers_are_a_branch_that_has_to_be_asked_for(
    stopped: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"train\.optimizer\.lr: 0\.01 -> 0\.05: `whet train --change`"):
        train(stopped, "train.optimizer.lr=0.05", "data.seed=4")
    assert history(stopped) == [], "nothing is written down of what was refused"
    train(stopped, "train.optimizer.lr=0.05", "data.seed=4", change=True)
    where = {"stage": "main", "step": 2, "kind": "branch"}
    assert history(stopped) == [
        {**where, "key": "data.seed", "old": None, "new": 4},
        {**where, "key": "train.optimizer.lr", "old": 0.01, "new": 0.05},
    ]
    log = (stopped / "run.log").read_text()
    assert "train.optimizer.lr: 0.01 -> 0.05: a branch of the run, from step 2 of stage 'main'" in log
    lines = metrics(stopped).splitlines(), metrics(finished).splitlines()
    assert [a == b for a, b in zip(*lines)] == [True, True, False]
    Console(width=120).print(show.summary(stopped))
    assert re.search(r"main +2 +train\.optimizer\.lr +0\.01 +0\.05", capsys.readouterr().out)
    train(stopped, "train.optimizer.lr=0.05", "data.seed=4")  # it is the config of the run now


KL = "algorithm.reward_kl.coef"
MOVING = "algorithm.reward_kl={coef: 0.5, target: 1000.0, horizon: 100}"
"""A KL that stays far below its target: each step of 8 rollouts multiplies its weight by 1 - 0.2 * 8 / 100 = 0.984."""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (f"{KL}=0.5", f"{KL}=0.25", [0.5, 0.5, 0.25]),
        (MOVING, MOVING.replace("horizon: 100", "horizon: 50"), [0.5, 0.5 * 0.984, 0.5 * 0.984**2]),
        (MOVING, MOVING.replace("0.5", "0.25"), [0.5, 0.5 * 0.984, 0.25]),
    ],
    ids=["a fixed weight", "a weight that moves", "another first weight"],
)
def test_a_branch_has_the_weight_of_the_kl_that_its_config_says(
    before: str, after: str, expected: list[float], tmp_path: Path
) -> None:
    train(tmp_path, before)
    shutil.rmtree(checkpoint.all_in(tmp_path / "checkpoints")[2])
    train(tmp_path, after, change=True)
    told = [json.loads(line)["train/kl_coef"] for line in metrics(tmp_path).splitlines()]
    assert told == pytest.approx(expected)


def test_a_branch_goes_with_what_was_written_after_it(stopped: Path, finished: Path) -> None:
    train(stopped, "train.optimizer.lr=0.05", change=True)
    first = checkpoint.all_in(stopped / "checkpoints")[0]
    train(stopped, f"checkpoint.resume={first}")
    assert [row for row in history(stopped) if row["kind"] == "branch"] == []
    assert metrics(stopped) == metrics(finished)


def test_other_rows_are_a_branch_too(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "words.jsonl", tmp_path / "run"
    lines = Path("tests/data/words.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines))
    source = f"data.train=[{{path: {data}}}]"
    train(run_dir, source)
    shutil.rmtree(checkpoint.all_in(run_dir / "checkpoints")[2])
    data.write_text("\n".join([*lines[1:], lines[0]]))
    before = record_of(run_dir)
    assert b'"step": 3' in before["metrics.jsonl"], "later than the checkpoint that is left"
    with pytest.raises(CheckpointError, match=r"'words' has changed since the run was saved .* --change"):
        train(run_dir, source, "rollout.timeout_s=77")
    assert record_of(run_dir) == before, "of a resume that is refused nothing changes"
    train(run_dir, source, change=True)
    assert [(row["step"], row["key"]) for row in history(run_dir)] == [(2, "rows of 'words'")]


def test_free_keys_are_taken_and_told_and_change_no_bit(stopped: Path, finished: Path) -> None:
    free = (
        "rollout.timeout_s=77",
        "reward_workers.timeout_s=8",
        "checkpoint.interval=5",
        "train.micro_batch_tokens=400",
    )
    train(stopped, *free, change=True)  # which makes no branch of them
    assert metrics(stopped) == metrics(finished)
    log = (stopped / "run.log").read_text()
    assert "resuming with rollout.timeout_s: 600.0 -> 77.0\n" in log
    assert (
        "resuming with train.micro_batch_tokens: null -> 400; the order of sums changes, so bits may differ"
        in log
    )
    assert {(r["step"], r["key"], r["old"], r["new"], r["kind"]) for r in history(stopped)} >= {
        (2, "reward_workers.timeout_s", 10.0, 8.0, "free"),
        (2, "checkpoint.interval", 1, 5, "free"),
    }


def test_more_steps_go_on_with_a_finished_run(finished: Path, tmp_path: Path) -> None:
    """They make the run that had them from its start; what was exported at the former end keeps the step's name."""
    run_dir = moved(finished, tmp_path / "run")
    train(run_dir, "checkpoint.export=true")
    train(run_dir, "checkpoint.export=true", "train.steps=5")
    train(tmp_path / "whole", "train.steps=5")
    assert metrics(run_dir) == metrics(tmp_path / "whole")
    assert {p.name for p in (run_dir / "export").iterdir()} == {"main", "main-step-000003"}
    with pytest.raises(
        CheckpointError, match=r"is at step 5 of stage 'main', but train\.steps=4 ends before"
    ):
        train(run_dir, "train.steps=4")


def test_failures_of_a_refill_are_counted_with_the_next_step_also_after_a_resume(tmp_path: Path) -> None:
    """Task 3 is uniform, so the first step samples task 4 beside; tasks 5 to 7 have no reward: 6 rollouts of 10."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def judge(response, task):\n"
        "    return float(sum(map(ord, response))) if task.answer == 'any' else task.answer"
    )
    answers = [*["any"] * 3, 1.0, "any", *["none"] * 3, *["any"] * 8]
    rows = [{"prompt": f"{'abcdefgh'[n % 8]}>", "answer": answer} for n, answer in enumerate(answers)]
    more: dict[str, Any] = {
        "data": {"max_prompt_tokens": 8, "order": "sequential", "train": [{"rows": rows}]},
        "rewards": {"judge": {"function": f"{rewards}:judge"}},
        "reward_workers": {"max_failure_rate": 0.7},
        "algorithm": {"name": "dapo"},
        "train": {**CONFIG["train"], "steps": 2},
    }
    run_dir = tmp_path / "run"
    train(run_dir, **more)
    whole = metrics(run_dir)
    shutil.rmtree(checkpoint.all_in(run_dir / "checkpoints")[1])
    train(run_dir, **more)
    assert metrics(run_dir) == whole


@pytest.mark.parametrize("key", ["rollout.max_staleness=1", "rollout.sync_interval=2"])
def test_more_steps_are_no_free_change_where_the_former_end_shows(tmp_path: Path, key: str) -> None:
    """The step after the former end was not sampled ahead, or by weights that were synced only because it was the end;
    a checkpoint before it goes on as the longer run."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    train(run_dir, key)
    train(whole, key, "train.steps=5")
    with pytest.raises(CheckpointError, match=r"different numbers from here on with train\.steps: 3 -> 5"):
        train(run_dir, key, "train.steps=5")
    train(moved(run_dir, tmp_path / "branch"), key, "train.steps=5", change=True)
    assert metrics(tmp_path / "branch") != metrics(whole)
    assert [(row["key"], row["kind"]) for row in history(tmp_path / "branch")] == [("train.steps", "branch")]
    shutil.rmtree(run_dir / "checkpoints/0-main-000003")
    train(run_dir, key, "train.steps=5")
    assert metrics(run_dir) == metrics(whole)


def test_the_command_line_takes_a_change(stopped: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    command = ["train", str(file), f"run_dir={stopped}", "seed=5"]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, CheckpointError)
    assert CliRunner().invoke(app, [*command, "--change"]).exit_code == 0
    assert [row["key"] for row in history(stopped)] == ["seed"]


# ---------------------------------------------------------------- advice


def out_of_memory(monkeypatch: pytest.MonkeyPatch, *, above: int) -> None:
    """A machine that has no room for micro-batches of more tokens than this, from the second step on."""
    whole = TorchEngine.update

    def update(self: TorchEngine, batch: Any, loss: Any) -> Any:
        if self.version >= 1 and self.cut.max_tokens > above and not self.cut.checkpoint:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
        return whole(self, batch, loss)

    monkeypatch.setattr(TorchEngine, "update", update)


def test_the_advice_after_running_out_of_memory_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory(monkeypatch, above=300)
    run_dir = tmp_path / "run"
    with pytest.raises(WhetError, match="stage 'main' ran out of memory: CUDA out of memory") as caught:
        train(run_dir, "train.micro_batch_tokens=512")
    advised = re.findall(r"([\w.]+=\w+) \(now (\w+)\)", str(caught.value))
    assert [key for key, _ in advised] == [
        "train.micro_batch_tokens=256",
        "rollout.max_num_seqs=128",
        "train.gradient_checkpointing=true",
    ]
    assert dict(advised)["train.micro_batch_tokens=256"] == "512"
    rollouts = (
        "a smaller train.tasks_per_step (now 4) or rollout.group_size (now 2), with `whet train --change`"
    )
    assert rollouts in str(caught.value)
    for number, (override, _) in enumerate(advised):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(run_dir, copy)
        given = ["train.micro_batch_tokens=512", override]
        if "max_num_seqs" in override:  # it is for sampling, and does not help here; it is taken nevertheless
            with pytest.raises(WhetError, match="ran out of memory"):
                train(copy, *given)
        else:
            assert train(copy, *given).finished
        assert override.partition("=")[0] in [row["key"] for row in history(copy)]


def test_rollouts_that_take_the_memory_name_what_their_number_is() -> None:
    parts = {"rollouts": 3, "policy": 1}
    first, _ = memory.advice(parts)
    assert first == "a lower train.tasks_per_step or a lower rollout.group_size"


def test_the_memory_plan_advises_a_run_that_goes_on_only_what_it_may_do() -> None:
    wide = (
        "model.scratch={hidden_size: 512, num_attention_heads: 8, num_hidden_layers: 12, "
        "max_position_embeddings: 64}"
    )
    planned = plans(load(None, (wide, "machine.memory_mb=100"), CONFIG))
    with pytest.raises(ConfigError, match=r"model\.lora"):
        check_memory(planned)
    with pytest.raises(ConfigError) as caught:
        check_memory(planned, going_on=True)
    advice = str(caught.value).partition("To reduce it: ")[2]
    named = [
        path
        for path in keys()
        if ".".join(path) in advice.replace(",", " ").split() or ".".join(path) in advice
    ]
    leaves = [path for path in named if keys()[path].section is None and len(path) > 1]
    assert leaves
    assert {class_of(path) for path in leaves} <= {"free", "rounding"}


def patient(response: str, task: Task) -> float:
    """A judge that needs longer than the first limit."""
    import time

    time.sleep(0.3)
    return float(len(response))


def test_the_advice_after_a_time_out_can_be_followed(tmp_path: Path) -> None:
    """All that a step could not score ends the run, naming the key; with more time the same command goes on."""
    run_dir, quick = tmp_path / "run", ["train.steps=1", "train.tasks_per_step=1"]
    with pytest.raises(WhetError, match=r"no result in 0\.05 s \(reward_workers\.timeout_s\)"):
        train(run_dir, *quick, "reward_workers.timeout_s=0.05", rewards=patient)
    assert train(run_dir, *quick, "reward_workers.timeout_s=20", rewards=patient).finished


def test_a_wait_that_was_in_vain_names_its_keys_and_the_run_goes_on_with_others(
    stopped: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.track.monitor import Monitor

    whole = Monitor.wait

    async def never(self: Monitor, awaitable: Any, what: str, **how: Any) -> Any:
        if what == "room" and how["within"].seconds < 1:
            import asyncio

            awaitable.close()
            awaitable = asyncio.sleep(60)
        return await whole(self, awaitable, what, **how)

    monkeypatch.setattr(Monitor, "wait", never)
    with pytest.raises(
        WhetError, match=r"waited 0\.1 s for room and timed out.* rollout\.timeout_s=0\.1 sets this limit"
    ):
        train(stopped, "rollout.timeout_s=0.1")
    train(stopped, "rollout.timeout_s=50")
    assert metrics(stopped) == metrics(finished)
    keys_told = [(row["key"], row["old"], row["new"]) for row in history(stopped)]
    assert ("rollout.timeout_s", 0.1, 50.0) in keys_told, "from the last start, not from the checkpoint"


# ---------------------------------------------------------------- another folder


def test_a_moved_run_does_not_begin_again_in_its_old_folder(stopped: Path, tmp_path: Path) -> None:
    moved = stopped.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=f"which was moved, .*: run_dir={moved} goes on there"):
        whet.train(moved / "config.yaml")
    assert not stopped.exists()
    result = whet.train(moved / "config.yaml", run_dir=str(moved))
    assert (result.run_dir, result.finished) == (moved, True)


# ---------------------------------------------------------------- another machine


def test_another_arithmetic_is_told_where_the_run_goes_on(stopped: Path) -> None:
    path = stopped / "manifest.json"
    text = json.loads(path.read_text())
    text["starts"][-1]["arithmetic"]["digest"] = "0"
    path.write_text(json.dumps(text))
    train(stopped)
    (line,) = [x for x in (stopped / "run.log").read_text().splitlines() if "computes differently" in x]
    assert "digest '0' -> " in line
    assert "From here on the bits of its results may differ" in line


def test_what_computes_is_compared_as_far_as_both_starts_tell() -> None:
    old = {"cpu": "A", "packages": {"torch": "2.13.0", "rich": "1"}}
    assert manifest.other_arithmetic(old, {"cpu": "A", "packages": {"torch": "2.13.0", "rich": "2"}}) is None
    assert "torch '2.13.0' -> '2.14.0'" in str(
        manifest.other_arithmetic(old, {"cpu": "A", "packages": {"torch": "2.14.0"}})
    )
    now = {**old, "arithmetic": {"cpu": "A", "instructions": "avx512"}}
    assert manifest.other_arithmetic(old, now) is None, "the old start does not know its instruction set"
    other = {**old, "arithmetic": {"cpu": "A", "instructions": "avx2"}}
    assert "instructions 'avx512' -> 'avx2'" in str(manifest.other_arithmetic(now, other))

"""`whet show`: what a person reads of a run, from its directory alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml
from rich.console import Console, RenderableType
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from whet.track import files, manifest, show
from whet.track.record import RunDirectory
from whet.types import DataError, Rollout, Task

CONFIG = {
    "seed": 7,
    "model": {"path": "models/tiny"},
    "eval": {"success": 0.5},
    "stages": [{"name": "sft", "algorithm": {"name": "sft"}}, {"name": "grpo"}],
}


def reply(uid: int, text: str, *, reward: float | None, index: int = 0, error: str | None = None) -> Rollout:
    word = ["abc", "xyz", "mno"][uid]
    return Rollout(
        task=Task(uid=uid, source="spell", prompt=f"{word}>", answer=word[::-1]),
        index=index,
        token_ids=[0, 1],
        mask=[0, 1],
        logprobs=[0.0, -0.125],
        sample_logprobs=[0.0, -0.0625],
        versions=[-1, 41],
        finish_reason="stop",
        text=text,
        reward=reward,
        reward_parts={} if reward is None else {"exact": reward, "form\x1b": 0.25},
        error=error,
    )


def make(path: Path) -> RunDirectory:
    run = RunDirectory(path, ["sft", "grpo"])
    run.write_config(yaml.safe_dump(CONFIG))
    run.write_manifest(manifest.describe(config="", seed=7))
    run.log("sft", 0, metrics=held_out(0.0), timings={"time/evaluate_s": 1.0})
    counts = {"rollout/count": 4, "rollout/failed_count": 0}
    for step in (1, 2):
        numbers = {"train/loss": 3.0 / step, "rollout/tokens_sum": 1000, **counts}
        run.log("sft", step, metrics=numbers, timings={"time/update_s": 2.0, "time/step_s": 2.0})
    run.log("grpo", 0, metrics=held_out(1 / 3), timings={})
    first = [reply(n, text, reward=float(n == 1)) for n, text in enumerate(["abc", "zyx", "no"])]
    run.write_eval("grpo", 0, first)
    counts = {"rollout/count": 4, "rollout/failed_count": 1, "rollout/failed/timeout_count": 1}
    seconds = {"time/generate_s": 1.0, "time/update_s": 3.0, "time/step_s": 4.0}
    good, bad = reply(0, "cba", reward=1.0), reply(0, "x\x1b[2J", reward=None, index=1, error="timeout: 10 s")
    for step in (1, 2):
        numbers = {"reward/mean": step / 4, "rollout/tokens_sum": 50, **counts}
        run.log("grpo", step, metrics=numbers, timings=seconds)
        run.write_rollouts("grpo", step, [good, bad], advantages=[0.5, None])
    run.log("grpo", 2, metrics=held_out(2 / 3), timings={})
    last = [reply(0, "cba", reward=0.5), reply(1, "zyx", reward=1.0), reply(2, "no", reward=None)]
    run.write_eval("grpo", 2, last)
    return run


def held_out(share: float) -> dict[str, float]:
    return {"eval/accuracy": share, "eval/spell/mean@1": share}


def lines_of(view: RenderableType, *, width: int = 140) -> list[str]:
    """The printed lines, with runs of spaces as one."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(view)
    assert "\x1b" not in captured.get()
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_the_summary(tmp_path: Path) -> None:
    make(tmp_path).close()
    lines = lines_of(show.summary(tmp_path))
    for expected in (
        f"run {tmp_path}, not running",
        "model models/tiny",
        "algorithm sft then grpo",
        "seed 7",
        "stage steps time tokens tokens/s reward held-out",
        "sft 2 0:05 2.0k 400 - 0.000 → 0.000",
        "grpo 2 0:08 100 12 0.250 → 0.500 0.333 → 0.667",
        "stage step accuracy spell/mean@1",
        "grpo 2 0.667 0.667",
        "phase sft grpo",
        "update 4.0 (80%) 6.0 (75%)",
        "generate 0.0 (0%) 2.0 (25%)",
        "evaluate 1.0 (20%) 0.0 (0%)",
        "grpo timeout 2 25.00%",
        "number grpo step 2",
        "reward/mean 0.5",
    ):
        assert expected in lines, expected


def test_a_run_in_progress_and_one_killed_in_a_line(tmp_path: Path) -> None:
    make(tmp_path).close()
    with files.RunLock(tmp_path):
        assert f"run {tmp_path}, running" in lines_of(show.summary(tmp_path))
    whole = lines_of(show.summary(tmp_path))
    for name in ("metrics.jsonl", "timings.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"reward/mean": 0.9, "sta')
    assert lines_of(show.summary(tmp_path)) == whole


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    RunDirectory(tmp_path, ["s"]).close()
    assert "stage steps time tokens tokens/s reward held-out" in lines_of(show.summary(tmp_path))
    assert show.before_and_after(show.read(tmp_path), limit=3) == []
    with pytest.raises(DataError, match="It has: none"):
        show.rollouts(tmp_path, 1)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run directory: it has no metrics\.jsonl"):
        show.summary(tmp_path)


def test_the_report_shows_mended_tasks_first(tmp_path: Path) -> None:
    make(tmp_path).close()
    lines = lines_of(show.report(tmp_path, curve=tmp_path / "curve.png", examples=2))
    assert lines == [
        "stage steps time tokens held-out start held-out end",
        "sft 2 0:05 2.0k 0.000 0.000",
        "grpo 2 0:08 100 0.333 0.667",
        "",
        "prompt expected before after",
        "abc> cba abc cba",
        "xyz> zyx zyx zyx",
        "",
        f"curve {tmp_path}/curve.png",
    ]


def test_success_is_judged_as_the_config_says(tmp_path: Path) -> None:
    make(tmp_path).close()
    passed = {e.prompt: e.passed_after for e in show.before_and_after(show.read(tmp_path), limit=9)}
    assert passed == {"abc>": True, "xyz>": True, "mno>": False}
    config = CONFIG | {"eval": {"success": 0.0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    passed = {e.prompt: e.passed_after for e in show.before_and_after(show.read(tmp_path), limit=9)}
    assert passed == {"abc>": True, "xyz>": True, "mno>": False}  # mno was not scored
    assert [e.passed_before for e in show.before_and_after(show.read(tmp_path), limit=9)] == [True] * 3


def test_single_rollouts(tmp_path: Path) -> None:
    make(tmp_path).close()
    lines = lines_of(show.rollouts(tmp_path, 2))
    assert lines == [
        "grpo-step-000002",
        "",
        "task 0 · rollout 0 · spell · reward 1 · advantage +0.500 · 1 tokens · stop",
        "abc>cba",
        "expected cba",
        r"parts exact 1 form\x1b 0.25",
        "",
        "task 0 · rollout 1 · spell · no reward · 1 tokens · stop",
        r"abc>x\x1b[2J",
        "expected cba",
        "error timeout: 10 s",
    ]


def test_tokens_are_listed_with_what_was_recorded(tmp_path: Path) -> None:
    make(tmp_path).close()
    bare = lines_of(show.rollouts(tmp_path, 2, uid=0, tokens=True))
    assert "0 0" in bare
    assert "1 1 -0.1250 -0.0625 41" in bare
    (tmp_path / "export").mkdir()
    Tokenizer(WordLevel({"abc>": 0, "cba": 1}, unk_token="abc>")).save(
        str(tmp_path / "export" / "tokenizer.json")
    )
    named = lines_of(show.rollouts(tmp_path, 2, tokens=True))
    assert "0 0 'abc>'" in named
    assert "1 1 'cba' -0.1250 -0.0625 41" in named


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    make(tmp_path).close()
    with pytest.raises(DataError, match=r"no rollouts of step 9\. It has: grpo: 1 to 2, 2 steps"):
        show.rollouts(tmp_path, 9)
    with pytest.raises(DataError, match="no rollouts of step 1 of stage 'sft'"):
        show.rollouts(tmp_path, 1, stage="sft")
    with pytest.raises(DataError, match="has no task 77"):
        show.rollouts(tmp_path, 1, uid=77)

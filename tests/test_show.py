"""`whet show`: what a person reads of a run, from its directory alone."""

from __future__ import annotations

import io
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console, RenderableType
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import whet
from tiny import RUN
from whet.config import screen
from whet.config.load import load
from whet.simulate import Costs, SimulatedSchedule
from whet.track import costs, files, manifest, show, time_report
from whet.track.record import RunDirectory
from whet.types import DataError, Rollout, Task
from whet.view import runs
from whet.view.source import Shown

CONFIG = {
    "seed": 7,
    "model": {"path": "models/tiny"},
    "eval": {"success": 0.5},
    "stages": [{"name": "sft", "algorithm": {"name": "sft"}}, {"name": "grpo"}],
}


def reply(uid: int, text: str, *, reward: float | None, index: int = 0, error: str | None = None) -> Rollout:
    word = ["abc", "xyz", "mno"][uid]
    return Rollout.one_strand(
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
    seconds |= {"reward/seconds/exact": 0.5, "reward/seconds/form\x1b": 1.5}
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


def test_phases_beside_others_are_no_longer_time_of_the_stage(tmp_path: Path) -> None:
    """Where the trainer trains meanwhile: a step of 4 s in which sampling was under way for 3 s."""
    run = RunDirectory(tmp_path, ["rl"])
    run.log("rl", 0, metrics=held_out(0.5), timings={"time/evaluate_s": 2.0})
    seconds = {"time/generate_s": 3.0, "time/update_s": 3.0, "time/other_s": 1.0, "time/step_s": 4.0}
    run.log("rl", 1, metrics={"rollout/tokens_sum": 60}, timings=seconds)
    run.close()
    (stage,) = [show.numbers_of(show.read(tmp_path), "rl")]
    assert (stage.seconds, stage.tokens) == (6.0, 60)
    lines = lines_of(show.summary(tmp_path))
    assert "rl 1 0:06 60 10 - 0.500 → 0.500" in lines
    assert lines[lines.index("phase rl") + 1 :][:4] == [
        "generate 3.0 (50%)", "update 3.0 (50%)", "evaluate 2.0 (33%)", "other 1.0 (17%)"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "\u202eabc", "it's \\x \x1b", "x\udcffy"])
def test_a_command_of_a_path_that_a_terminal_would_obey(name: str, tmp_path: Path) -> None:
    """It is written out, and is the same path for the shell that it is typed in."""
    path = tmp_path / name
    make(path).close()
    (path / "checkpoints" / "1-grpo-000002").mkdir(parents=True)
    (line,) = [text for text in lines_of(show.summary(path)) if "whet train" in text]
    told = runs.commands(Shown(0, path), "grpo", 1, 0, 0)
    for command, place in ((line[line.index("whet train") :], path / "config.yaml"), (told["show"], path)):
        assert command.isprintable()
        words = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True
        ).stdout
        assert words.split(b"\0")[2] == os.fsencode(place)
    with suppress(DataError):
        show.rollouts(path, 1)


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
        "reward sft grpo",
        "form\\x1b - 3.0 (75%)",
        "exact - 1.0 (25%)",
        "grpo timeout 2 25.00%",
        "number grpo step 2",
        "reward/mean 0.5",
    ):
        assert expected in lines, expected


def test_an_evaluation_without_rewards_has_its_losses_and_is_no_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["sft"])
    run.log("sft", 1, metrics={"train/loss": 2.5, "rollout/count": 4}, timings={})
    run.log("sft", 1, metrics={"eval/a/b/loss_nats": 2.25, "eval/a/b/perplexity": 9.5}, timings={})
    run.close()
    lines = lines_of(show.summary(tmp_path))
    at = lines.index("held-out")
    assert lines[at + 1 : at + 3] == ["stage step a/b/loss_nats", "sft 1 2.250"]
    assert lines[lines.index("newest numbers") + 1 :] == [
        "number sft step 1",
        "rollout/count 4",
        "train/loss 2.5",
    ]


def test_checkpoints_to_go_on_from_with_their_commands(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    make(run).close()
    title = "checkpoints to continue from"
    assert title not in lines_of(show.summary(run))
    for step in range(2, 9):
        (run / "checkpoints" / f"1-grpo-{step:06d}").mkdir(parents=True)
    lines = lines_of(show.summary(run), width=600)
    at = lines.index(title)
    file, folder = f"'{run}/config.yaml'", f"{run}/checkpoints"
    assert lines[at + 1 : at + 3] == [
        f"grpo step 8 whet train {file}",
        f"grpo step 7 whet train {file} 'checkpoint.resume={folder}/1-grpo-000007' 'run_dir={run}-from-7'",
    ]
    assert lines[at + 5 : at + 7] == [
        f"grpo step 4 whet train {file} 'checkpoint.resume={folder}/1-grpo-000004' 'run_dir={run}-from-4'",
        f"and 2 earlier ones in {folder}",
    ]
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "rewards": {"r": {"function": "object:r"}}}))
    lines = lines_of(show.summary(run), width=600)
    assert f"grpo step 8 whet.train('{run}/config.yaml', rewards=...)" in lines
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "run_dir": str(tmp_path / "before")}))
    moved = f"grpo step 8 whet train {file} 'run_dir={run}'"
    assert moved in lines_of(show.summary(run), width=600)


ODD = (
    "a b",
    "it's",
    'q"q',
    "a #b",
    "#h",
    "7",
    "true",
    "1e3",
    "~x",
    "-x",
    "a: b",
    "[x]",
    "*x",
    "&x",
    "!x",
    "x ",
)


@pytest.mark.parametrize("name", ODD)
def test_what_a_shell_makes_of_the_command_goes_on_from_that_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    data = RUN["data"] | {"train": [{"path": str(Path("tests/data/words.jsonl").absolute())}]}
    rewards = {"letters": {"function": str(Path("tests/resume/rewards.py").absolute()) + ":shared_letters"}}
    monkeypatch.chdir(tmp_path)
    run = Path(name)
    make(run).close()
    config = RUN | {"data": data, "rewards": rewards, "run_dir": f"./{name}"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for step in (2, 4):
        (run / "checkpoints" / f"0-main-{step:06d}").mkdir(parents=True)
    with io.StringIO() as printed:
        Console(file=printed, width=40).print(show.summary(run), crop=False)
        lines = [line for line in printed.getvalue().splitlines() if " whet train " in line]
    found = []
    for line in lines:
        command = line.partition(" whet train ")[2]
        shell = subprocess.run(["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
        file, *overrides = shell.stdout.decode().split("\0")[:-1]
        assert file[0] not in "-~", "an option, or somebody's home"
        loaded = load(file, overrides).config
        found.append((Path(loaded.run_dir), loaded.checkpoint.resume))
    other = Path(f"{name}-from-2")
    assert [place for place, _ in found] == [run, other]
    assert Path(found[1][1]) == run / "checkpoints" / "0-main-000002"


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_terminal_gets_every_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    make(tmp_path / "run").close()
    monkeypatch.setenv("COLUMNS", str(width))
    screen.show(show.summary(tmp_path / "run"))
    costs_ = Costs(rollout_s=[1.0], train_s=1234.5, slots=2)
    way = SimulatedSchedule(mode="asynchronous", groups_per_step=2, group_size=2, max_staleness=2, steps=3)
    screen.show(costs.predictions(costs_, way, stage="main"))
    printed = capsys.readouterr().out
    assert "…" not in printed
    for whole in (
        "tokens/s",
        "spell/mean@1",
        "asynchronous 2",
        "rollouts/s",
        "dropped",
    ):
        assert whole in printed, whole


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
    with pytest.raises(DataError, match="rollouts there: none"):
        show.rollouts(tmp_path, 1)


def test_a_run_that_was_killed_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("2026-01-01T00:00:00Z INFO whet.job: kernels: \x1b[2J\n")
    lines = lines_of(show.summary(tmp_path), width=300)
    assert lines[0].startswith(
        f"run {tmp_path}, not running; it has no step yet. run.log ends with: 2026-01-01"
    )
    assert r"kernels: \x1b[2J" in lines[0]
    assert "algorithm ?" in lines
    (tmp_path / "run.log").unlink()
    with pytest.raises(DataError, match="is not a run directory"):
        show.summary(tmp_path)


def test_a_run_that_an_error_has_ended(tmp_path: Path) -> None:
    """That of the last start, if that ended so; a line that a reward prints is none."""
    directory = make(tmp_path)
    start = {"started_utc": "2026-01-01T00:00:05+00:00"}
    directory.write_manifest(manifest.describe(config="", seed=7) | start)
    directory.close()
    log, ended = tmp_path / "run.log", "ERROR whet.api: the run ended: 4 of 4 rollouts: \x1b (r.py:9)\n"
    for text, said in (
        (f"2026-01-01T00:00:04Z {ended}", False),
        (f"2026-01-01T00:00:06Z INFO whet.guard.printed: reward 'r': 2026-01-01T00:00:06Z {ended}", False),
        (f"2026-01-01T00:00:06Z {ended}Traceback\n", True),
    ):
        log.write_text(text)
        assert (r"ended by 4 of 4 rollouts: \x1b (r.py:9)" in lines_of(show.summary(tmp_path))) is said
    with files.RunLock(tmp_path):
        assert not any("ended by" in line for line in lines_of(show.summary(tmp_path)))


def test_a_limit_says_what_it_leaves_out(tmp_path: Path) -> None:
    make(tmp_path).close()
    lines = lines_of(show.rollouts(tmp_path, 2, limit=1))
    assert lines[-1] == "1 more rollouts; --limit 2 shows all"
    assert "task 0 · rollout 1 · spell · no reward · 1 tokens · stop" not in lines
    assert lines_of(show.rollouts(tmp_path, 2, limit=2)) == lines_of(show.rollouts(tmp_path, 2))


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_given_replies_are_shown_as_they_are_trained(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": "ab>", "response": "ba", "rejected": "ab"}]
    data = {"max_prompt_tokens": 8, "train": [{"name": "w", "rows": rows}]}
    given = {"rewards": {}, "data": data, "rollout": {"sampling": {"max_tokens": 4}}, "track": {}}
    steps = ["train.steps=2", "train.tasks_per_step=1", "checkpoint.export=false"]
    whet.train(**{**RUN, **given}, overrides=[f"run_dir={tmp_path}", f"algorithm.name={name}", *steps])
    lines = lines_of(show.rollouts(tmp_path, 1))
    replies = [line for line in lines if line.startswith(("reply", "chosen", "rejected"))]
    assert replies == {"sft": ["reply ba"], "dpo": ["chosen ba", "rejected ab"]}[name]
    assert "prompt ab>" in lines
    with pytest.raises(DataError, match="only the first step's are written"):
        show.rollouts(tmp_path, 2)


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
        "prompt abc>",
        "reply cba",
        "expected cba",
        r"parts exact 1 form\x1b 0.25",
        "",
        "task 0 · rollout 1 · spell · no reward · 1 tokens · stop",
        "prompt abc>",
        r"reply x\x1b[2J",
        "expected cba",
        "error timeout: 10 s",
    ]


def test_the_tokenizer_is_found_in_folders_elsewhere(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "disk" / "0-rl-000001"
    run.mkdir()
    saved.mkdir(parents=True)
    assert show.tokenizer_of(run) is None
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(saved / "tokenizer.json"))
    (run / "checkpoints").symlink_to(saved.parent)  # dirs.checkpoints
    found = show.tokenizer_of(run)
    assert found is not None
    assert found.get_vocab_size() == 2


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
    with pytest.raises(DataError, match=r"no rollouts of step 9; rollouts there: grpo: 1 to 2, 2 steps"):
        show.rollouts(tmp_path, 9)
    with pytest.raises(DataError, match="no rollouts of step 1 of stage 'sft'"):
        show.rollouts(tmp_path, 1, stage="sft")
    for stage in (None, "sft"):
        with pytest.raises(DataError, match=r"none is not a run directory: .* no such folder"):
            show.rollouts(tmp_path / "none", 1, stage=stage)
    with pytest.raises(DataError, match="has no task 77"):
        show.rollouts(tmp_path, 1, uid=77)


# ---------------------------------------------------------------- a record that is no record


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("metrics.jsonl", "no\n{}\n", r"metrics.jsonl line 1 is not JSON"),
        ("metrics.jsonl", "\x00\xff\n", r"metrics.jsonl line 1 is not JSON"),
        ("metrics.jsonl", '{"step": 1}\n', r"metrics.jsonl line 1 does not name its stage and step"),
        ("metrics.jsonl", '{"stage": "[/x]", "step": 1}\n', "line 1 does not name its stage"),
        ("metrics.jsonl", '{"stage": "s", "step": true}\n', "line 1 does not name its stage"),
        ("metrics.jsonl", '{"stage": "s", "step": 1, "a": "b"}\n', "line 1: 'a' is 'b', expected a number"),
        ("metrics.jsonl", f'{{"stage": "s", "step": 1, "a": {10**400}}}\n', "line 1: 'a' is '1000"),
        ("metrics.jsonl", '{"stage": "s", "step": 1, "a": 1, "a": 2}\n', "line 1 is not JSON.*given twice"),
        ("timings.jsonl", "[" * 100_000 + "\n", "line 1 is not JSON.*nest more than 50 levels"),
        ("config.yaml", "a: [", r"config.yaml:\d: not valid YAML"),
        ("config.yaml", "[1]", "config.yaml: expected the sections of a config"),
        ("config.yaml", "model: [1]", r"config.yaml: model is '\[1\]', expected a section"),
        ("config.yaml", "stages: {a: 1}", "config.yaml: stages is .* expected a list"),
        (
            "config.yaml",
            "stages: [{algorithm: grpo}]",
            r"stages\[0\]: algorithm is 'grpo', expected a section",
        ),
        ("manifest.json", "", "manifest.json is empty; .* move it away: the run goes on without the record"),
        ("manifest.json", "{", "manifest.json: not JSON: .* Put a copy of it back, or move it away"),
        ("manifest.json", "[]", "manifest.json: expected a JSON object; .* or move it away"),
        ("manifest.json", '{"starts": []}', r"manifest.json: starts is '\[\]', expected a list"),
        ("manifest.json", '{"starts": [{"packages": 1}]}', r"starts\[0\] is .*, which no run writes"),
        ("manifest.json", '{"starts": [{"arithmetic": [1]}]}', r"starts\[0\] is .*, which no run writes"),
        ("manifest.json", '{"changes": [{"stage": "s"}]}', r"changes\[0\] is .*, which no run writes"),
    ],
)
def test_a_damaged_record_is_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=rf"{tmp_path}.*{says}"):
        show.summary(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "line 2 is not an event of a timeline"),
        ('{"ph": "M", "pid": 1}', "line 2 is not an event"),
        (
            '{"ph": "X", "name": "a", "cat": "b", "ts": 0, "dur": 1, "pid": 1, "tid": 0, "args": {}}',
            "is not an event",
        ),
        (
            '{"ph": "X", "name": "a", "cat": "work", "ts": 0, "dur": -1, "pid": 1, "tid": 0, '
            '"args": {"stage": "s", "step": 1}}',
            "is not an event",
        ),
        (
            '{"ph": "X", "name": "a", "cat": "work", "ts": 0, "dur": 1, "pid": 7, "tid": 0, '
            '"args": {"stage": "s", "step": 1}}',
            "'a' is on a lane that has no name",
        ),
    ],
)
def test_a_damaged_timeline_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(f"[\n{line},\n{line}\n]\n")
    with pytest.raises(DataError, match=f"timeline.json.*{says}"):
        time_report.show(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("answer", "no json", "row 1, answer: not JSON"),
        ("turns", '[{"start": 0, "end": null}]', "row 1: turns is not a list of turns"),
        ("prompt", None, "row 1: prompt is null"),
        ("mask", [None, 1], "row 1: mask is null"),
        ("logprobs", [0.5], "row 1: token_ids, mask, .* differ in length"),
        ("reward_parts", [("a", None)], "row 1: reward_parts is null"),
        ("reward_parts", [("a", 1.0), ("a", 2.0)], "reward_parts cannot be read"),
    ],
)
def test_rollouts_that_no_run_writes_are_named(column: str, value: object, says: str, tmp_path: Path) -> None:
    make(tmp_path)
    (file,) = tmp_path.glob("rollouts/grpo-step-000001.parquet")
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[0][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    with pytest.raises(DataError, match=rf"grpo-step-000001.parquet.*{says}"):
        show.rollouts(tmp_path, 1)


def test_a_file_of_other_columns_is_no_file_of_rollouts(tmp_path: Path) -> None:
    make(tmp_path)
    (file,) = tmp_path.glob("rollouts/grpo-step-000001.parquet")
    pq.write_table(pq.read_table(file).drop_columns(["mask"]), file)
    with pytest.raises(
        DataError, match=r"is not a file of rollouts: mask; is the file from another program, or damaged"
    ):
        show.rollouts(tmp_path, 1)


def test_seconds_that_are_none_are_not_simulated(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "timings.jsonl"
    file.write_text(file.read_text().replace('"time/update_s": 3.0', '"time/update_s": null'))
    with pytest.raises(
        DataError, match=r"timings.jsonl: seconds of step 2 of stage 'grpo' are not numbers >= 0"
    ):
        costs.measured(tmp_path, "grpo", slots=2)


def test_a_tokenizer_that_is_damaged_is_named(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export/tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(DataError, match=r"export/tokenizer.json: not a readable tokenizer"):
        show.rollouts(tmp_path, 1, tokens=True)


def test_seconds_that_are_all_0_are_not_simulated(tmp_path: Path) -> None:
    make(tmp_path)
    file = tmp_path / "timings.jsonl"
    text = file.read_text().replace('"time/update_s": 3.0', '"time/update_s": 0.0')
    file.write_text(text)
    assert costs.measured(tmp_path, "grpo", slots=2).train_s == 0, "sampling alone took time"
    file.write_text(text.replace('"time/generate_s": 1.0', '"time/generate_s": 0.0'))
    with pytest.raises(
        DataError, match=r"timings.jsonl: the seconds of stage 'grpo' are 0, so no speed follows"
    ):
        costs.measured(tmp_path, "grpo", slots=2)

"""`whet view`: what its server answers of a run directory, to whom, and what it never does."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import WordLevel
from typer.testing import CliRunner

import whet
from test_show import held_out, make, reply
from tiny import RUN
from whet.api import Result
from whet.cli import app
from whet.track import files, manifest, show
from whet.track.overview import read as read_run
from whet.track.record import RunDirectory
from whet.track.time_report import measure
from whet.track.timeline import STEPS, Span, Timeline, read
from whet.track.written import ROLLOUTS, read_rollouts
from whet.types import ConfigError, DataError, Json, Message, ToolCall, WhetError
from whet.view import answers, batches, compare, export, records, rewards, rollouts, source
from whet.view import server as viewer_server
from whet.view.server import Answers, ViewerServer
from whet.view.source import BadQuestion, NotThere, ShownRuns, find_runs

HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[2J\x00\x07\u202e",
    "</textarea>&amp;'\"",
    "x" * 1_000_000,
    "\u2028\U0001f600",
]


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three steps, with evaluations, batches and an export. Not to be written to."""
    path = tmp_path_factory.mktemp("view") / "trained"
    held = {"eval": [{"path": "tests/data/words.jsonl", "limit": 4}]}
    record = {"track": {**RUN["track"], "batches_interval": 1}, "eval": {"interval": 1}}
    config = {**RUN, **record, "data": {**RUN["data"], **held}}
    whet.train(**config, overrides=[f"run_dir={path}"])
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run directory of two stages whose numbers are known."""
    path = tmp_path / "made"
    make(path).close()
    return path


def ask(path: Path | list[Path], url: str) -> Any:
    """The answer as a page gets it."""
    runs = ShownRuns(path if isinstance(path, list) else [path])
    return json.loads(gzip.decompress(answers.encoded(answers.answer(runs, url))))


def unpacked(column: Any) -> list[Any]:
    """A column of summaries as a plain list."""
    if isinstance(column, list):
        return column
    return [None if code < 0 else column["values"][code] for code in column["codes"]]


def every_url(path: Path) -> list[str]:
    """An address of each route, for what the run has."""
    stages = ShownRuns([path]).runs[0].stages
    urls = ["api/runs", "api/runs/0", "api/compare?a=0&b=0", "api/runs/0/search?q=a"]
    urls += [
        f"api/runs/0/{name}" for name in ("metrics", "ledger", "timeline", "evals", "rollouts?files=all")
    ]
    for stage in stages:
        urls += [f"api/runs/0/{name}?stage={stage}" for name in ("rewards", "mismatch")]
        urls += [f"api/runs/0/rollouts?stage={stage}&step=1", f"api/runs/0/rollouts/{stage}/1/0"]
        urls += [f"api/runs/0/groups/{stage}/1/0", f"api/compare/replies?a=0&b=0&stage={stage}&step=1"]
        urls += [
            f"api/runs/0/evals/flips?stage={stage}&from=0&to=2",
            f"api/runs/0/rollouts?of=eval&stage={stage}&step=0",
        ]
    return urls


# ---------------------------------------------------------------- what is answered


def test_a_real_run_is_answered_as_its_files_say(trained: Path) -> None:
    (line,) = ask(trained, "api/runs")["runs"]
    assert (line["name"], line["state"], line["error"], line["faults"]) == ("trained", "finished", None, 0)
    (stage,) = line["stages"]
    assert (line["step"], line["steps_planned"]) == (3, 3)
    whole = ask(trained, "api/runs/0")
    assert whole["problems"] == whole["waits"] == []
    assert whole["config"]["train"]["steps"] == 3
    assert "train:" in whole["config_yaml"]
    assert whole["stages"][0]["learning"]["trend"].startswith("too early to say")
    assert whole["checkpoints"][0]["command"].startswith(f"whet train {trained}/config.yaml")
    assert [(f["step"], f["rows"]) for f in whole["rollout_files"]] == [(1, 8), (2, 8), (3, 8)]
    assert len(whole["eval_files"]) == 4
    lines = [json.loads(text) for text in (trained / "metrics.jsonl").read_text().splitlines()]
    told = ask(trained, "api/runs/0/metrics?names=reward%2Fmean,eval%2Faccuracy,time%2Fstep_s")
    assert told["lines"] == len(lines)
    for name in ("reward/mean", "eval/accuracy", "step"):
        assert told["rows"][name] == [line.get(name) for line in lines]
    seconds = [s for s in told["rows"]["time/step_s"] if s is not None]
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert ask(trained, "api/runs/0/metrics?from=2")["rows"]["step"] == [line["step"] for line in lines[2:]]
    timeline = ask(trained, "api/runs/0/timeline")
    assert timeline["seconds"] > 0
    rows = [dict(zip(timeline["bubble"]["columns"], row, strict=True)) for row in timeline["bubble"]["rows"]]
    (measured,) = measure(read(trained / "timeline.json"))
    assert {row["process"]: row["bubble"] for row in rows} == {
        "all": round(measured.bubble, 4),
        **{p.name: round(1 - p.busy, 4) for p in measured.processes},
    }
    evals = ask(trained, "api/runs/0/evals")
    assert [row[:3] for row in evals["rows"] if row[2] == "all"] == [[stage, n, "all"] for n in range(4)]


def test_evaluations_are_drawn_over_the_steps_of_all_stages(made: Path) -> None:
    """A stage begins after the last step of the one before, which need not be evaluated: here that of step 0 alone."""
    told = ask(made, "api/runs/0/evals")
    assert told["stages"] == [["sft", 2], ["grpo", 2]]
    assert [row[:2] for row in told["rows"] if row[2] == "all"] == [["sft", 0], ["grpo", 0], ["grpo", 2]]


def test_summaries_are_those_of_the_rollouts(trained: Path) -> None:
    stage = ShownRuns([trained]).runs[0].stages[0]
    listed = ask(trained, "api/runs/0/rollouts?files=all")
    columns = {name: unpacked(column) for name, column in listed["columns"].items()}
    assert columns["step"] == [1] * 8 + [2] * 8 + [3] * 8
    assert columns["row"] == [*range(8)] * 3
    for step in (1, 2, 3):
        rows = read_rollouts(trained / f"rollouts/{stage}-step-{step:06d}.parquet")
        here = {name: column[8 * step - 8 : 8 * step] for name, column in columns.items()}
        one = ask(trained, f"api/runs/0/rollouts?stage={stage}&step={step}")["columns"]
        for name in one:
            assert unpacked(one[name]) == here[name]
        for name in ("uid", "index", "source", "reward", "advantage", "finish_reason", "stop_reason"):
            assert here[name] == [row[name] for row in rows]
        assert here["tokens"] == [sum(row["mask"]) for row in rows]
        assert here["text"] == [row["text"][:80] for row in rows]
        for n, row in enumerate(rows):
            own = [r["reward"] for r in rows if r["uid"] == row["uid"]]
            assert here["group_reward_mean"][n] == pytest.approx(sum(own) / len(own))


def test_one_rollout_comes_whole_with_the_text_of_its_tokens(trained: Path) -> None:
    stage = ShownRuns([trained]).runs[0].stages[0]
    rows = read_rollouts(trained / f"rollouts/{stage}-step-000002.parquet")
    (file,) = (trained / "export").rglob("tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    for n, row in enumerate(rows):
        told = ask(trained, f"api/runs/0/rollouts/{stage}/2/{n}")
        for name, value in row.items():
            assert told[name] == value, name
        assert [len(p) for p in told["pieces"]] == row["strand_tokens"]
        assert "".join(told["pieces"][0]) == tokenizer.decode(row["token_ids"], skip_special_tokens=False)
        group = [m for m, other in enumerate(rows) if other["uid"] == row["uid"]]
        assert told["group"]["rows"] == group
        assert told["trainer_logprobs"] == row["logprobs"]  # log-prob parity: they are equal to the bit
        assert told["group"]["rewards"] == [rows[m]["reward"] for m in group]
        assert told["commands"]["show"].endswith(f"--step 2 --task {row['uid']} --tokens")
    told = ask(trained, f"api/runs/0/groups/{stage}/2/{rows[0]['uid']}")
    assert [r["row"] for r in told["rows"]] == [m for m, r in enumerate(rows) if r["uid"] == rows[0]["uid"]]
    assert told["note"].startswith("2 rollouts of this task are in the record")


def test_pieces_of_bytes_join_to_the_text() -> None:
    """Each token is one byte: a character of four bytes is given to its last token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in ("a\U0001f600b", "\u4f60\u597d, \xe9t\xe9", "", " leading", "\n\n\t"):
        ids = tokenizer.encode(text).ids
        found = rollouts.pieces(ids, tokenizer)
        assert len(found) == len(ids)
        assert "".join(found) == text
    assert rollouts.pieces(tokenizer.encode("a\U0001f600").ids, tokenizer) == ["a", "", "", "", "\U0001f600"]
    cut = tokenizer.encode("a\U0001f600").ids[:3]
    assert "".join(rollouts.pieces(cut, tokenizer)) == tokenizer.decode(cut)
    ids = tokenizer.encode("ab").ids
    assert rollouts.pieces([ids[0], -1, ids[1]], tokenizer) == ["a", "", "b"]


def test_rewards_are_spread_as_worked_by_hand(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
    some = [reply(0, f"good one two {n}", reward=float(n), index=n) for n in range(5)]
    run.write_rollouts("s", 1, [*some, reply(1, "x", reward=None, index=0, error="timeout: 1 s")])
    run.close()
    told = ask(tmp_path, "api/runs/0/rewards?stage=s")
    spread = told["parts"]["reward"]
    assert spread["quantiles"] == [[0.0, 0.4, 1.0, 2.0, 3.0, 3.6, 4.0]]
    assert (spread["mean"], spread["count"]) == ([2.0], [5])
    assert told["sources"]["spell"] == spread
    assert list(told["parts"]) == ["reward", "exact", "form\x1b"]
    assert told["correlation"]["names"] == ["reward", "exact", "form\x1b"]
    assert told["correlation"]["values"] == [[1.0, 1.0, None], [1.0, 1.0, None], [None, None, None]]
    assert told["extremes"]["best"][0] == [1, 4, 4.0, "good one two 4"]
    assert told["extremes"]["worst"][0] == [1, 0, 0.0, "good one two 0"]
    assert told["ngrams"]["winners"] == []  # the two that win share the words with those that do not


def test_rewards_of_a_run_that_goes_on_are_spread_for_its_new_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages ask every two seconds, also after thousands of steps."""
    quantile, spread = np.quantile, list[int]()
    monkeypatch.setattr(
        np, "quantile", lambda some, *rest: (spread.append(len(some)), quantile(some, *rest))[1]
    )
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
    some = [reply(0, "good", reward=float(n), index=n) for n in range(5)]
    for step in range(1, 4):
        run.write_rollouts("s", step, some)
    runs = ShownRuns([tmp_path])
    told = answers.answer(runs, "api/runs/0/rewards?stage=s")
    of_a_step = len(told["parts"]) + len(told["sources"])
    assert spread == [5] * 3 * of_a_step
    run.write_rollouts("s", 4, some[:4])
    run.close()
    told = answers.answer(runs, "api/runs/0/rewards?stage=s")
    assert spread[3 * of_a_step :] == [4] * of_a_step
    assert told["parts"]["reward"]["count"] == [5, 5, 5, 4]


def test_what_winners_repeat_is_counted(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
    texts = ["I am very sure", "I am very sure indeed", "I do not know", "I do not know it"]
    run.write_rollouts("s", 1, [reply(0, t, reward=float(n < 2), index=n) for n, t in enumerate(texts)])
    run.close()
    told = ask(tmp_path, "api/runs/0/rewards?stage=s")["ngrams"]
    assert told["winners"][0] == ["I am very sure", 2, 0]
    assert told["losers"][0] == ["I do not know", 0, 2]


def test_no_rollout_of_a_uniform_group_wins_or_loses(tmp_path: Path) -> None:
    """The mean of three times 0.1 is above 0.1."""
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.1}, timings={})
    run.write_rollouts("s", 1, [reply(0, "as good as the others", reward=0.1, index=n) for n in range(3)])
    run.close()
    told = ask(tmp_path, "api/runs/0/rewards?stage=s")["ngrams"]
    assert (told["winners"], told["losers"]) == ([], [])
    assert told["of"].startswith("rollouts above (0) and below (0)")


def batch(uid: int, index: int, *, trainer: list[float | None], engine: list[float]) -> dict[str, Any]:
    """A row of a file of batches: a token of the prompt, then sampled ones."""
    n = len(engine)
    return {
        "uid": uid, "index": index, "token_ids_N": [0, *range(1, n + 1)], "mask_N": [False] + [True] * n,
        "logp_old_N": [0.0, *trainer], "logp_sample_N": [0.0, *engine], "adv_N": [0.0] + [0.5] * n,
    }  # fmt: skip


def write_batch(path: Path, rows: list[dict[str, Any]]) -> None:
    schema = pa.schema([(name, kind) for name, kind in batches.COLUMNS.items() if name in rows[0]])
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def test_differences_of_log_probs_are_those_of_metrics_and_batches(made: Path) -> None:
    run = RunDirectory(made, ["sft", "grpo"])
    for step in (3, 4):
        run.log(
            "grpo",
            step,
            metrics={"train/mismatch_mean_nats": 0.5 * step, "train/mismatch_max_nats": 4.0},
            timings={},
        )
    run.close()
    told = ask(made, "api/runs/0/mismatch?stage=grpo")
    assert (told["steps"], told["mean"], told["max"], told["p99"]) == (
        [3, 4],
        [1.5, 2.0],
        [4.0, 4.0],
        [None, None],
    )
    assert (told["counts"], told["worst"]) == ([], None)
    assert "track.batches_interval" in told["note"]
    rows = [
        batch(0, 1, trainer=[-1.0, -2.0], engine=[-1.0, -2.0625]),
        batch(0, 0, trainer=[None, -3.0], engine=[-1.0, -2.5]),  # of one no model computed the log-prob
    ]
    write_batch(made / "batches/grpo-step-000002.parquet", rows)
    told = ask(made, "api/runs/0/mismatch?stage=grpo")
    assert told["steps"] == [2, 3, 4]
    assert (told["mean"][0], told["max"][0]) == (None, None)
    assert told["p99"][0] == pytest.approx(0.0625 + 0.98 * (0.5 - 0.0625))  # of 0, 0.0625, 0.5
    classes = [
        next(n for n, edge in enumerate(told["edges"]) if edge > size) - 1 for size in (0.0, 0.0625, 0.5)
    ]
    assert [n for n, count in enumerate(told["counts"][0]) if count == 1] == classes
    assert sum(told["counts"][0]) == 3
    assert told["counts"][1:] == [[0] * len(told["counts"][0])] * 2
    assert told["worst"] == [[2, 0, 2, "2", -0.5], [2, 1, 2, "2", 0.0625]]
    assert "1 tokens were not computed" in told["note"]
    (made / "export").mkdir()
    Tokenizer(WordLevel({"abc>": 0, "cba": 2}, unk_token="abc>")).save(str(made / "export/tokenizer.json"))
    assert ask(made, "api/runs/0/mismatch?stage=grpo")["worst"][0][3] == "cba"


def test_a_rollout_has_what_its_batch_says_of_tokens(made: Path) -> None:
    path = made / "batches/grpo-step-000002.parquet"
    write_batch(path, [batch(0, 1, trainer=[-9.0], engine=[0.0]), batch(0, 0, trainer=[-0.5], engine=[0.0])])
    told = ask(made, "api/runs/0/rollouts/grpo/2/0")
    assert (told["trainer_logprobs"], told["advantages"]) == ([0.0, -0.5], [0.0, 0.5])
    assert "entropy" not in told
    assert "trainer_logprobs" not in ask(made, "api/runs/0/rollouts/grpo/1/0")
    assert "trainer_logprobs" not in ask(made, "api/runs/0/rollouts/grpo/2/0?of=eval")
    other = batch(0, 0, trainer=[-0.5], engine=[0.0]) | {"token_ids_N": [0, 9]}
    write_batch(path, [other])  # a rollout of other tokens is another one
    assert "trainer_logprobs" not in ask(made, "api/runs/0/rollouts/grpo/2/0")
    pq.write_table(pa.table({"uid": ["a"]}), path)
    with pytest.raises(DataError, match=r"grpo-step-000002\.parquet"):
        ask(made, "api/runs/0/rollouts/grpo/2/0")
    (problem,) = ask(made, "api/runs/0/mismatch?stage=grpo")["problems"]
    assert "grpo-step-000002.parquet" in problem


def test_the_ledger_counts_and_names_filters(made: Path) -> None:
    told = ask(made, "api/runs/0/ledger")
    stage = told["stages"][1]
    assert (stage["stage"], stage["steps"]) == ("grpo", [1, 2])
    assert stage["counts"]["fault: timeout"] == [1, 1]
    assert stage["totals"] == {"finished": 8, "without a reward": 2, "fault: timeout": 2}
    assert told["filters"] == {"finished": "", "without a reward": "fault=1", "fault: timeout": "fault=1"}


@pytest.mark.parametrize(
    "words", [["--rollouts", "5"], ["--export", "FILE", "--port", "8645"], ["--export", "FILE", "--no-open"]]
)
def test_options_without_effect_are_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(viewer_server, "serve", lambda *_, **__: None)
    file = str(tmp_path / "report.html")
    given = [file if word == "FILE" else word for word in words]
    found = CliRunner().invoke(app, ["view", str(made), *given])
    assert isinstance(found.exception, ConfigError)
    assert "has no effect with" in str(found.exception)


def test_an_evaluation_without_rewards_is_no_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "sft", ["sft"])
    counts = {"rollout/count": 4, "ledger/pending_rollouts": 2}
    run.log("sft", 1, metrics=counts, timings={"time/update_s": 3.0})
    run.log("sft", 1, metrics={"eval/a/loss_nats": 2.5}, timings={"time/evaluate_s": 1.0})
    run.close()
    (stage,) = ask(run.path, "api/runs/0/ledger")["stages"]
    assert (stage["steps"], stage["totals"]["pending"]) == ([1], 2)
    rows = ask(run.path, "api/runs/0/metrics?names=time/update_s,time/evaluate_s")["rows"]
    assert (rows["time/update_s"], rows["time/evaluate_s"]) == ([3.0, None], [None, 1.0])


def test_flips_are_tasks_that_changed_sides(made: Path) -> None:
    told = ask(made, "api/runs/0/evals/flips?stage=grpo&from=0&to=2")
    assert [(f["uid"], f["before"], f["after"], f["answer"]) for f in told["mended"]] == [
        (0, "abc", "cba", "cba")
    ]
    assert (told["broken"], told["tasks"]) == ([], 3)
    back = ask(made, "api/runs/0/evals/flips?stage=grpo&from=2&to=0")
    assert [f["uid"] for f in back["broken"]] == [0]


def test_a_stage_has_its_own_mark_of_success(made: Path) -> None:
    """As its accuracy has: a reply of reward 0.5 passes in a stage whose eval.success is 0.5, in no other one."""
    config = yaml.safe_load((made / "config.yaml").read_text())
    for all_stages, own, right in ((1.0, 0.5, True), (0.5, 0.75, False)):
        config["eval"] = {"success": all_stages}
        config["stages"][1]["eval"] = {"success": own}
        (made / "config.yaml").write_text(yaml.safe_dump(config))
        told = ask(made, "api/runs/0/evals/flips?stage=grpo&from=0&to=2")
        assert [f["uid"] for f in told["mended"]] == [0] * right
        examples = show.before_and_after(read_run(made), limit=3)
        assert [e.passed_after for e in examples if e.prompt == "abc>"] == [right]


def test_all_flips_and_pairs_are_counted(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more than are listed, too."""
    monkeypatch.setattr(records, "MOST_FLIPS", 0)
    told = ask(made, "api/runs/0/evals/flips?stage=grpo&from=0&to=2")
    assert (told["mended"], told["counts"]) == ([], {"mended": 1, "broken": 0})
    monkeypatch.setattr(compare, "MOST_PAIRS", 1)
    pairs = ask([made, made], "api/compare/replies?a=0&b=1&stage=grpo&step=1")
    assert (len(pairs["pairs"]), pairs["count"]) == (1, 2)


def test_two_runs_are_compared(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    both = [made, other]
    same = ask(both, "api/compare?a=0&b=1")
    assert (same["config"], same["first_difference"]) == ([], None)
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"reward/mean": 0.5', '"reward/mean": 0.75'))
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("seed: 7", "seed: 8"))
    told = ask(both, "api/compare?a=0&b=1")
    assert told["config"] == [["seed", 7, 8]]
    assert told["first_difference"] == {"stage": "grpo", "step": 2, "name": "reward/mean"}
    assert "reward/mean" in told["metrics"]
    pairs = ask(both, "api/compare/replies?a=0&b=1&stage=grpo&step=1")["pairs"]
    assert [(p["uid"], p["index"], p["a"]["text"], p["b"]["reward"]) for p in pairs] == [
        (0, 0, "cba", 1.0),
        (0, 1, "x\x1b[2J", None),
    ]


def test_replies_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    """Whole prompts make a pair, and whole replies are equal or not; a list shows their beginnings."""
    same = "A long one, which two of them have in common up to here and for some more words. " * 6
    for name, (prompt, text) in {"a": ("1", "1"), "b": ("2", "2")}.items():
        run = RunDirectory(tmp_path / name, ["s"])
        run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
        first, second = (reply(n, same + text * n, reward=0.0) for n in range(2))
        other = replace(first, task=replace(first.task, uid=2, prompt=same + prompt))
        run.write_rollouts("s", 1, [first, second, other])
        run.close()
    told = ask([tmp_path / "a", tmp_path / "b"], "api/compare/replies?a=0&b=1&stage=s&step=1")
    assert [(pair["uid"], pair["differ"]) for pair in told["pairs"]] == [(0, False), (1, True)]
    assert told["count"] == 2
    assert same.startswith(told["pairs"][1]["a"]["text"])


def test_nan_is_equal_to_itself_in_a_comparison() -> None:
    lines: Any = [{"stage": "s", "step": 1, "a": math.nan}]
    assert compare.first_difference(lines, [dict(lines[0])]) is None
    assert compare.first_difference(lines, [{"stage": "s", "step": 1, "a": 1.0}])["name"] == "a"


def test_lines_of_one_run_alone_are_no_difference(tmp_path: Path) -> None:
    """A branch begins later, was evaluated at other steps and counts something more: their steps have their own
    numbers."""
    whole, branch = RunDirectory(tmp_path / "whole", ["s"]), RunDirectory(tmp_path / "branch", ["s"])
    for step in (1, 2, 3, 4):
        whole.log("s", step, metrics={"a": 1.0 * step}, timings={})
    for step in (3, 4):
        branch.log("s", step, metrics={"a": 1.0 * step, "b": 1.0}, timings={})
        branch.log("s", step, metrics=held_out(0.5), timings={})
    whole.close()
    branch.close()
    both = [tmp_path / "whole", tmp_path / "branch"]
    told = ask(both, "api/compare?a=0&b=1")
    assert (told["lines"], told["first_difference"]) == (2, None)
    branch = RunDirectory(tmp_path / "branch", ["s"])
    branch.log("s", 5, metrics={"a": 5.0}, timings={})
    whole = RunDirectory(tmp_path / "whole", ["s"])
    whole.log("s", 5, metrics={"a": 6.0}, timings={})
    whole.close()
    branch.close()
    assert ask(both, "api/compare?a=0&b=1")["first_difference"] == {"stage": "s", "step": 5, "name": "a"}


def test_the_page_of_a_group_says_where_dropped_rollouts_are(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"ledger/rejected/uniform_rollouts": 2}, timings={})
    run.write_rollouts(
        "s", 1, [reply(0, "x", reward=0.0, index=n) for n in range(2)], advantages=[None, None]
    )
    run.close()
    told = ask(tmp_path, "api/runs/0/groups/s/1/0")
    assert told["note"].endswith(
        "uniform 2; those that were finished are in the record, without an advantage."
    )
    assert [row["advantage"] for row in told["rows"]] == [None, None]


def test_search_finds_texts_whatever_their_case(made: Path) -> None:
    assert ask(made, "api/runs/0/search?q=CBA")["hits"] == [["grpo", 1, 0], ["grpo", 2, 0]]
    assert ask(made, "api/runs/0/search?q=abc%3E&stage=grpo&step=2")["hits"] == [
        ["grpo", 2, 0],
        ["grpo", 2, 1],
    ]
    assert ask(made, "api/runs/0/search?q=%1b%5B2j")["hits"] == [["grpo", 1, 1], ["grpo", 2, 1]]
    assert ask(made, "api/runs/0/search?q=.*") == {"hits": [], "complete": True, "problems": []}


def test_search_finds_what_messages_say_and_no_name_of_their_fields(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
    call = ToolCall("look_up", {"\u00fcber": ['say "hi"', 42]}, id="c1")
    said = (
        Message("assistant", "Wait.", reasoning="hmm", tool_calls=(call,)),
        Message("tool", "nothing", tool_call_id="c1", name="look_up"),
    )
    run.write_rollouts("s", 1, [replace(reply(0, "xyz", reward=0.0), messages=said)])
    run.close()

    def found(text: str) -> bool:
        told = ask(tmp_path, f"api/runs/0/search?q={quote(text)}")
        assert told["problems"] == []
        return told["hits"] == [["s", 1, 0]]

    for text in ("WAIT", "hmm", "look_up", "\u00dcBER", 'say "hi"', "42", "nothing", "c1"):
        assert found(text), text
    for text in ("assistant", "role", "content", "tool_calls", "arguments", "{"):
        assert not found(text), text


def test_search_in_damaged_messages_is_a_problem(made: Path) -> None:
    (file,) = (made / "rollouts").glob("*-000001.parquet")
    table = pq.read_table(file)
    for text in ("damaged", '["damaged"]', '[{"role": "user", "content": ["damaged"]}]'):
        column = pa.array([text] * table.num_rows)
        pq.write_table(table.set_column(table.schema.get_field_index("messages"), "messages", column), file)
        told = ask(made, "api/runs/0/search?q=damaged")
        assert told["hits"] == []
        assert "messages is not a list of messages" in told["problems"][0]


def test_a_timeline_of_many_spans_is_merged() -> None:
    spans = [
        Span(
            name="a", lane="w", kind="work", stage="s", step=n, start_ns=n * 10, end_ns=n * 10 + 9, busy_ns=9
        )
        for n in range(100_000)
    ]
    (some,) = records.merged({("", "w"): spans}, 1e6 / 1e9).values()
    assert len(some) <= records.MOST_SPANS
    assert (some[0][2], some[-1][3]) == (0, spans[-1].end_ns)
    assert all(one[3] <= other[2] for one, other in pairwise(some))
    assert len(next(iter(records.merged({("", "w"): spans[:50]}, 1.0).values()))) == 50


@pytest.mark.parametrize("seconds", [0.0, 1e-7])
def test_a_timeline_of_more_lanes_than_spans_are_drawn(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """As that of thousands of ranks: each lane keeps a span, and the joining of neighbours ends."""
    passes, closer = [0], records.closer

    def counted(some: Sequence[records.Drawn], width: float) -> list[records.Drawn]:
        passes[0] += 1
        assert passes[0] < 1000
        return closer(some, width)

    monkeypatch.setattr(records, "MOST_SPANS", 3)
    monkeypatch.setattr(records, "closer", counted)
    span = Span(name="a", lane="w", kind="work", stage="s", step=1, start_ns=0, end_ns=0, busy_ns=0)
    last = replace(span, start_ns=round(seconds * 1e9), end_ns=round(seconds * 1e9))
    found = records.merged({("", str(n)): [span, last] for n in range(5)}, seconds)
    assert [len(some) for some in found.values()] == [1] * 5


# ---------------------------------------------------------------- runs that are not whole


def test_a_run_in_progress_is_followed(made: Path) -> None:
    runs = ShownRuns([made])
    url = "api/runs/0/metrics?names=reward%2Fmean&from="
    count = answers.answer(runs, url + "0")["lines"]
    before = runs.runs[0].stamp()
    with open(made / "metrics.jsonl", "a") as file:
        file.write('{"stage": "grpo", "step": 3, "reward/mean": 0.75}\n{"stage": "grpo", "st')
        file.flush()
        told = answers.answer(runs, f"{url}{count}")
        assert told == {"lines": count + 1, "rows": {"stage": ["grpo"], "step": [3], "reward/mean": [0.75]}}
        assert runs.runs[0].stamp() != before
        file.write('ep": 4, "reward/mean": null}\n')
    assert answers.answer(runs, f"{url}{count + 1}")["rows"]["reward/mean"] == [None]
    with files.RunLock(made):
        assert answers.answer(runs, "api/runs")["runs"][0]["state"] == "running"
    assert answers.answer(runs, "api/runs")["runs"][0]["state"] == "not running"
    run = RunDirectory(made, ["sft", "grpo"])  # it goes on from a checkpoint: what came after is gone
    run.truncate_to(0, 1)
    run.close()
    assert answers.answer(runs, url + "0")["lines"] == 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_another_run_in_the_same_place_is_read_from_its_beginning(name: str, made: Path) -> None:
    """A run that was deleted and started again: its file may have the inode of the one before, and be longer by now."""
    runs = ShownRuns([made])
    before = runs.runs[0].lines(name)
    other = {"stage": "grpo", "step": 1, "train/loss": 0.25}
    lines = [json.dumps(other | {"step": step}) + "\n" for step in range(1, 200)]
    with (made / name).open("w") as file:  # the inode stays
        file.writelines(lines)
    assert len("".join(lines)) > len(before) * 300
    assert runs.runs[0].lines(name) == [json.loads(line) for line in lines]


def test_a_timeline_that_grows_is_read_on_and_one_written_anew_from_its_beginning(made: Path) -> None:
    path = made / "timeline.json"
    line = Timeline(path)
    with line.span("generate", STEPS):
        pass
    line.close()
    runs = ShownRuns([made])
    before = answers.answer(runs, "api/runs/0/timeline")
    span = json.loads(path.read_text())[-1]
    later = span | {"ts": span["ts"] + 60_000_000, "args": span["args"] | {"step": 99}}
    text = path.read_text().removesuffix("\n]\n")
    with path.open("r+") as file:  # as a run writes it: the inode stays
        file.write(f"{text},\n{json.dumps(later)}\n]\n")
    grown = answers.answer(runs, "api/runs/0/timeline")
    assert grown["seconds"] > before["seconds"] + 50
    assert grown == answers.answer(ShownRuns([made]), "api/runs/0/timeline")
    new = path.with_name("new")
    new.write_text(f"{text}{' ' * 1000}\n]\n")
    new.replace(path)
    assert answers.answer(runs, "api/runs/0/timeline") == before


def test_a_run_of_more_files_than_facts_are_kept_is_counted_once(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page asks every two seconds; beyond the bound the end of every file was read every time."""
    monkeypatch.setattr(source, "MOST_FACTS", 3)
    counted: Counter[str] = Counter()
    count_rows = source.count_rows
    monkeypatch.setattr(source, "count_rows", lambda p: (counted.update([str(p)]), count_rows(p))[1])
    first = sorted((made / "rollouts").iterdir())[-1]
    for step in range(10, 20):
        shutil.copy(first, first.with_name(f"grpo-step-{step:06d}.parquet"))
    runs = ShownRuns([made])
    for step in (20, 21):
        shutil.copy(first, first.with_name(f"grpo-step-{step:06d}.parquet"))
        told = answers.answer(runs, "api/runs/0")["rollout_files"]
        assert all(file["rows"] for file in told)
    assert len(told) >= 12
    assert max(counted.values()) == 1


def test_a_run_directory_that_vanishes_is_said_to_be_gone(made: Path) -> None:
    runs = ShownRuns([made])
    assert answers.answer(runs, "api/runs")["runs"][0]["error"] is None
    made.rename(made.with_name("elsewhere"))
    (line,) = answers.answer(runs, "api/runs")["runs"]
    assert (line["state"], line["error"]) == (
        "damaged",
        f"{made} is gone: it was moved or deleted since the viewer was started",
    )
    for url in ("api/runs/0", "api/runs/0/rollouts?files=all"):
        assert line["error"] in answers.answer(runs, url)["problems"]


def test_what_a_running_run_waits_for_is_read_from_its_log(made: Path) -> None:
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)
    stamps = [(now - timedelta(seconds=s)).strftime("%Y-%m-%dT%H:%M:%SZ") for s in (1000, 10)]
    log = (
        f"{stamps[0]} WARNING whet.guard.watch: waiting for an old answer by replica 0 since 60.0 s\n"
        f"{stamps[1]} WARNING whet.guard.watch: waiting for a reward by worker 3 since 120.0 s\n"
        "stacks of process 1\n"
    )
    (made / "run.log").write_text(log)
    assert ask(made, "api/runs/0")["waits"] == []
    with files.RunLock(made):
        (wait,) = ask(made, "api/runs/0")["waits"]
    assert (wait["process"], wait["what"]) == ("worker 3", "a reward")
    assert wait["since_s"] >= 130
    assert ask(made, "api/runs/0")["log_tail"] == log.splitlines()


def test_the_error_that_ended_a_run_is_that_of_whet_show(made: Path) -> None:
    """Of a run that goes on none."""
    log, now = made / "run.log", manifest.describe(config="", seed=7)["started_utc"][:19]
    log.write_text(f"{now}Z ERROR whet.api: the run ended: 4 of 4 rollouts (r.py:9); see run.log\n")
    assert ask(made, "api/runs/0")["ended_by"] == "4 of 4 rollouts (r.py:9); see run.log"
    with files.RunLock(made):
        assert ask(made, "api/runs/0")["ended_by"] == ""
    log.write_text(f"{now}Z INFO whet.guard.printed: reward 'r': the run ended: no\n")
    assert ask(made, "api/runs/0")["ended_by"] == ""


@pytest.mark.parametrize("name", ["run.log", "config.yaml", "manifest.json", "metrics.jsonl"])
def test_a_run_that_was_killed_during_its_start(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("{}" if name == "manifest.json" else "")
    (line,) = ask(find_runs([run]), "api/runs")["runs"]
    assert (line["state"], line["step"], line["stages"]) == ("not running", 0, [])
    for url in every_url(run):
        ask(run, url)
    with pytest.raises(NotThere, match="no stage yet"):
        ask(run, "api/runs/0/rewards")


def refusal(path: Path, url: str) -> WhetError | None:
    """What an address says in place of an answer."""
    try:
        ask(path, url)
    except (DataError, NotThere) as e:
        return e
    return None


DAMAGED = [
    "metrics.jsonl",
    "timings.jsonl",
    "config.yaml",
    "manifest.json",
    "timeline.json",
    "rollouts",
    "eval",
]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize(
    "damage", [b"", b"\x00\xff\n[1]\n", b"PAR1\n\xff\xff\xff\x7fPAR1", b'{"a": ' * 5000 + b"\n"]
)
def test_damage_is_told_and_nothing_else_is_lost(name: str, damage: bytes, made: Path) -> None:
    """Whatever is in a file, every address gives an answer or an error that names a file."""
    (made / "timeline.json").write_bytes(b"[\n]\n")
    urls = every_url(made)
    hurt = made / name if "." in name else sorted((made / name).glob("*.parquet"))[0]
    hurt.write_bytes(damage)
    refused = [str(error) for url in urls if (error := refusal(made, url)) is not None]
    assert all(str(made) in text for text in refused)
    whole = ask(made, "api/runs/0")
    if damage and name in DAMAGED[:4]:
        assert any(name in problem for problem in whole["problems"])
        assert ask(made, "api/runs")["runs"][0]["state"] == "damaged"
    if name == "rollouts":
        told = [json.dumps(ask(made, f"api/runs/0/{url}")) for url in ("rewards?stage=grpo", "search?q=a")]
        assert refused
        assert [text.count(hurt.name) for text in told] == [1, 1]
        assert json.loads(told[0])["steps"] == [2]
        assert {step for _, step, _ in json.loads(told[1])["hits"]} == {2}
        assert (
            len(unpacked(ask(made, "api/runs/0/rollouts?files=all")["columns"]["row"])) == 2
        )  # those of step 2
    if name == "eval":
        told = ask(made, "api/runs/0/evals")
        assert (len(told["rows"]), [one["rows"] for one in told["files"]]) == (6, [None, 3])


def test_files_that_no_run_names_so_are_left_out(made: Path) -> None:
    """A step beyond 64 bits, a stage that no config may have, a name that is no text: no answer breaks on them."""
    urls = [url for url in every_url(made) if refusal(made, url) is None]
    before = [ask(made, url) for url in urls]
    names = [
        f"grpo-step-{10**24}",
        "a b-step-1",
        "\x1b[31m-step-1",
        "x\udcff-step-1",
        "grpo-step-\u00b2",
        "-step-1",
    ]
    for folder, name in itertools.product(("rollouts", "eval", "batches", "seconds"), names):
        (made / folder).mkdir(exist_ok=True)
        (made / folder / f"{name}.parquet").write_bytes(b"")
    assert [ask(made, url) for url in urls] == before


def test_a_damaged_tokenizer_hides_only_the_text_of_tokens(made: Path) -> None:
    (made / "export").mkdir()
    for text in ('{"model": 5}', "\xff", "{"):
        (made / "export/tokenizer.json").write_text(text, encoding="latin-1")
        assert ask(made, "api/runs/0/rollouts/grpo/1/0")["pieces"] is None
        assert any("tokenizer.json" in problem for problem in ask(made, "api/runs/0")["problems"])


def test_a_damaged_line_of_metrics_does_not_hide_rollouts(made: Path) -> None:
    before = ask(made, "api/runs/0/rollouts?files=all")
    (made / "metrics.jsonl").write_text("no\n{}\n")
    after = ask(made, "api/runs/0/rollouts?files=all")
    assert (after["columns"], before["problems"]) == (before["columns"], [])
    assert "metrics.jsonl line 1 is not JSON" in after["problems"][0]
    assert ask(made, "api/runs/0/rewards?stage=grpo")["steps"] == [1, 2]
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1"):
        ask(made, "api/runs/0/ledger")


def test_files_of_earlier_releases_are_read(made: Path) -> None:
    (file,) = made.glob("rollouts/grpo-step-000001.parquet")
    table, whole = pq.read_table(file), read_rollouts(file)
    pq.write_table(table.drop_columns(["messages", "state", "stop_reason", "turns", "strand_tokens"]), file)
    assert read_rollouts(file) == whole
    assert ask(made, "api/runs/0/rollouts/grpo/1/0")["strand_tokens"] == [2]
    assert unpacked(ask(made, "api/runs/0/rollouts?stage=grpo&step=1")["columns"]["turns"]) == [0, 0]


def test_hostile_text_is_plain_text(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
    some = [reply(0, text, reward=0.0, index=n, error=text[:300]) for n, text in enumerate(HOSTILE)]
    run.write_rollouts("s", 1, some)
    run.close()
    (file,) = tmp_path.glob("rollouts/*.parquet")
    table = pq.read_table(file)
    turn = '[{"strand": 0, "start": 1, "end": 2, "finish_reason": "\\ud800", "calls": 2, "malformed": "\\udfff<b>"}]'
    columns = {name: table[name] for name in table.column_names} | {"turns": pa.array([turn] * len(HOSTILE))}
    pq.write_table(pa.table(columns, schema=table.schema), file)
    listed = ask(tmp_path, "api/runs/0/rollouts?files=all")["columns"]
    assert unpacked(listed["text"]) == [text[:80] for text in HOSTILE]
    assert max(map(len, unpacked(listed["fault"]))) <= 160
    assert (unpacked(listed["calls"]), unpacked(listed["malformed"])) == ([2] * 5, [1] * 5)
    for n, text in enumerate(HOSTILE):
        told = ask(tmp_path, f"api/runs/0/rollouts/s/1/{n}")
        assert told["text"] == text
        assert told["turns"][0]["malformed"] == "\udfff<b>"
    urls = [url for url in every_url(tmp_path) if "eval" not in url or url.endswith("evals")]
    for url in urls:
        raw = gzip.decompress(answers.encoded(answers.answer(ShownRuns([tmp_path]), url)))
        assert raw.isascii()
        json.loads(raw, parse_constant=pytest.fail)


def test_ten_thousand_rollouts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, ["s"])
    for step in range(1, 11):
        run.log("s", step, metrics={"reward/mean": 0.5}, timings={})
    run.close()
    rows, tokens = 1000, 20
    for step in range(1, 11):
        flat = pa.array(np.arange(rows * tokens) % 7, pa.int32())
        offsets = pa.array(np.arange(rows + 1) * tokens, pa.int32())
        lists = {
            f.name: pa.ListArray.from_arrays(offsets, flat.cast(f.type.value_type))
            for f in ROLLOUTS
            if pa.types.is_list(f.type)
        }
        lists["mask"] = pa.ListArray.from_arrays(offsets, pa.array([0, 1] * (rows * tokens // 2), pa.int8()))
        lists["strand_tokens"] = pa.array([[tokens]] * rows, pa.list_(pa.int32()))
        plain = {
            "uid": pa.array(np.arange(rows) // 8), "index": pa.array(np.arange(rows) % 8, pa.int32()),
            "reward": pa.array(np.arange(rows) % 2, pa.float64()), "advantage": pa.array([0.5] * rows),
            "reward_parts": pa.array([[("a", 1.0)]] * rows, pa.map_(pa.string(), pa.float64())),
        }  # fmt: skip
        texts = {
            "answer": "null",
            "turns": "[]",
            "messages": "[]",
            "state": "null",
            "extracted": None,
            "error": None,
        }
        texts |= {
            "source": "s",
            "prompt": "p" * 200,
            "text": "t" * 200,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        columns = {name: pa.array([text] * rows, pa.string()) for name, text in texts.items()} | plain | lists
        table = pa.table([columns[f.name] for f in ROLLOUTS], schema=ROLLOUTS)
        pq.write_table(table, tmp_path / f"rollouts/s-step-{step:06d}.parquet", compression="zstd")
    listed = {k: unpacked(v) for k, v in ask(tmp_path, "api/runs/0/rollouts?files=all")["columns"].items()}
    assert {len(column) for column in listed.values()} == {10_000}
    assert set(listed["tokens"]) == {10}
    assert set(listed["group_reward_mean"]) == {0.5}
    assert set(map(len, listed["prompt"])) == {80}
    told = ask(tmp_path, "api/runs/0/rewards?stage=s")
    assert told["parts"]["reward"]["count"] == [1000] * 10
    assert ask(tmp_path, "api/runs/0/search?q=ppp")["complete"] is False


# ---------------------------------------------------------------- questions that have no answer


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("api/nothing", NotThere, "nothing is at api/nothing"),
        ("api/runs/7", NotThere, "no run '7'; runs: 0 to 0"),
        ("api/runs/-1", NotThere, "no run '-1'"),
        ("api/runs/0/rollouts?stage=no&step=1", NotThere, "no stage 'no'; stages: sft, grpo"),
        ("api/runs/0/rollouts?stage=grpo&step=99", NotThere, "no file of step 99"),
        ("api/runs/0/rollouts?stage=grpo", BadQuestion, "parameter step is missing"),
        ("api/runs/0/rollouts?stage=grpo&step=-1", BadQuestion, "parameter step is '-1'"),
        ("api/runs/0/rollouts?stage=grpo&step=" + "9" * 400, BadQuestion, "expected a whole number"),
        ("api/runs/0/rollouts/grpo/1/9", NotThere, "rows 0 to 1, no row 9"),
        ("api/runs/0/rollouts/..%2f..%2fetc/1/0", NotThere, "no stage"),
        ("api/runs/0/rollouts/grpo/1/0?run=5&step=7", None, ""),
        ("api/runs/0/groups/grpo/1/77", NotThere, "no rollout of task 77"),
        ("api/runs/0/search", BadQuestion, "parameter q is missing"),
        ("api/compare?a=0", BadQuestion, "parameter b is missing"),
    ],
)
def test_what_is_not_there_is_named(url: str, error: type[WhetError] | None, says: str, made: Path) -> None:
    if error is None:
        assert ask(made, url)["step"] == 1  # the path says it, not the query
        return
    with pytest.raises(error, match=re.escape(says)):
        ask(made, url)


def test_runs_are_found_in_folders(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "again")
    (tmp_path / "notes").mkdir()
    assert find_runs([tmp_path]) == [tmp_path / "again", made]
    assert find_runs([made, tmp_path]) == [made, tmp_path / "again"]
    with pytest.raises(DataError, match="no such folder"):
        find_runs([tmp_path / "nothing"])
    with pytest.raises(DataError, match="is not a run directory and has none"):
        find_runs([tmp_path / "notes"])


# ---------------------------------------------------------------- the server


async def talk(port: int, request: str) -> tuple[int, dict[str, str], bytes]:
    """One request as it is written; (status, headers, body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(30):
        writer.write(request.replace("\n", "\r\n").encode("latin-1"))
        raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, gzip.decompress(body) if "content-encoding" in headers else body


def get(path: str, *more: str, host: str = "localhost", method: str = "GET") -> str:
    return "\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *more, "", ""])


async def served(path: Path, *requests: str, **options: Any) -> list[tuple[int, dict[str, str], bytes]]:
    server = ViewerServer(ShownRuns([path]), **options)
    await server.start()
    try:
        return [await talk(server.port, request.replace("PORT", str(server.port))) for request in requests]
    finally:
        await server.stop()


def test_the_page_and_the_answers_over_a_socket(made: Path) -> None:
    page, script, listed, plain, head = asyncio.run(
        served(
            made,
            get("/"),
            get("/main.js", host="127.0.0.1:PORT"),
            get("/api/runs", "Accept-Encoding: br, gzip"),
            get("/api/runs"),
            get("/api/runs", method="HEAD"),
        )
    )
    assert page[0] == script[0] == listed[0] == plain[0] == head[0] == 200
    assert page[1]["content-type"].startswith("text/html")
    assert script[1]["content-type"].startswith("text/javascript")
    assert listed[1]["content-encoding"] == "gzip"
    assert json.loads(listed[2]) == json.loads(plain[2]) == ask(made, "api/runs")
    assert "content-encoding" not in plain[1]
    assert head[2] == b""
    for _, headers, _ in (page, script, listed, head):
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert not any(name.startswith("access-control") for name in headers)


def test_requests_that_never_end_keep_nobody_out(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are bounded; one that asks again and again stays open while others come."""
    monkeypatch.setattr(viewer_server, "MOST_CONNECTIONS", 8)

    async def flooded() -> int:
        server = ViewerServer(ShownRuns([made]))
        await server.start()
        heard, speaks = await asyncio.open_connection("127.0.0.1", server.port)
        held = []
        for part in [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n"] * 10:
            held.append(await asyncio.open_connection("127.0.0.1", server.port))
            held[-1][1].write(part)
            speaks.write(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await heard.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await heard.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
        status, _, _ = await talk(server.port, get("/"))
        assert status == 200
        await asyncio.sleep(0.1)
        ended = [reader.at_eof() or reader.exception() is not None for reader, _ in held]
        for _, writer in [*held, (heard, speaks)]:
            writer.close()
        await server.stop()
        return ended.count(False)

    assert asyncio.run(flooded()) <= 8


def test_answers_are_kept_within_a_bound_that_counts_their_addresses(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer_server, "ROOM", 2**16)
    kept = Answers(ShownRuns([made]))
    for n in range(100):
        url = f"api/runs?{'x' * 4000}={n}"
        kept.get(url, kept.mark(url))
    assert 10 <= len(kept.kept) <= 2**16 // 4000
    assert 0 < kept.size <= 2**16


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_other_methods_are_refused(method: str, made: Path) -> None:
    ((status, headers, _),) = asyncio.run(served(made, get("/api/runs", "Content-Length: 0", method=method)))
    assert status == 405
    assert "content-security-policy" in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "127.0.0.1.evil.example", "", "localhost.:PORT"]
)
def test_a_name_that_was_pointed_here_is_refused(host: str, made: Path) -> None:
    """DNS rebinding: the page of another site asks under its own name."""
    answers_ = asyncio.run(served(made, *(get(path, host=host) for path in ("/", "/api/runs"))))
    assert [status for status, _, _ in answers_] == [403, 403]


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/..%2f..%2fserver.py", "/%2e%2e/server.py", "/static/main.js", "//etc/passwd",
     "/etc/passwd", "/..\\server.py", "/api/../server.py", "/api/runs/0/../../../x", "/server.py",
     "/main.js%00.html", "/api/runs/%ff"],
)  # fmt: skip
def test_paths_outside_are_not_there(path: str, made: Path) -> None:
    ((status, _, body),) = asyncio.run(served(made, get(path)))
    assert status == 404
    assert b"def " not in body


def test_errors_are_json_with_a_status(made: Path) -> None:
    (made / "manifest.json").write_text("[]")
    (made / "metrics.jsonl").write_text("no\n{}\n")
    paths = {
        "/api/runs/9": 404,
        "/api/runs/0/search": 400,
        "/api/runs/0/metrics": 422,
        "/api/runs/0/ledger": 422,
    }
    found = asyncio.run(served(made, *map(get, paths)))
    assert [status for status, _, _ in found] == list(paths.values())
    for _, _, body in found:
        assert list(json.loads(body)) == ["error"]


def test_nothing_changed_is_answered_by_304(made: Path) -> None:
    async def work() -> None:
        server = ViewerServer(ShownRuns([made]))
        await server.start()
        try:
            status, headers, _ = await talk(server.port, get("/api/runs/0"))
            tag = headers["etag"]
            again = await talk(server.port, get("/api/runs/0", f"If-None-Match: {tag}"))
            assert (status, again[0], again[2]) == (200, 304, b"")
            other = await talk(server.port, get("/api/runs/0/ledger", f"If-None-Match: {tag}"))
            assert other[0] == 200
            with open(made / "metrics.jsonl", "a") as file:
                file.write('{"stage": "grpo", "step": 3}\n')
            after = await talk(server.port, get("/api/runs/0", f"If-None-Match: {tag}"))
            assert after[0] == 200
            assert json.loads(after[2])["step"] == 3
        finally:
            await server.stop()

    asyncio.run(work())


def test_with_a_token_every_request_needs_it(made: Path) -> None:
    token = "s3cret-of-mine"
    wrong = [
        get("/"), get("/api/runs"), get("/main.js"), get("/api/runs?token=s3cret-of-min"), get("/?token="),
        get("/api/runs", "Authorization: Bearer no"), get("/api/runs", "Cookie: whet_token_PORT=\xe9"),
    ]  # fmt: skip
    right = [
        get(f"/?token={token}", host="gpu7.example:80"), get("/api/runs", f"Authorization: Bearer {token}"),
        get("/api/runs", f"Cookie: whet_token_PORT={token}"), get(f"/api/runs?token={token}"),
    ]  # fmt: skip
    found = asyncio.run(served(made, *wrong, *right, token=token))
    assert [status for status, _, _ in found] == [401] * len(wrong) + [303, 200, 200, 200]
    assert found[len(wrong)][1]["location"] == "/"  # the address in the browser has no token
    cookie = found[len(wrong)][1]["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert all("set-cookie" not in headers for _, headers, _ in found[: len(wrong)])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu7.example"])
def test_an_address_for_others_needs_a_token(host: str, made: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        ViewerServer(ShownRuns([made]), host=host)
    ViewerServer(ShownRuns([made]), host=host, token="long enough")
    with pytest.raises(ConfigError, match="at least 8"):
        ViewerServer(ShownRuns([made]), host=host, token="short")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_the_printed_address_is_answered(host: str, made: Path) -> None:
    """Of each address that only this machine reaches; with a token of any characters, which is quoted in it."""

    async def status(token: str | None) -> int:
        server = ViewerServer(ShownRuns([made]), host=host, token=token)
        await server.start()
        try:
            where = {"url": server.url, "allow_redirects": False}
            async with aiohttp.ClientSession() as session, session.get(**where) as response:
                return response.status
        finally:
            await server.stop()

    assert asyncio.run(status(None)) == 200
    for token in ("a&b=c#defgh", "a+b %20;defgh", "".join(map(chr, range(32, 127)))):
        assert asyncio.run(status(token)) == 303


def test_a_port_that_is_taken_is_named(made: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = ViewerServer(ShownRuns([made]))
        with pytest.raises(ConfigError, match=r"cannot listen on 127.*another --port"):
            asyncio.run(server.start(taken.getsockname()[1]))


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_named(made: Path, host: str) -> None:
    """A name that none can be ended with a traceback; for one of another machine another port was advised."""
    server = ViewerServer(ShownRuns([made]), host=host, token="abcdefgh")
    with pytest.raises(ConfigError, match=f"cannot listen on {host} .*another --host"):
        asyncio.run(server.start())


def state(folder: Path) -> dict[str, Any]:
    """Every file below with its time and content."""
    return {
        str(p.relative_to(folder)): (
            p.stat().st_mtime_ns,
            hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "",
        )
        for p in sorted(folder.rglob("*"))
    }


def test_nothing_is_written(made: Path) -> None:
    for name in ("rollouts", "eval"):
        os.chmod(made / name, 0o555)
    before = state(made)
    asyncio.run(served(made, *(get(f"/{url}") for url in every_url(made))))
    assert state(made) == before
    for name in ("rollouts", "eval"):
        os.chmod(made / name, 0o755)


def test_secrets_of_the_config_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whet import secrets

    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    secrets.learn_environment()
    (tmp_path / "config.yaml").write_text("name: x\nreward_workers:\n  env: {MY_API_KEY: hunter2-hunter2}\n")
    (tmp_path / "run.log").write_text("2026-01-01T00:00:00Z INFO a: key hunter2-hunter2\n")
    (tmp_path / "manifest.json").write_text(
        '{"starts": [{"environment": {"MY_API_KEY": "hunter2-hunter2"}}]}'
    )
    for url in every_url(tmp_path):
        assert "hunter2" not in json.dumps(ask(tmp_path, url))


# ---------------------------------------------------------------- the exported file


def unpack(page: str) -> dict[str, Json]:
    (data,) = re.findall(r'<script type="application/octet-stream" id="answers">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(data)))


def test_an_exported_page_has_the_answers_of_the_server(trained: Path, made: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.html"
    before = state(made)
    told = export.write_report([trained, made], file, most=12)
    assert state(made) == before
    found = unpack(file.read_text())
    runs = ShownRuns([trained, made])
    whole = [url for url in found if re.fullmatch(r"api/runs/\d/rollouts/.*", url)]
    assert 0 < len(whole) <= 12
    assert {url.split("/")[2] for url in whole} == {"0", "1"}
    for url, value in found.items():
        expected = json.loads(gzip.decompress(answers.encoded(answers.answer(runs, url))))
        if url == "api/runs":
            assert (value["live"], value["runs"]) == (False, expected["runs"])
            assert value["exported"] in told
        else:
            assert value == expected, url
    for url in ("api/runs/0/metrics", "api/runs/1/rewards?stage=grpo", "api/compare?a=0&b=1"):
        assert url in found
    assert "api/runs/1/evals/flips?stage=grpo&from=0&to=2" in found


def test_an_exported_page_needs_nothing_from_elsewhere(made: Path, tmp_path: Path) -> None:
    export.write_report([made], tmp_path / "a.html", most=0)
    page = (tmp_path / "a.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page.split("<body>")[0])
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/octet-stream" id="answers">',
        '<script type="module">',
    ]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    for text, kind in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert not re.search(r"^(import|export) ", script, re.M)
    names = {path.name for path in export.STATIC.glob("*.js")}
    index = (export.STATIC / "index.html").read_text()
    assert set(re.findall(r'modulepreload" href="([^"]*)"', index)) == names
    assert not [url for url in unpack(page) if "/rollouts/" in url]


def test_a_damaged_run_is_exported_with_what_is_left(made: Path, tmp_path: Path) -> None:
    (made / "metrics.jsonl").write_text("no\n{}\n")
    told = export.write_report([made], tmp_path / "a.html", most=9)
    assert "4 of 4 rollouts" in told
    found: Any = unpack((tmp_path / "a.html").read_text())
    assert "metrics.jsonl line 1 is not JSON" in found["api/runs/0"]["problems"][0]
    assert found["api/runs"]["runs"][0]["state"] == "damaged"


def test_hostile_text_cannot_leave_the_data_of_an_export(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "r", ["s"])
    run.log("s", 1, metrics={"reward/mean": 0.5}, timings={})
    run.write_rollouts("s", 1, [reply(0, t, reward=0.0, index=n) for n, t in enumerate(HOSTILE)])
    run.close()
    export.write_report([tmp_path / "r"], tmp_path / "a.html", most=10)
    page = (tmp_path / "a.html").read_text()
    assert "alert(1)" not in page
    assert unpack(page)["api/runs/0/rollouts/s/1/0"]["text"] == HOSTILE[0]


def test_the_selection_is_whole_groups_and_extremes(made: Path) -> None:
    (run,) = ShownRuns([made]).runs
    chosen = export.choose(run, 100)
    assert chosen.rows == {("grpo", step, row) for step in (1, 2) for row in (0, 1)}
    assert chosen.groups == {("grpo", 1, 0), ("grpo", 2, 0)}
    assert (chosen.total, chosen.steps) == (4, {"grpo": [1, 2]})
    few = export.choose(run, 3)
    assert len(few.rows) <= 3
    assert str(few).startswith(f"{len(few.rows)} of 4 rollouts")


# ---------------------------------------------------------------- the command, and Python


def whet_view(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "whet", "view", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def started(made: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = whet_view(str(made), "--no-open", "--port", "0")
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_the_command_prints_its_address_and_ends_on_ctrl_c(
    started: tuple[subprocess.Popen[str], str],
) -> None:
    process, line = started
    port = int(re.fullmatch(r"whet view: http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", line)[1])  # type: ignore[index]
    status, _, _ = asyncio.run(talk(port, get("/api/runs")))
    assert status == 200
    with socket.create_connection(("127.0.0.1", port)):  # a connection that stays open does not hold it up
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


NO_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # of a browser that was asked for https
    b"hello\n\n",
    b"GET / HTTP/9.9\n\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\n\n",
    b"GET http://[::1/ HTTP/1.1\nHost: localhost\n\n",
    b"GET / HTTP/1.1\nHost: localhost\nX\n\n",
    b"GET / HTTP/1.1\nHost: localhost\nContent-Encoding: deflate\nContent-Length: 3\n\nabc",
)


def test_what_is_no_http_is_refused_without_a_word_on_the_terminal(
    started: tuple[subprocess.Popen[str], str],
) -> None:
    process, line = started
    for sent in NO_HTTP:
        with socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", line)[0]))) as asking:
            asking.sendall(sent.replace(b"\n", b"\r\n"))
            assert asking.recv(100).startswith(b"HTTP/1.0 400"), sent
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")


def test_ctrl_c_does_not_wait_for_an_answer_that_is_being_made(made: Path) -> None:
    code = f"""
import time
from pathlib import Path
from whet.view import answers, server

def slow(ask):
    print("asked", flush=True)
    time.sleep(60)

answers.ROUTES = (("api/runs", slow),)
ready = lambda url: print(url.rpartition(":")[2].strip("/"), flush=True)
server.serve([Path({str(made)!r})], host="127.0.0.1", port=0, token=None, ready=ready)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as asking:
            asking.sendall(get("/api/runs").replace("\n", "\r\n").encode())
            assert process.stdout.readline() == "asked\n"
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(20) == 0
            finally:
                process.kill()


def test_the_command_exports_and_names_mistakes(made: Path, tmp_path: Path) -> None:
    process = whet_view(str(made), "--export", str(tmp_path / "r.html"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "4 of 4 rollouts" in out.replace("\n", " ")
    process = whet_view(str(tmp_path / "no"), "--no-open")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("whet: ")
    assert "no such folder" in err
    assert "Traceback" not in err


def test_a_run_is_read_from_python(made: Path, trained: Path) -> None:
    run = whet.load_run(str(made))
    assert run.stages == ["sft", "grpo"]
    assert run.config["seed"] == 7
    assert [row["reward/mean"] for row in run.metrics if "reward/mean" in row] == [0.25, 0.5]
    assert [(row["stage"], row["step"], row["eval/accuracy"]) for row in run.evals][-1] == ("grpo", 2, 2 / 3)
    assert run.steps == [("grpo", 1), ("grpo", 2)]
    assert run.timeline == []
    table = run.rollouts(2)
    assert isinstance(table, pa.Table)
    assert table.schema.equals(ROLLOUTS)
    assert table["text"].to_pylist() == ["cba", "x\x1b[2J"]
    assert run.eval_rollouts(0)["text"].to_pylist() == ["abc", "zyx", "no"]
    with pytest.raises(DataError, match="no rollouts of step 9; rollouts there: grpo: 1 to 2, 2 steps"):
        run.rollouts(9)
    with pytest.raises(DataError, match="replies of an evaluation there: grpo: 0 to 2, 2 steps"):
        run.eval_rollouts(1)
    result = Result(trained, finished=True)
    assert result.rollouts(3).num_rows == 8
    assert result.run.timeline
    assert result.run.metrics == result.metrics


def test_the_page_plots_from_a_run(trained: Path, tmp_path: Path) -> None:
    """The code of docs/viewer.md as it stands, but for the run and the steps."""
    (code,) = re.findall(r"```python\n(.*?)```", Path("docs/viewer.md").read_text(), re.S)
    assert "runs/first_run" in code
    code = code.replace("runs/first_run", str(trained)).replace("(300)", "(3)")
    code = "\n".join(line for line in code.splitlines() if "to_pandas" not in line)
    command = [sys.executable, "-c", f"{code}\nprint(rollouts.num_rows, len(rows))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8", "3"]
    assert (tmp_path / "reward.png").stat().st_size > 0


@pytest.mark.parametrize("path", ["nothing", "."])
def test_a_folder_that_is_no_run_is_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory"):
        whet.load_run(tmp_path / path)


def test_words_of_the_command_line_load_without_the_server() -> None:
    heavy = {"aiohttp", "pyarrow", "torch", "whet.view.server"}
    code = f"import sys, whet, whet.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_parts_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    """A map of many names, as a damaged file may have, stays small."""
    run = RunDirectory(tmp_path, ["s"])
    run.log("s", 1, metrics=held_out(0.5), timings={})
    one = reply(0, "a", reward=1.0)
    many = {f"part{n:04d}": float(n) for n in range(500)}
    run.write_rollouts(
        "s", 1, [type(one)(**{**{f: getattr(one, f) for f in one.__slots__}, "reward_parts": many})]
    )
    run.close()
    assert len(ask(tmp_path, "api/runs/0/rewards?stage=s")["parts"]) == rewards.MOST_PARTS + 1

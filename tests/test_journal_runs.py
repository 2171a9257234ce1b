"""Agents whose tools answer otherwise every time, in runs that are killed with SIGKILL: what a run has written down, it
writes again after a resume, byte for byte."""

from __future__ import annotations

import filecmp
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whet
from forked import Started
from test_apart import Processes
from whet.config.load import load
from whet.data.tasks import texts
from whet.data.tokenizer import load_tokenizer

AGENT = '''
import os
import time
from dataclasses import replace

from whet.envs.tool_env import ToolEnv
from whet.envs.tools import tool_from_function
from whet.types import ToolCall


class Agent(ToolEnv):
    """Whatever the policy says in three turns is what it calls a tool with, which draws a text that has never been."""

    def __init__(self, task, world, log, state=None):
        def draw(said: str) -> str:
            text = "".join("abc"[byte % 3] for byte in os.urandom(24))
            time.sleep(os.urandom(1)[0] / 255 * 0.02)
            line = f"{task.uid} {text}\\n".encode()
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, line)
            os.close(handle)
            return text

        super().__init__(task, world, tools=[tool_from_function(draw)], state=state)
        self.tools, self.told = [], ""

    async def step(self, reply):
        call = ToolCall("draw", {"said": reply.content}, "c1")
        step = await super().step(replace(reply, malformed=None, tool_calls=(call,)))
        (told,) = step.messages
        return replace(step, reward=told.content.count("a") / 24, done=self.world.turn == 3)


class Remembers(Agent):
    """It cannot go on without what it remembers."""

    def __init__(self, task, world, log):
        super().__init__(task, world, log, state=object())
'''

WHOLE = "from whet.envs.journal import Journal; Journal.drop = lambda *where: None"
"""Before a run: its journal stays whole, for tests that count answers."""

SAME = ("metrics.jsonl", "rollouts", "eval", "checkpoints")
"""What two equal runs write byte for byte."""


def tree_in(folder: Path, name: str = "Agent", **checkpoint: Any) -> dict[str, Any]:
    """A run of four steps, with a checkpoint after every second; evaluations play the agent, too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(AGENT)
    rows = [{"prompt": f"ab{c}", "answer": c} for c in "abcabcab"]
    return {
        "run_dir": str(folder / "run"),
        "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        "tokenizer": {"build": "chars"},
        "data": {
            "train": [{"rows": rows}],
            "eval": [{"rows": rows[:2], "name": "held"}],
            "exclude_eval": False,
            "chat": True,
            "max_prompt_tokens": 16,
        },
        "rollout": {
            "group_size": 4,
            "sampling": {"max_tokens": 24},
            "env": {
                "make": f"{folder}/agent.py:{name}",
                "arguments": {"log": str(folder / "drawn")},
                "observation_tokens": 80,
            },
        },
        "train": {"steps": 4, "tasks_per_step": 4, "optimizer": {"lr": 0.01}},
        "eval": {"interval": 2, "samples": 2, "sampling": {"temperature": 1.0}},
        "checkpoint": {"export": False, "interval": 2, "keep": None, **checkpoint},
        "track": {"trackers": ["jsonl"], "rollouts_interval": 1},
        "machine": {"device": "cpu"},
    }


def start(tree: dict[str, Any], *, first: str = "") -> Started:
    """The run in a process of its own. first: code that runs there before it."""
    run_dir = Path(tree["run_dir"])
    file = run_dir.with_suffix(".yaml")
    file.write_text(json.dumps(tree))
    code = f"{first}\nfrom whet.cli import main; main()"
    return Started("train", str(file), code=code, said=run_dir.with_suffix(".said"))


def drawn(folder: Path) -> list[str]:
    """What the tools have drawn, in all processes."""
    log = folder / "drawn"
    return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


def in_journal(run_dir: Path) -> Counter[str]:
    """The answers of whole lines of the journal."""
    return Counter(text for texts in by_turn(run_dir).values() for text in texts)


def by_turn(run_dir: Path) -> dict[tuple[str, int], list[str]]:
    """The same by episode and turn."""
    found: dict[tuple[str, int], list[str]] = {}
    for path in sorted((run_dir / "journal").glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            episode, turn, _, entry = json.loads(line)
            said = [message["content"] for message in entry["value"]["messages"]]
            found.setdefault((episode, turn), []).extend(said)
    return found


class Record:
    """Whole lines and files of a record."""

    def __init__(self, run_dir: Path) -> None:
        metrics = run_dir / "metrics.jsonl"
        self.lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
        paths = [*run_dir.glob("rollouts/*.parquet"), *run_dir.glob("eval/*.parquet")]
        self.files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}

    def check(self, later: Record) -> None:
        """All that was there is there later, as it was."""
        assert later.lines[: len(self.lines)] == self.lines
        assert {name: later.files[name] for name in self.files} == self.files


def answers(tree: dict[str, Any]) -> list[str]:
    """What the agents of all rollouts that a run has recorded were told, in the order of its files."""
    source = load(_written(tree)).config.data.train[0]
    tokenizer = load_tokenizer(load(_written(tree)).config.tokenizer, model_path=None, texts=texts([source]))
    found = []
    for path in sorted(Path(tree["run_dir"]).glob("rollouts/*.parquet")):
        for row in pq.read_table(path).to_pylist():
            ends = [turn["end"] for turn in json.loads(row["turns"])]
            starts = [turn["start"] for turn in json.loads(row["turns"])][1:]
            for begin, end in zip(ends, starts):
                found.append(str(tokenizer.decode(row["token_ids"][begin:end], skip_special_tokens=True)))
    return found


def turns(run_dir: Path, kind: str = "rollouts") -> list[int]:
    """How many replies each recorded rollout has."""
    tables = [pq.read_table(path).to_pylist() for path in sorted((run_dir / kind).glob("*.parquet"))]
    return [len(json.loads(row["turns"])) for table in tables for row in table]


def told_in(run_dir: Path) -> int:
    """How many answers stand in rollouts: what follows a last reply is not told."""
    return sum(turns(run_dir)) - len(turns(run_dir))


def _written(tree: dict[str, Any]) -> str:
    file = Path(tree["run_dir"]).with_suffix(".tree.yaml")
    file.write_text(json.dumps(tree))
    return str(file)


def killed_until_done(
    tree: dict[str, Any],
    moments: Sequence[Callable[[], Callable[[], bool]]],
    check: Callable[[], None] = lambda: None,
    first: str = "",
) -> int:
    """Run to the end; a process is killed at each of the moments. check: of what a kill has left. Returns how many
    kills hit a run that was under way."""
    hits = 0
    for begin in moments:
        moment = begin()
        process = start(tree, first=first)
        deadline = time.monotonic() + 120
        while process.poll() is None and not moment():
            assert time.monotonic() < deadline, "the run does not get on"
            time.sleep(0.001)
        hits += process.poll() is None
        process.kill()
        process.wait(60)
        check()
    assert start_and_wait(tree, first) == 0
    check()
    return hits


def start_and_wait(tree: dict[str, Any], first: str = "") -> int:
    process = start(tree, first=first)
    code = process.wait(240)
    if code == 1:
        raise AssertionError(process.text()[-3000:])
    return code


def grown(run_dir: Path, seed: int, most: int, *, recorded: bool) -> Callable[[], bool]:
    """The moment when the tools have drawn a random number of answers more, up to `most`. recorded: and a step is
    written down."""
    rng = random.Random(seed)
    before, more, pause_s = len(drawn(run_dir.parent)), rng.randint(1, most), rng.uniform(0.0, 0.01)

    def come() -> bool:
        if len(drawn(run_dir.parent)) < before + more or (
            recorded and not any(run_dir.glob("rollouts/*.parquet"))
        ):
            return False
        time.sleep(pause_s)
        return True

    return come


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing disturbs, with its journal from the first answer on."""
    tree = tree_in(tmp_path_factory.mktemp("unbroken"))
    assert start_and_wait(tree, WHOLE) == 0
    return tree


def test_every_answer_of_a_record_stands_in_the_journal_once(unbroken: dict[str, Any]) -> None:
    run_dir = Path(unbroken["run_dir"])
    told, kept, made = answers(unbroken), in_journal(run_dir), drawn(run_dir.parent)
    assert len(told) == told_in(run_dir) > 4 * 16
    assert len(set(told)) == len(told)
    assert all(kept[answer] == 1 for answer in told)
    replies = [count for kind in ("rollouts", "eval") for count in turns(run_dir, kind)]
    assert len(replies) == 4 * 16 + 3 * 2 * 2
    assert len(made) == sum(kept.values()) == sum(replies)  # the answer to the last reply, too
    assert set(kept) == set(made)
    log = (run_dir / "run.log").read_text()
    assert log.count("resume: each answer of the environment is written to the journal") == 1


def test_the_journal_alone_repeats_a_run_of_random_tools(unbroken: dict[str, Any], tmp_path: Path) -> None:
    """Killed at random, with the clean run's journal: equal to the clean run by every byte, and no tool is called."""
    tree = tree_in(tmp_path)
    clean, run_dir = Path(unbroken["run_dir"]), Path(tree["run_dir"])
    for each in (tree, unbroken):  # one environment, by its name and arguments
        each["rollout"] = unbroken["rollout"]
    shutil.copytree(clean / "journal", run_dir / "journal")
    before = drawn(clean.parent)

    metrics = run_dir / "metrics.jsonl"

    def lines(count: int) -> Callable[[], bool]:
        return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count

    assert killed_until_done(tree, [partial(lines, 1), partial(lines, 4)]) == 2
    assert drawn(clean.parent) == before
    names = [str(p.relative_to(clean)) for part in SAME for p in [clean / part, *(clean / part).rglob("*")]]
    files = [name for name in names if (clean / name).is_file()]
    assert len([name for name in files if name.startswith("checkpoints")]) >= 2
    _, different, missing = filecmp.cmpfiles(clean, run_dir, files, shallow=False)
    assert (different, missing) == ([], [])


@pytest.mark.parametrize(
    ("name", "seed", "kills", "whole"),
    [
        pytest.param("Agent", 2, 2, False, marks=pytest.mark.sweep),
        ("Remembers", 3, 2, True),
        pytest.param("Agent", 1, 3, True, marks=pytest.mark.sweep),
        *(pytest.param("Agent", seed, 10, False, marks=pytest.mark.sweep) for seed in (4, 5)),
        pytest.param("Agent", 6, 10, True, marks=pytest.mark.sweep),
        pytest.param("Remembers", 7, 10, True, marks=pytest.mark.sweep),
    ],
)
def test_a_run_that_is_killed_tells_no_other_story_of_what_it_has_recorded(
    tmp_path: Path, name: str, seed: int, kills: int, whole: bool
) -> None:
    tree = tree_in(tmp_path, name)
    run_dir = Path(tree["run_dir"])
    records: list[Record] = []

    def check() -> None:
        """Of what stands in a record, all was in the journal before."""
        records.append(Record(run_dir))
        if whole and (run_dir / "rollouts").is_dir():
            kept = in_journal(run_dir)
            assert all(kept[answer] for answer in answers(tree))

    moments = [
        partial(grown, run_dir, 100 * seed + n, 120 // kills, recorded=n == kills - 1) for n in range(kills)
    ]
    assert killed_until_done(tree, moments, check, WHOLE if whole else "") == kills
    last = records[-1]
    assert len(last.lines) == 4 + 3
    for record in records:
        record.check(last)
    assert any(record.files for record in records[:-1])  # something had been recorded before a kill
    told, kept = answers(tree), in_journal(run_dir)
    assert len(told) == len(set(told)) == told_in(run_dir)
    assert all(kept[answer] == 1 for answer in told if whole)
    assert set(kept) <= set(drawn(tmp_path))  # at least once: what was drawn at a kill may be nowhere else


KILLS = {
    "before a write": """
def patched(self, path, data):
    kill()
""",
    "in the middle of a line": """
def patched(self, path, data):
    self.folder.mkdir(exist_ok=True)
    with open(path, "ab") as file:
        file.write(data[: len(data) // 2])
    kill()
""",
    "after a write and before its sync": """
def patched(self, path, data):
    os.fsync = lambda handle: kill()
    return append(self, path, data)
""",
    "before a rollout has it": """
def patched(self, path, data):
    append(self, path, data)
    kill()
""",
}

KILLER = """
import json, os, signal
from whet.envs.journal import Journal

append, count = Journal.append, [0]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

{patched}

def tells(line):
    return json.loads(line)[3]["value"]["messages"]

def counted(self, path, data):
    count[0] += 1
    due = count[0] >= {at} and any(map(tells, data.splitlines()))  # one that has what a tool has drawn
    return (patched if due else append)(self, path, data)

Journal.append = counted
"""


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("before a write", marks=pytest.mark.sweep),
        pytest.param("in the middle of a line", marks=pytest.mark.sweep),
        pytest.param("after a write and before its sync", marks=pytest.mark.sweep),
        "before a rollout has it",
    ],
)
def test_a_kill_at_the_worst_moment_costs_no_answer_that_a_rollout_has(tmp_path: Path, where: str) -> None:
    tree = tree_in(tmp_path)
    run_dir = Path(tree["run_dir"])
    assert start_and_wait(tree, WHOLE + KILLER.format(patched=KILLS[where], at=30)) == -9
    first, asked, kept = Record(run_dir), drawn(tmp_path), in_journal(run_dir)
    if where in ("before a write", "in the middle of a line"):
        assert len(asked) > len(kept)
    assert start_and_wait(tree, WHOLE) == 0
    first.check(Record(run_dir))
    told, kept = answers(tree), in_journal(run_dir)
    assert len(told) == len(set(told)) == told_in(run_dir)
    assert all(kept[answer] == 1 for answer in told)


def test_what_no_checkpoint_needs_goes_with_it(tmp_path: Path) -> None:
    tree = tree_in(tmp_path, keep=2)
    whet.train(**tree)
    names = sorted(path.name for path in (tmp_path / "run/journal").iterdir())
    assert [name.rpartition("-")[2] for name in names] == [f"{step:06d}.jsonl" for step in (2, 3, 4)]


def test_without_the_journal_the_records_would_differ(tmp_path: Path) -> None:
    """The other tests can fail."""
    tree = tree_in(tmp_path)
    tree["train"]["steps"], run_dir = 2, Path(tree["run_dir"])
    metrics = run_dir / "metrics.jsonl"
    process = start(tree)
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n")):
        time.sleep(0.001)
    process.kill()
    process.wait(60)
    first = Record(run_dir)
    assert first.files
    shutil.rmtree(run_dir / "journal")
    assert start_and_wait(tree) == 0
    with pytest.raises(AssertionError):
        first.check(Record(run_dir))


@pytest.mark.sweep
def test_an_explorer_that_is_killed_is_told_the_same_again(tmp_path: Path) -> None:
    """Each answer within a rollout that stood in its journal when it was killed is in the record of the run."""
    tree = tree_in(tmp_path)
    apart = Processes(tmp_path)
    beside = {
        "buffer": {"url": f"sqlite:///{tmp_path}/groups.db", "lease_s": 5.0},
        "sync": {"timeout_s": 60.0},
    }
    apart.config.write_text(json.dumps(tree | beside | {"eval": {"interval": 0}}))
    run_dir, moments = Path(tree["run_dir"]), (20, 90, 150)
    written: set[str] = set()
    try:
        apart.start("train")
        for moment in moments:
            apart.start("one")
            apart.until(lambda m=moment: len(drawn(tmp_path)) >= m)  # type: ignore[misc]
            apart.kill("one")
            there = by_turn(run_dir / "explorers" / "one")
            followed = [texts for (name, turn), texts in there.items() if (name, turn + 1) in there]
            written.update(text for texts in followed for text in texts)
        apart.start("one")
        assert [apart.ends(name) for name in ("train", "one")] == [0, 0]
    finally:
        apart.close()
    told = answers(tree)
    assert len(set(told)) == len(told) == told_in(run_dir)
    assert len(written) >= len(moments)
    assert written <= set(told)
    # a kill may come between an answer and the journal
    assert sum(turns(run_dir)) <= len(drawn(tmp_path)) <= sum(turns(run_dir)) + 16 * len(moments)

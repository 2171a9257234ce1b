"""Environments that a config names, through the whole loop: a run in host processes, killed, resumed, hostile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whet
from forked import COMMAND, Started
from whet.config.schema import TokenizerConfig
from whet.data.tokenizer import load_tokenizer
from whet.rollout.engine import OnTokens
from whet.rollout.native.engine import NativeEngine
from whet.seeds import key, rollout_key
from whet.types import Completion, ConfigError, Request, WhetError

Sampled = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""What the engine has read, its reply and the log-probs of it."""

GAMES = '''
import asyncio
import os
import signal
import subprocess
import time

from whet.envs.env import EnvStep
from whet.types import Message


class Guess:
    """Two turns: a hint after the first."""

    def __init__(self, task, world, bonus=0.0):
        self.goal, self.bonus, self.turn = str(task.answer), bonus, 0
        self.word = world.rng.choice("abc")

    async def first(self):
        return [Message("user", self.word)]

    async def step(self, reply):
        self.turn += 1
        hit = self.goal in reply.content
        said = [Message("user", "b" if hit else "c")]
        return EnvStep(said, float(hit) + self.bonus, {"hit": float(hit)}, done=self.turn == 2)


class Asks(Guess):
    """Asks the policy itself, twice at once, before it answers."""

    def __init__(self, task, world):
        super().__init__(task, world)
        self.world = world

    async def step(self, reply):
        asked = [self.world.chat([Message("user", x)], max_tokens=2) for x in "ab"]
        said = await asyncio.gather(*asked)
        step = await super().step(reply)
        return EnvStep(step.messages, len(said[0].content) / 4, done=step.done)


class Dies(Guess):
    """The first host that plays the second step of task 3 is killed, once."""

    def __init__(self, task, world, once):
        super().__init__(task, world)
        self.uid, self.once = task.uid, once

    async def step(self, reply):
        if self.turn == 1 and self.uid == 3 and not os.path.exists(self.once):
            open(self.once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(reply)


class Slow(Guess):
    async def step(self, reply):
        await asyncio.sleep(0.2)
        return await super().step(reply)


class Starts(Slow):
    """Starts programs that nobody ends: one by a call of the system, one in a session of its own, one as a copy of its
    host."""

    @classmethod
    def prepare(cls, arguments):
        subprocess.Popen(["sleep", "600"])
        daemon = "echo $$ >> daemons; exec sleep 600"
        subprocess.run(["setsid", "--fork", "sh", "-c", daemon], cwd=os.path.dirname(__file__), check=True)
        if not os.fork():
            time.sleep(600)
            os._exit(0)


class Hostile(Guess):
    def __init__(self, task, world, how):
        super().__init__(task, world)
        self.uid, self.how = task.uid, how

    async def step(self, reply):
        if self.uid == 1:
            if self.how == "raise":
                raise ValueError("broken")
            if self.how == "exit":
                os._exit(7)
            if self.how == "fault":
                return EnvStep(fault="the site is down")
            if self.how == "nan":
                return EnvStep(reward=float("nan"))
        return await super().step(reply)


def need(task, word):
    return Guess(task, None)
'''


def tree_in(folder: Path) -> dict[str, Any]:
    (folder / "games.py").write_text(GAMES)
    return {
        "run_dir": str(folder / "run"),
        "model": {"scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
        "tokenizer": {"build": "chars"},
        "data": {
            "train": [{"rows": [{"prompt": f"ab{c}", "answer": c} for c in "abcabcab"]}],
            "chat": True,
            "max_prompt_tokens": 16,
        },
        "rollout": {
            "group_size": 4,
            "sampling": {"max_tokens": 12},
            "env": {"make": f"{folder}/games.py:Guess", "observation_tokens": 32, "timeout_s": 20.0},
        },
        "train": {"steps": 2, "tasks_per_step": 4, "optimizer": {"lr": 0.01}},
        "checkpoint": {"export": False},
        "track": {"trackers": ["jsonl"]},
        "machine": {"device": "cpu"},
    }


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    return tree_in(tmp_path)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    return train(tree_in(tmp_path_factory.mktemp("clean")))


HOSTILE: dict[str, Any] = {"train": {"steps": 1}, "reward_workers": {"max_failure_rate": 0.5}}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first step alone, with what hostile environments need."""
    return train(tree_in(tmp_path_factory.mktemp("one_step")), **HOSTILE)


SAVED: dict[str, Any] = {"train": {"steps": 3}, "checkpoint": {"export": False, "interval": 1}}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step more, with a checkpoint of each."""
    return train(tree_in(tmp_path_factory.mktemp("three_steps")), **SAVED)


def train(tree: dict[str, Any], name: str = "run", env: dict[str, Any] | None = None, **over: Any) -> Path:
    """A run of its own directory, with keys of `rollout.env`, `rollout` and `train`, and sections put over the tree."""
    run_dir = Path(tree["run_dir"]).with_name(name)
    both = {section: {**tree[section], **over.pop(section, {})} for section in ("rollout", "train")}
    both["rollout"]["env"] = {**both["rollout"]["env"], **(env or {})}
    whet.train(**{**tree, "run_dir": str(run_dir), **both, **over})
    return run_dir


def lines(run_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]


def rollouts(run_dir: Path) -> list[dict[str, Any]]:
    return [
        row
        for path in sorted((run_dir / "rollouts").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def game(tree: dict[str, Any], name: str) -> str:
    return tree["rollout"]["env"]["make"].rpartition(":")[0] + f":{name}"


def hosts() -> list[int]:
    """Host processes that this process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"whet.envs.host" in words and parent == os.getpid():
                found.append(int(entry.name))
    return found


def test_a_run_of_a_users_environment_trains_on_its_rewards(clean: Path) -> None:
    steps = [line for line in lines(clean) if "train/loss" in line]
    assert len(steps) == 2
    for step in steps:
        assert 1.0 < step["rollout/turns_mean"] <= 2.0
        assert step["rollout/strands_mean"] == 1.0
        assert step["reward/part/env_mean"] == step["reward/mean"] == step["reward/part/env/hit_mean"]
        assert step["rollout/failed_count"] == 0
    assert any(step["train/grad_norm"] > 0 for step in steps)
    assert hosts() == []


def test_what_was_sampled_stands_in_each_rollout_with_the_words_of_the_environment(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token: the prompt, the word that the environment has drawn for this rollout, a reply of the engine with
    its log-probs, the hint that follows from it, and the reply of the engine to all of this. Nothing else."""
    sampled: Counter[Sampled] = Counter()
    generate = NativeEngine.generate

    async def spied(self: NativeEngine, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        done = await generate(self, request, on_tokens)
        assert done.logprobs is not None
        sampled[request.prompt, tuple(done.token_ids), tuple(done.logprobs)] += 1
        return done

    monkeypatch.setattr(NativeEngine, "generate", spied)
    run_dir = train(tree, track={"trackers": ["jsonl"], "rollouts_interval": 1})
    (file, *_) = run_dir.glob("checkpoints/*/tokenizer.json")
    tokenizer = load_tokenizer(TokenizerConfig(build="chars"), model_path=None, built=file)

    kept: Counter[Sampled] = Counter()
    rows, lengths = rollouts(run_dir), Counter[int]()
    for row in rows:
        tokens, turns, said = row["token_ids"], json.loads(row["turns"]), json.loads(row["messages"])
        own = key(rollout_key(0, row["uid"], row["index"], purpose="train/main"), "env")
        word, goal = random.Random(own).choice("abc"), json.loads(row["answer"])
        read, mask, replies, hits = f"<user>ab{goal}<eos><user>{word}<eos><assistant>", [], [], []
        for n, turn in enumerate(turns):
            start, end = turn["start"], turn["end"]
            assert tokenizer.decode(tokens[len(mask) : start]) == read
            mask += [0] * (start - len(mask)) + [1] * (end - start)
            kept[tuple(tokens[:start]), tuple(tokens[start:end]), tuple(row["logprobs"][start:end])] += 1
            ended = tokens[end - 1] == tokenizer.eos_token_id
            replies += tokens[start : end - ended]
            hits.append(goal in said[1 + 2 * n]["content"])
            assert turn["reward"] == float(hits[-1])
            read = f"{'' if ended else '<eos>'}<user>{'b' if hits[-1] else 'c'}<eos><assistant>"
        assert row["mask"] == mask, "nothing follows the last reply"
        assert [m["content"] for m in said[::2]] == [word, *("b" if hit else "c" for hit in hits[:-1])]
        assert row["text"] == tokenizer.decode(replies, skip_special_tokens=True)
        assert row["reward"] == sum(hits)
        lengths[len(turns)] += 1
    assert kept == sampled
    assert sum(lengths.values()) == 2 * 4 * 4
    assert lengths[2] > 4


def test_calls_of_the_policy_inside_a_step_are_strands_of_the_rollout_and_equal_in_every_run(
    tree: dict[str, Any],
) -> None:
    runs = [train(tree, name, {"make": game(tree, "Asks")}) for name in ("one", "two")]
    first, second = ((run_dir / "metrics.jsonl").read_bytes() for run_dir in runs)
    assert first == second
    steps = [line for line in lines(runs[0]) if "train/loss" in line]
    for step in steps:  # of each reply of the conversation two more are asked for
        assert step["rollout/strands_mean"] == pytest.approx(1 + step["rollout/turns_mean"] * 2 / 3)
    assert all(step["rollout/failed_count"] == 0 for step in steps)


def test_a_host_that_is_killed_changes_no_number(clean: Path, tree: dict[str, Any], tmp_path: Path) -> None:
    killed = train(
        tree, "killed", {"make": game(tree, "Dies"), "arguments": {"once": str(tmp_path / "once")}}
    )
    assert (tmp_path / "once").exists()
    assert (killed / "metrics.jsonl").read_bytes() == (clean / "metrics.jsonl").read_bytes()
    assert rollouts(killed) == rollouts(clean)
    booked = {
        name: [sum(line.get(name, 0.0) for line in lines(x, "timings.jsonl")) for x in (clean, killed)]
        for name in ("env/host_restarts_count", "env/restarts_count")
    }
    assert booked["env/host_restarts_count"] == [0.0, 1.0]
    (again,) = re.findall(r"killed by SIGKILL; its (\d+) episodes restart", (killed / "run.log").read_text())
    assert booked["env/restarts_count"] == [0.0, float(again)]
    assert int(again) > 0


def test_a_host_that_is_killed_from_outside_is_replaced(clean: Path, tree: dict[str, Any]) -> None:
    def kill() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if (tree_dir / "metrics.jsonl").exists() and (tree_dir / "metrics.jsonl").read_text():
                for pid in hosts():
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    tree_dir = Path(tree["run_dir"]).with_name("killed")
    killer = threading.Thread(target=kill)
    killer.start()
    train(tree, "killed", {"make": game(tree, "Slow")})
    killer.join()
    assert (tree_dir / "metrics.jsonl").read_bytes() == (clean / "metrics.jsonl").read_bytes()
    assert hosts() == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "env_raised_ValueError"),
        ("exit", "env_crashed"),
        ("fault", "env_fault"),
        ("nan", "env_bad_value"),
    ],
)
def test_an_episode_that_breaks_its_world_is_unscored_and_no_other_rollout_changes(
    one_step: Path, tree: dict[str, Any], how: str, reason: str
) -> None:
    broken = train(tree, "broken", {"make": game(tree, "Hostile"), "arguments": {"how": how}}, **HOSTILE)
    (step,) = (line for line in lines(broken) if "train/loss" in line)
    assert step[f"rollout/failed/{reason}_count"] == step["rollout/failed_count"] == 4
    assert step["reward/scored_count"] == 16  # a group that failed is replaced

    def others(run_dir: Path) -> list[tuple[Any, ...]]:
        return [(r["uid"], r["text"], r["reward"]) for r in rollouts(run_dir) if r["uid"] in (0, 2, 3)]

    assert others(broken) == others(one_step)
    assert len(others(broken)) == 12
    assert all(r["reward"] is None for r in rollouts(broken) if r["uid"] == 1)


def start(tree: dict[str, Any], folder: Path, name: str, *overrides: str, code: str = COMMAND) -> Started:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({**tree, "run_dir": str(folder / name)}))
    return Started("train", str(file), *overrides, code=code, said=folder / f"{name}.said")


def below(pid: int) -> list[int]:
    """Its children, and theirs."""
    told = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = [int(word) for words in told for word in words]
    return [*pids, *(other for child in pids for other in below(child))]


def started(tree: dict[str, Any], folder: Path, name: str) -> tuple[Started, list[int]]:
    """A run in a process of its own that has finished a step, and all processes that it or they have started: its hosts
    are no forks of another one."""
    process = start(tree, folder, name, code="from whet.cli import main; main()")
    metrics, until = folder / name / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None, process.text()
        assert time.monotonic() < until
        time.sleep(0.02)
    return process, below(process.pid)


def gone(pids: list[int]) -> bool:
    """All have ended within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_goes_on_to_the_same_numbers_and_leaves_no_process(
    three_steps: Path, tree: dict[str, Any], tmp_path: Path, how: signal.Signals
) -> None:
    tree["rollout"]["env"]["make"] = game(tree, "Starts")
    tree |= SAVED | {"train": tree["train"] | SAVED["train"]}
    process, left = started(tree, tmp_path, "broken")
    assert any(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in left)
    daemons = [int(pid) for pid in (tmp_path / "daemons").read_text().split()]
    assert len(daemons) >= 1
    left += daemons
    process.send_signal(how)
    process.wait(60)
    assert gone(left)
    again = start(tree, tmp_path, "broken")
    assert again.wait(120) == 0, again.text()
    assert (tmp_path / "broken/metrics.jsonl").read_bytes() == (three_steps / "metrics.jsonl").read_bytes()


def test_an_evaluation_plays_the_environment(tree: dict[str, Any]) -> None:
    data = {
        **tree["data"],
        "eval": [{"rows": [{"prompt": "abc", "answer": "c"}], "name": "held"}],
        "exclude_eval": False,
    }
    run_dir = train(tree, data=data, eval={"at_end": True, "samples": 2, "sampling": {"temperature": 1.0}})
    (line,) = (line for line in lines(run_dir) if "eval/held/reward_mean" in line and line["step"] == 2)
    assert line["eval/held/unscored"] == 0


def test_explorers_in_another_process_play_the_environment(
    clean: Path, tree: dict[str, Any], tmp_path: Path
) -> None:
    shared = {**tree, "buffer": {"url": f"sqlite:///{tmp_path}/queue.db"}, "name": "apart"}
    for process in [start(shared, tmp_path, "apart", f"mode={mode}") for mode in ("train", "explore")]:
        assert process.wait(180) == 0, process.text()
    steps = [line for line in lines(tmp_path / "apart") if "train/loss" in line]
    alone = [line for line in lines(clean) if "train/loss" in line]
    assert [step["reward/mean"] for step in steps] == [step["reward/mean"] for step in alone]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"make": "{folder}/games.py:Gues"}, "did you mean 'Guess'"),
        (
            {"make": "{folder}/games.py:Guess", "arguments": {"bonis": 1.0}},
            "'bonis' is not an argument.*'bonus'",
        ),
        ({"make": "{folder}/games.py:need"}, "missing a required argument: 'word'"),
        ({"make": "{folder}/none.py:Guess"}, "no such file"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_the_start(
    tree: dict[str, Any], tmp_path: Path, env: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tree, env={**env, "make": env["make"].format(folder=tmp_path)})
    assert hosts() == []


def test_an_environment_without_a_chat_template_for_its_prompts_ends_the_run(tree: dict[str, Any]) -> None:
    with pytest.raises(WhetError, match=r"set data\.chat=true"):
        train(tree, data={k: v for k, v in tree["data"].items() if k != "chat"})


def test_under_a_template_that_rewrites_earlier_turns_every_turn_is_a_strand(tree: dict[str, Any]) -> None:
    last = "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    done = train(tree, train={"steps": 1}, tokenizer={"build": "chars", "chat_template": last})
    assert "it rewrites earlier turns, so every turn begins a new strand" in (done / "run.log").read_text()
    assert all(len(row["strand_tokens"]) == len(json.loads(row["turns"])) for row in rollouts(done))
    assert {len(row["strand_tokens"]) for row in rollouts(done)} == {1, 2}

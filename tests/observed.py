"""A tiny run, and everything that it leaves behind: two configs differ in effect if and only if these differ."""

from __future__ import annotations

import gc
import gzip
import hashlib
import importlib.machinery
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import whet.envs.opened
import whet.explorer
import whet.guard.watch
import whet.job
import whet.models.kernels
import whet.placement
import whet.rollout.episode
import whet.rollout.hf
import whet.rollout.native.engine
import whet.stages
import whet.track.display
import whet.track.monitor
import whet.track.remote
import whet.training.profile
import whet.weights
from whet import api
from whet.config.load import load
from whet.config.tree import merge
from whet.rewards.combine import RewardSet
from whet.track.timeline import read
from whet.types import Json, Task, WhetError

Record = dict[str, str]
"""What a run left: its files by their digests, and what it was told that shows in no file."""

NOT_EFFECTS = (
    "config.yaml", "manifest.json", "timings.jsonl", "timeline.json", "run.log", "lock", "state.json", "curve.png",
)  # fmt: skip
"""Files that repeat the config, or differ between equal runs."""

TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def row(n: int) -> dict[str, Json]:
    """A row with two of every column, so that each column's key can be moved."""
    return {
        "prompt": f"{n}+{n + 1}=", "prompt2": f"{n}-{n}=", "answer": f"{n + n + 1}", "answer2": f"{n}",
        "response": f"{n + n + 1}#", "response2": f"{n}#", "responses": [f"{n}", "1"], "responses2": ["2"],
        "rejected": f"{n + 2}#", "rejected2": f"{n + 3}#", "desirable": n % 2 == 0, "desirable2": n % 3 == 0,
        "kind": "even" if n % 2 == 0 else "odd", "hard": n, "hard2": -n, "says": f"say {n}",
        "rate": n / 10, "rate2": 1 - n / 10, "mark": "*", "tools2": [{"name": f"t{n % 2}", "parameters": {}}],
        "talk": [{"role": "user", "content": f"{n}"}, *TALK[1:], {"role": "user", "content": "9-1"}, *TALK[1:]],
    }  # fmt: skip


def write_files(folder: Path) -> None:
    """What configs may name: files of rows, folders of them, code."""

    def put(name: str, rows: Sequence[int]) -> None:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row(n)) + "\n" for n in rows))

    put("a.jsonl", range(8))
    put("b.jsonl", range(3, 9))
    put("held.jsonl", range(1, 5))
    for sub in ("one", "two"):
        put(f"set/{sub}/train.jsonl", range(6) if sub == "one" else range(2, 9))
        put(f"set/{sub}/test.jsonl", range(4, 9))
    here = "pathlib.Path(__file__).with_name('imported.txt')"
    (folder / "mine.py").write_text(f"import pathlib\n{here}.write_text('yes')\n")
    (folder / "rows.py").write_text(CODE)


CODE = """
import os
import zlib

from whet.envs.env import EnvStep
from whet.types import Message, ToolSpec


def made(n=6):
    return [{"prompt": f"{i}*2=", "answer": str(i), "response": "4", "hard": i} for i in range(n)]


def others():
    return made(5)[::-1]


def judged(response, task):
    return zlib.crc32(f"{response}|{task.answer}|{task.prompt}".encode()) / 2**32


def half(response, task):
    if zlib.crc32(response.encode()) % 2:
        raise ValueError("odd")
    return judged(response, task)


def environment(response, task):
    return float(os.environ.get("MARK", "1"))


class Game:
    def __init__(self, task, bonus=0.0, done=False):
        self.bonus, self.done = bonus, done

    async def first(self):
        return []

    async def step(self, reply):
        return EnvStep([Message("user", "1")], len(reply.content) + self.bonus, done=self.done)


def Stubborn(task):
    return Game(task, done=True)


class Paid(Game):
    async def step(self, reply):
        return EnvStep([Message("user", "1")], 1.0, {"cost": 1.0}, done=False)


class Caller(Game):
    tools = [ToolSpec("add", "adds", {})]
"""


def judge(response: str, task: Task, *, salt: str = "") -> float:
    """A reward that everything shows in."""
    digest = hashlib.sha256(f"{response}|{task.answer}|{task.prompt}|{salt}".encode()).digest()
    return digest[0] / 255


class Watcher:
    """Runs configs and says what came of each. Reward processes with equal settings are shared."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        self.sets: dict[str, RewardSet] = {}
        self.seen: dict[str, Record] = {}
        self.told: list[str] = []
        self._from_config = RewardSet.from_config

    def close(self) -> None:
        for rewards in self.sets.values():
            rewards.jail and rewards.jail.close()

    def record(self, tree: Mapping[str, Json]) -> Record:
        """What a run of this config leaves behind; 'refused' alone where it is none."""
        key = json.dumps(tree, sort_keys=True)
        if key not in self.seen:
            self.seen[key] = self._run(tree)
        return self.seen[key]

    def _run(self, tree: Mapping[str, Json]) -> Record:
        self.runs += 1
        at = self.folder / str(self.runs)
        at.mkdir()
        write_files(at)
        self.told = []
        return self._inside(at, tree)

    def resumed(self, tree: Mapping[str, Json], over: Mapping[str, Json]) -> Record:
        """What a run leaves that ended after its first checkpoint and goes on with keys put over its config."""
        self._run(tree)
        at = self.folder / str(self.runs)
        for later in sorted(at.glob("runs/*/checkpoints/*"))[1:]:
            shutil.rmtree(later)
        self.told = []
        return self._inside(at, merge(dict(tree), dict(over)))

    def _inside(self, at: Path, tree: Mapping[str, Json]) -> Record:
        before = Path.cwd()
        os.chdir(at)
        try:
            with ExitStack() as stack:
                self._watch(stack)
                loaded = load(None, (), tree)
                mine = {
                    name: judge
                    for cfg in loaded.stages
                    for name, r in cfg.rewards.items()
                    if (r.function or "").startswith("object:")
                }
                api.run_training(loaded, mine)
        except WhetError as e:
            return {"refused": str(e)}
        finally:
            os.chdir(before)
            for name in ("rows", "mine"):
                sys.modules.pop(name, None)
        return files(at) | {"told": "\n".join(self.told), "timed": timed(at)}

    def _watch(self, stack: ExitStack) -> None:
        """Leave out what costs time and shows nothing, and note what shows in no file."""

        def put(target: Any, name: str, new: Any) -> None:
            stack.enter_context(patch.object(target, name, new))

        for name in ("collect", "freeze", "unfreeze"):
            put(gc, name, lambda *generation: 0)
        put(os, "fsync", lambda handle: None)
        put(
            api.environment,
            "prepare",
            lambda threads, exact: self.told.append(f"threads {threads}, exact {exact}"),
        )
        stack.enter_context(patch("whet.track.curve.plot", lambda path: None))
        stack.enter_context(patch("whet.track.show.report", lambda path, curve=None: ""))
        stack.enter_context(
            patch("whet.track.manifest.describe", lambda **said: {"started_utc": "2026-01-01T00:00:00"})
        )
        put(RewardSet, "from_config", staticmethod(self._rewards))
        put(RewardSet, "close", lambda rewards: None)
        note = self._noting
        for target, name, wanted in (
            (api, "setup_logging", ("level",)),
            (api, "Watch", ("limit_s",)),
            (whet.models.kernels, "load", (0,)),
            (whet.track.display, "Display", ("quiet",)),
            (whet.job, "self_test", ("seed",)),
            (whet.rollout.native.engine, "NativeEngine", ("max_num_seqs", "max_context", "cache_mb")),
            (whet.rollout.hf, "HfEngine", ("max_context",)),
            (whet.job, "Saver", ("background",)),
            (whet.placement, "TorchEngine", ("cut", "max_skipped")),
            (whet.training.profile, "schedule", ("warmup",)),
            (whet.explorer, "play_groups", ("timeout_s", "pace", "retries")),
            (whet.explorer, "Buffer", ("spare",)),
            (whet.envs.opened, "EnvHosts", (0,)),
            (whet.weights, "publish", ("finish",)),
            (whet.track.monitor, "wait", ("timeout_s",)),
        ):  # fmt: skip
            put(target, name, note(getattr(target, name), name, wanted))
        for name in ("wandb", "swanlab", "mlflow"):
            # not patch.dict: it would forget all modules that the run imports, and torch's can't be imported twice
            sys.modules[name] = tracker(name, self.told)
            stack.callback(sys.modules.pop, name, None)

    def _noting(self, function: Any, name: str, wanted: Sequence[str | int]) -> Callable[..., Any]:
        def noted(*args: Any, **given: Any) -> Any:
            said = [args[w] if isinstance(w, int) else given.get(w) for w in wanted]
            line = f"{name} {said}"
            if line not in self.told:
                self.told.append(line)
            return function(*args, **given)

        return noted

    def _rewards(self, rewards: Any, guard: Any, objects: Any = None, **given: Any) -> RewardSet:
        limits = f"{guard.count} {guard.sandbox} {guard.timeout_s} {guard.memory_mb}"
        self.told.append(f"rewards: {limits}")
        # what opens judges has no processes
        key = repr((rewards, guard, sorted(objects or ()), {**given, "open_judge": None}))
        if key not in self.sets:
            self.sets[key] = self._from_config(rewards, guard, objects, **given)
        return self.sets[key]


def tracker(name: str, told: list[str]) -> ModuleType:
    """A twin of W&B, SwanLab or MLflow that notes what the run is called there."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def note(**given: Any) -> Any:
        told.append(
            f"{name}: { {k: v for k, v in given.items() if k not in ('config', 'dir', 'logdir', 'id')} }"
        )
        return SimpleNamespace(define_metric=lambda *a, **k: None, log=tables, finish=lambda: None)

    def tables(given: Mapping[str, Any], **_: Any) -> None:
        told.extend(f"{name}: {key} {table}" for key, table in given.items() if isinstance(table, dict))

    vars(module).update(
        init=note, Table=dict, log=lambda *a, **k: None, errors=SimpleNamespace(Error=ValueError)
    )
    return module


def trace(path: Path) -> str:
    """What kinds of things a profiler's trace has, which equal runs share; its times they do not."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return str(sorted({(e.get("cat"), *sorted(e.get("args", ()))) for e in events if e.get("cat")}))


def timed(at: Path) -> str:
    """What the timelines below a folder have spans of."""
    spans = [span for path in at.rglob("timeline.json") for span in read(path)]
    return ", ".join(sorted({f"{s.lane} {s.name}" for s in spans}))


def files(at: Path) -> Record:
    """Every file below a folder by its digest, and every folder and link by its name."""

    def read(path: Path) -> str:
        if path.is_symlink():
            return f"-> {os.readlink(path).replace(str(at), '')}"
        if path.name == "timeline.json":  # what was done, but not when
            return str(sorted({event["name"] for event in json.loads(path.read_text())}))
        if path.name.endswith(".json.gz"):
            return trace(path)
        if path.is_dir():
            return ""
        data = path.read_bytes()
        if path.name == "dumps.jsonl":  # where they lie
            data = data.replace(str(at).encode(), b"")
        return hashlib.sha256(data).hexdigest()

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from walk(path)

    wanted = (path for path in walk(at) if path.name not in NOT_EFFECTS and "__pycache__" not in path.parts)
    return {str(path.relative_to(at)): read(path) for path in wanted}

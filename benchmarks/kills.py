"""Random kills: SIGKILL and SIGSTOP over the processes of small runs, and what becomes of the runs.

    python benchmarks/kills.py                              # 240 kills, 40 of each kind, into benchmarks/kills.json
    python benchmarks/kills.py --kind ranks --kills 20 --output /tmp/kills.json

Six kinds: `ray` (a driver and two engine replicas in a Ray cluster), `apart` (a trainer and two explorers over SQLite,
schedule free), `rounds` (the same, schedule fixed), `ranks` (a driver and two trainer ranks), `served` (a driver and
the double of a vLLM server, which it starts), `served-ranks` (both). In a run one process after the other is hit,
chosen, like the signal and the moment, by the seed; the next is hit once the run has gone on for a step. What is killed
and is not replaced by the run itself is started again by the same command. A process that was stopped gets SIGCONT
after a while, if nobody watches over it; an engine, a server or a rank is left to the run. After every run: nobody is
left behind, every rollout is accounted for, no step is missing or done twice, and where the schedule is deterministic
(all but apart) metrics.jsonl is, byte for byte, that of the run nobody touched (without the numbers of a canary).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from whet.guard.processes import process

HERE = Path(__file__).parent
WAIT_S = 240.0
"""Longest wait for anything: what takes longer is a hang."""
GAP_S = (0.1, 2.0)
"""Between a step after a hit and the next hit."""
MAIN = 0.7
"""Share of hits that spare the processes of the rewards."""
HELD_S = (0.5, 5.0)
"""How long a process stays stopped that nobody watches over, or whose caller waits longer than that by design."""
MOST_WRONG = 5
"""A sweep with more faults is given up."""
END_S = 60.0
"""How long what belonged to a dead process may take to end."""
REWARD = """
import random, time

def letters(response, task):
    time.sleep(0.01)
    return sum(a == b for a, b in zip(response, task.answer)) + 0.1 * random.random()
"""
"""With noise, which must come back when a step is repeated; slow, or the run would be over before it is hit."""

Kind = Literal["ray", "apart", "rounds", "ranks", "served", "served-ranks"]
RANKED = ("ranks", "served-ranks")
"""Kinds with ranks."""
SERVED = ("served", "served-ranks")
"""Kinds whose engine is a server that the run starts."""
SERVER = """#!/bin/sh
exec {python} -c "from vllm_double import main; main()" "$@"
"""
APART = ("apart", "rounds")
"""Kinds with processes that live on by themselves."""
Signal = Literal["SIGKILL", "SIGSTOP"]


def tree(folder: Path, steps: int) -> dict[str, Any]:
    """What all kinds have in common."""
    rows = [{"prompt": f"copy {n}", "answer": "abcd"[n % 4] * 4} for n in range(16)]
    return {
        "run_dir": str(folder / "run"),
        "name": "kills",
        "seed": 3,
        "model": {
            "scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        },
        "tokenizer": {"build": "chars"},
        "data": {"train": [{"rows": rows}]},
        "rewards": {"letters": {"function": "slow.py:letters"}},
        "reward_workers": {"timeout_s": 120, "count": 1},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 12}},
        "train": {"steps": steps, "tasks_per_step": 4, "optimizer": {"lr": 1e-2}},
        "checkpoint": {"interval": 2, "export": False},
        "track": {"trackers": ["jsonl"]},
        "machine": {"threads": 1},
    }


# ---------------------------------------------------------------- kinds


@dataclass
class Hit:
    """One signal to one process, and what came of it."""

    kind: Kind
    target: str
    signal: Signal
    step: int
    outcome: str = ""
    seconds: float = 0.0
    """Until the run had gone on."""
    said: str = ""
    """What the run's own log or error said of it."""


NAMED = "ended, named it; resumed"
LATE = {"reward-keeper": "guard the rewards", "rank": r"rank \d+ of \d+ died"}
"""Processes that a run may miss only later, while others go on, and how its end names them."""
GOOD = ("recovered", "went on after SIGCONT", NAMED, "resumed by the same command")


@dataclass
class Site:
    """A run of one kind, alive: its processes by name, and where they write."""

    kind: Kind
    folder: Path
    steps: int
    address: str | None = None
    """Of the Ray cluster."""
    patience_s: float = 16.0
    """After which a rank that says nothing is given up; an engine, after a quarter of it."""
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """In the environment of every process that is started here."""
    late: Hit | None = None
    """The last kill of one of LATE that no end has named: the run may be a step further before it needs the dead."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    known: set[tuple[int, int]] = field(default_factory=set)
    """All processes of it that were ever seen."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "slow.py").write_text(REWARD)
        given = tree(self.folder, self.steps)
        if self.kind == "ray":
            # all of them end well before WAIT_S: a hit is decided by the run, whatever it was doing
            given["rollout"] |= {"replicas": 2, "timeout_s": WAIT_S / 2}
            given["sync"] = {"timeout_s": WAIT_S / 4}
            given["cluster"] = {
                "address": self.address,
                "health_timeout_s": self.patience_s / 4,
                "restarts": 1000,
            }
            given["cluster"] |= {"start_timeout_s": WAIT_S / 2}
        if self.kind in RANKED:
            given["train"] |= {"parallel": {"dp_shard": 2, "timeout_s": self.patience_s}}
        if self.kind in SERVED:
            (self.folder / "vllm").write_text(SERVER.format(python=sys.executable))
            (self.folder / "vllm").chmod(0o755)
            path = os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent / "tests")])
            server = {
                "command": str(self.folder / "vllm"),
                "env": {"PYTHONPATH": path},
                "token": "open sesame",
            }
            given["rollout"] |= {"engine": "vllm", "server": server | {"timeout_s": self.patience_s / 2}}
            given["rollout"]["server"] |= {"start_timeout_s": WAIT_S / 2, "restarts": 1000}
            given["machine"] |= {"logprob_parity": "off"}
        if self.kind in APART:
            schedule = {"schedule": "async"} if self.kind == "apart" else {}
            given["rollout"] |= {"max_staleness": 2} | schedule
            given["buffer"] = {"url": f"sqlite:///{self.folder}/groups.db", "lease_s": 2.0}
            given["sync"] = {"timeout_s": WAIT_S}
        self.config.write_text(yaml.safe_dump(given))

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def names(self) -> list[str]:
        return ["trainer", "one", "two"] if self.kind in APART else ["driver"]

    def start(self, name: str) -> None:
        how = {"driver": [], "trainer": ["mode=train"]}.get(
            name, ["mode=explore", f"buffer.explorer_name={name}"]
        )
        command = [sys.executable, "-m", "whet.cli", "train", str(self.config), *how]
        env = os.environ | {"OMP_NUM_THREADS": "1", "WHET_KILLS": self.mark}
        with (self.folder / f"{name}.said").open("ab") as said:
            self.running[name] = subprocess.Popen(
                command, stdout=said, stderr=said, env=env, cwd=self.folder, start_new_session=True
            )

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.said").read_text(errors="replace")

    def log(self, name: str) -> str:
        own = self.folder / "run" / ("" if name in ("driver", "trainer") else f"explorers/{name}") / "run.log"
        return own.read_text(errors="replace") if own.exists() else ""

    @property
    def done(self) -> int:
        """Steps written down."""
        path = self.folder / "run/metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def finished(self) -> bool:
        return all(p.poll() == 0 for p in self.running.values())

    def targets(self) -> dict[str, list[tuple[int, int]]]:
        """Processes that can be hit now, by what they are."""
        out: dict[str, list[tuple[int, int]]] = {}
        for name, started in self.running.items():
            if started.poll() is None:
                out.setdefault("explorer" if name in ("one", "two") else name, []).append(
                    process(started.pid)
                )
        folder = self.folder / "run/stacks" / socket.gethostname()
        for file in folder.iterdir() if folder.is_dir() else ():
            who, pid, began = (file.name.rsplit(".", 2) + ["", ""])[:3]
            if pid.isdigit() and process(int(pid)) == (int(pid), int(began)):
                who = re.sub(r"-\d+$", "", who)
                if who in ("engine", "rank", "reward", "reward-nursery", "reward-keeper"):
                    out.setdefault(who, []).append((int(pid), int(began)))
        log = self.folder / "run/engine.log"
        for pid in re.findall(r"its process is (\d+)", log.read_text() if log.exists() else "")[-1:]:
            if self.is_marked(int(pid)):
                out["server"] = [process(int(pid))]
        return out

    def is_marked(self, pid: int) -> bool:
        """Whether a process lives that was started here."""
        with suppress(OSError):
            return f"WHET_KILLS={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False

    def everyone(self) -> list[tuple[int, int]]:
        """All processes that belong to this run, found by the mark in their environment or by the run's own list."""
        found = [who for group in self.targets().values() for who in group]
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        found += [process(pid) for pid in pids if self.is_marked(pid)]
        self.known |= {who for who in found if who[1]}
        return sorted(who for who in self.known if process(who[0]) == who)

    def close(self) -> None:
        for who in self.everyone():
            with suppress(ProcessLookupError):
                os.kill(who[0], signal.SIGKILL)
        for started in self.running.values():
            started.wait(30)


def until(reached: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
    end = time.monotonic() + within_s
    while not (found := reached()):
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.02)
    return found


# ---------------------------------------------------------------- one hit


def hit(site: Site, rng: random.Random) -> Hit | None:
    """Hit one process and wait until the run has gone on. None: there was nobody to hit any more."""
    there = site.targets()
    if not any(p.poll() is None for p in site.running.values()) or not there:
        return None
    main = sorted(name for name in there if not name.startswith("reward"))
    target = rng.choice(main if main and rng.random() < MAIN else sorted(there))
    who = rng.choice(sorted(there[target]))
    name: Signal = rng.choice(["SIGKILL", "SIGSTOP"])
    made = Hit(site.kind, target, name, site.done)
    owner = next((n for n, p in site.running.items() if p.pid == who[0]), None)
    site.everyone()  # notes who belongs to it
    base, start = site.done, time.monotonic()
    site.late = made if target in LATE and name == "SIGKILL" else site.late
    with suppress(ProcessLookupError):
        os.kill(who[0], getattr(signal, name))
    try:
        if owner is not None and name == "SIGKILL":
            site.running[owner].wait(END_S)
            again(site, owner)
            made.outcome = "resumed by the same command"
        elif name == "SIGSTOP" and (owner is not None or target == "reward"):
            time.sleep(rng.uniform(*HELD_S))
            with suppress(ProcessLookupError):
                os.kill(who[0], signal.SIGCONT)
            made.outcome = "went on after SIGCONT"
        made.outcome = followed(site, made, base) or made.outcome or "recovered"
    except TimeoutError as error:
        made.outcome = f"HANG: {error}"
    made.seconds = round(time.monotonic() - start, 2)
    return made


def again(site: Site, name: str) -> None:
    """Start a process that has ended, once all that belonged to it have ended, too."""
    if site.kind not in APART:
        until(lambda: not site.everyone(), "the end of what belonged to the dead", END_S)
    site.start(name)


def followed(site: Site, made: Hit, base: int) -> str | None:
    """Wait until the run is a step further; start again what has ended. Returns the outcome if it was that."""
    outcome = None
    end = time.monotonic() + 2 * WAIT_S
    while not site.finished:
        base = min(base, site.done)  # a resumed run begins at its checkpoint
        if site.done > base:
            break
        if time.monotonic() > end:
            raise TimeoutError(f"no step after {made.target} was hit")
        for name, started in list(site.running.items()):
            code = started.poll()
            if code not in (None, 0):
                outcome = judged(site, made, name, code)
                again(site, name)
                end = time.monotonic() + 2 * WAIT_S
        time.sleep(0.02)
    return outcome


def last_told(site: Site, name: str) -> str:
    """The last message that a command printed of its end."""
    return next((line for line in reversed(site.said(name).splitlines()) if line.startswith("whet: ")), "")


def missed(site: Site, told: str) -> bool:
    """Whether an end is that of what was killed earlier (`LATE`) and is missed only now; it is booked there."""
    late = site.late
    if late is None or not re.search(LATE[late.target], told):
        return False
    late.outcome, late.said, site.late = NAMED, told, None
    return True


def judged(site: Site, made: Hit, name: str, code: int) -> str:
    """What it means that a process has ended by itself."""
    told = last_told(site, name)
    last = told if code == 1 else ""
    if site.late is not made and missed(site, last):
        return made.outcome
    made.said = told[:300] or site.said(name)[-300:]
    word = {
        "rank": r"rank \d+ of \d+ is stopped" if made.signal == "SIGSTOP" else r"rank \d+ of \d+ died",
        "engine": r"replica|engine",
        "server": r"server|engine",
        "reward-keeper": r"reward",
        "reward-nursery": r"reward",
    }
    named = last and re.search(word.get(made.target, "$^"), last)
    if named and made is site.late:
        site.late = None
    return NAMED if named else f"ENDED ({code}) without naming it"


# ---------------------------------------------------------------- a run


def play(site: Site, rng: random.Random, most: int) -> Iterator[Hit]:
    """One run to its end, hit at most so many times."""
    for name in site.names:
        site.start(name)
    until(lambda: site.done >= 1 or ended(site), "the first step")
    for _ in range(most):
        time.sleep(rng.uniform(*GAP_S))
        made = hit(site, rng)
        if made is None:
            break
        yield made
    until(lambda: site.finished or (not went_on(site) and ended(site)), "the end of the run", 4 * WAIT_S)
    if not site.finished:
        raise RuntimeError(ended(site))


def went_on(site: Site) -> bool:
    """Start a process again that misses only after the last hit what one before it has killed, and says so."""
    for name, started in list(site.running.items()):
        if started.poll() == 1 and missed(site, last_told(site, name)):
            again(site, name)
            return True
    return False


def ended(site: Site) -> str:
    return "; ".join(
        f"{n} ended with {p.poll()}: {site.said(n)[-500:]}" for n, p in site.running.items() if p.poll()
    )


def say(made: Hit, at: str) -> None:
    print(f"{at:>8} {made.kind:6} {made.target:15} {made.signal} at step {made.step:3}: {made.outcome} "
          f"({made.seconds:.1f} s) {made.said[:150]}", flush=True)  # fmt: skip


def faults(site: Site, unbroken: bytes | None) -> list[str]:
    """What is wrong with a run that has ended; nothing, if all is well."""
    found = []
    metrics = (site.folder / "run/metrics.jsonl").read_bytes()
    lines = [json.loads(line) for line in metrics.splitlines()]
    if unbroken is not None and compared(site, metrics) != compared(site, unbroken):
        found.append("metrics.jsonl differs from the unbroken run's")
    if [line["step"] for line in lines if "train/loss" in line] != list(range(1, site.steps + 1)):
        found.append("steps are missing or double")
    found += [f"step {line['step']}: {line['ledger/pending_rollouts']:g} rollouts pending" for line in lines[-1:]
              if site.kind not in APART and line["ledger/pending_rollouts"]]  # fmt: skip
    if site.kind in APART:
        found += store_faults(site)
    elif said := unbalanced(lines):
        found.append(said)
    try:
        until(lambda: not orphans(site), "no orphans", END_S)
    except TimeoutError:
        found.append(f"left behind: {orphans(site)}")
    return found


def compared(site: Site, metrics: bytes) -> bytes:
    """Without those of the canary: the model that continues its prompts is the one that a process begins with."""
    return re.sub(rb'"sync/canary_\w+": [^,}]*,? ?', b"", metrics) if site.kind in SERVED else metrics


def unbalanced(lines: list[dict[str, Any]]) -> str:
    """Whether what was asked for over all steps has become anything else than what was trained, or left out for a
    reason."""
    counted: Counter[str] = Counter()
    for line in lines:
        counted.update({k: v for k, v in line.items() if k.startswith("ledger/") and "pending" not in k})
    asked = counted.pop("ledger/requested_rollouts", 0.0)
    return "" if asked == counted.total() else f"{asked:g} rollouts asked, {counted.total():g} accounted for"


def store_faults(site: Site) -> list[str]:
    from whet.buffer.stores import open_store
    from whet.types import WhetError

    store = open_store(f"sqlite:///{site.folder}/groups.db", queue="kills/main", order="arrival")
    try:
        store.check()
        trained = store.ledger()["trained" if site.kind == "apart" else "delivered"]
    except WhetError as error:
        return [str(error)]
    finally:
        store.close()
    return (
        []
        if trained == site.steps * 4 * 4
        else [f"{trained} rollouts trained, {site.steps * 4 * 4} expected"]
    )


def orphans(site: Site) -> list[str]:
    found = []
    for pid, began in site.everyone():
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if process(pid) == (pid, began):
                found.append(f"{pid} {command[:80]}")
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A Ray cluster of our own; it asks for a token that only we know."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    options = ["--num-cpus=4", "--include-dashboard=false", f"--object-store-memory={100 << 20}"]
    command = [str(ray), "start", "--head", "--block", f"--port={port}", "--disable-usage-stats", *options]
    with (folder / "ray.said").open("wb") as said:
        head = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def up() -> re.Match[str] | None:
        said = (folder / "ray.said").read_text()
        if head.poll() is not None:
            raise RuntimeError(f"no Ray cluster: {said[-1000:]}")
        return re.search(r"ray start --address='([\d.:]+)'", said)

    try:
        yield until(up, "a cluster")[1]
    finally:
        head.terminate()
        head.wait(60)


# ---------------------------------------------------------------- the sweep


def sweep(
    kind: Kind, kills: int, *, seed: int, steps: int, folder: Path, patience_s: float = 16.0
) -> tuple[list[Hit], list[str]]:
    """Runs of one kind until so many processes have been hit. Returns the hits, and what was wrong after the runs."""
    rng = random.Random(f"{kind} {seed}")
    hits: list[Hit] = []
    wrong: list[str] = []
    unbroken = None
    (folder / kind).mkdir(parents=True)
    with cluster(folder / kind) if kind == "ray" else none() as address:
        for number in count(int(kind == "apart")):  # 0: nobody touches it
            if len(hits) >= kills or len(wrong) > MOST_WRONG:
                break
            site = Site(kind, folder / kind / str(number), steps, address, patience_s)
            try:
                for made in play(site, rng, (kills - len(hits)) * bool(number)):
                    hits.append(made)
                    say(made, f"{len(hits)}/{kills}")
                if number == 0:
                    unbroken = (site.folder / "run/metrics.jsonl").read_bytes()
                found = faults(site, unbroken)
                wrong += [f"{kind} run {number}: {fault}" for fault in found]
                print(
                    f"{'':8} {kind} run {number}, {site.steps} steps: {'; '.join(found) or 'whole'}",
                    flush=True,
                )
            except (RuntimeError, TimeoutError) as error:
                wrong.append(f"{kind} run {number}: {error}")
            finally:
                site.close()
    return hits, wrong


@contextmanager
def none() -> Iterator[None]:
    yield None


def table(hits: list[Hit]) -> str:
    """Counts by process, signal and outcome."""
    counted = Counter((h.kind, h.target, h.signal, h.outcome) for h in hits)
    rows = [
        f"| {kind} | {target} | {name} | {outcome} | {n} |"
        for (kind, target, name, outcome), n in sorted(counted.items())
    ]
    return "\n".join(["| run | process | signal | outcome | hits |", "|---|---|---|---|---|", *rows])


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--kills", type=int, default=240, help="over all kinds")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--steps", type=int, default=60, help="of each run")
    ask.add_argument("--patience", type=float, default=16.0,
                     help="seconds until a silent rank is given up; an engine, after a quarter of it")  # fmt: skip
    ask.add_argument("--kind", choices=get_args(Kind), action="append", help="default: all")
    ask.add_argument("--output", type=Path, default=HERE / "kills.json", help="the report, once it is whole")
    ask.add_argument("--folder", type=Path, help="where the runs stand, and stay")
    given = ask.parse_args()
    kinds: list[Kind] = given.kind or list(get_args(Kind))
    hits: list[Hit] = []
    wrong: list[str] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="whet-kills-") as temporary:
        for number, kind in enumerate(kinds):
            folder = given.folder or Path(temporary)
            share = len(range(number, given.kills, len(kinds)))
            more, faulty = sweep(
                kind, share, seed=given.seed, steps=given.steps, folder=folder, patience_s=given.patience,
            )  # fmt: skip
            hits, wrong = hits + more, wrong + faulty
    bad = [h for h in hits if h.outcome not in GOOD]
    print(table(hits))
    print("\n".join(wrong) or "every run ended whole: equal numbers, balanced, nobody left behind")
    report = {
        "seed": given.seed, "steps": given.steps, "seconds": round(time.monotonic() - start),
        "cores": os.cpu_count(), "hits": [asdict(h) for h in hits], "wrong": wrong,
    }  # fmt: skip
    if len(hits) < given.kills:
        sys.exit(f"given up after {len(hits)} of {given.kills} hits; nothing is written")
    unfinished = given.output.with_name(f".{given.output.name}.new")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(given.output)
    sys.exit(1 if wrong or bad else 0)


if __name__ == "__main__":
    main()

"""What environments ask of their run: scores of its rewards and programs in a sandbox, from a host process and from
here, from async and plain methods, through a whole run; and what becomes of calls that fail or are cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from test_env_contract import play
from test_environments import hosts as host_pids
from test_environments import lines, rollouts, train, tree_in
from test_judge import chat_model  # noqa: F401  a fixture
from whet.config.load import load
from whet.config.schema import Config, EnvironmentConfig
from whet.envs.env import EnvBroken, EnvStep, MakeEnv, World
from whet.envs.host import EnvHost
from whet.envs.hosts import MOST_ASKED, EnvHosts
from whet.envs.journal import Journal
from whet.envs.journaled import journaled
from whet.envs.marks import Marks
from whet.envs.work import RunWork
from whet.guard import confine, sandbox
from whet.guard import program as program_module
from whet.guard.program import Programs
from whet.guard.program import run as run_programs
from whet.judges import judges_of
from whet.rehearsal.probe import probe
from whet.rehearsal.shrink import shrink
from whet.rewards.bind import pack_task
from whet.rewards.combine import RewardSet
from whet.tables import load_object
from whet.types import Json, Message, Rollout, Task

needs_sandbox = pytest.mark.skipif(bool(sandbox.lacking()), reason=sandbox.lacking())

REWARDS = '''
import os
import time


def length(response, answer="", rollout=None):
    return {"score": len(response), "answer_length": len(answer), "messages": len(rollout["messages"])}


def where(response):
    return float(os.getpid())


def prompted(response, task):
    return float(len(task.prompt if isinstance(task.prompt, str) else task.prompt[0].content))


def outlives(response):
    """Begins, as a file says, and ends after the process that the reply names; at once where it has done so before."""
    pid, begun = response.split(" ", 1)
    if not os.path.exists(begun):
        open(begun, "w").close()
        until = time.monotonic() + 60
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
            time.sleep(0.02)
    return 1.0


def gate(response):
    until = time.monotonic() + 60
    while not os.path.exists(response) and time.monotonic() < until:
        time.sleep(0.02)
    return 1.0


def differs(response, counter):
    """Another value each time."""
    with open(counter, "a+") as file:
        file.write("x")
        return float(file.tell())


def grouped(prompts, completions):
    return [None] * len(completions)


def slow(response):
    time.sleep(2.5)
    return 1.0


def hangs(response):
    time.sleep(1000)


def raises(response):
    raise ValueError("no good")


def nan(response):
    return float("nan")
'''

WORLDS = '''
import asyncio
import os
import signal
import threading
import time

from whet.envs.env import EnvStep
from whet.types import Message

DOUBLE = "print(2 * int(input()))"


class Asks:
    """Two turns; each does to the run what it is told."""

    def __init__(self, task, world, how, note=""):
        self.uid, self.world, self.how, self.note, self.turn = task.uid, world, how, note, 0

    async def first(self):
        return []

    async def step(self, reply):
        self.turn += 1
        done = EnvStep([Message("user", "7")], 0.5, done=self.turn == 2)
        return await HOW[self.how](self, reply, done) if self.uid == 10 else done


async def works(env, reply, done):
    world = env.world
    one = await world.score("abc", reward="length", answer="wxyz")
    two = await world.score([Message("assistant", "ab"), Message("tool", "?"), Message("assistant", "c")])
    own = await world.score(reply, reward="prompted", prompt="12345")
    ran = await world.program(DOUBLE, stdin="21")
    return EnvStep(done.messages, one.score, state=[vars(one), vars(two), vars(own), vars(ran)], done=done.done)


class PlainAsks:
    """`works` in a thread, where a call waits by itself."""

    def __init__(self, task, world, how, note=""):
        self.other = Asks(task, self, how, note)
        self.inner = world

    def score(self, *given, **named):
        return at_once(self.inner.score(*given, **named))

    def program(self, *given, **named):
        return at_once(self.inner.program(*given, **named))

    def first(self):
        return []

    def step(self, reply):
        try:
            self.other.step(reply).send(None)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("it waits")


async def at_once(value):
    return value


async def processes(env, reply, done):
    there = await env.world.score("x", reward="where")
    return EnvStep(done.messages, state=[os.getpid(), int(there.score)], done=done.done)


async def unknown(env, reply, done):
    await env.world.score("x", reward="lenght")

async def hangs(env, reply, done):
    await env.world.score("x", reward="hangs")

async def raises(env, reply, done):
    await env.world.score("x", reward="raises")

async def nan(env, reply, done):
    await env.world.score("x", reward="nan")

async def none(env, reply, done):
    await env.world.score("x", reward="grouped")

async def tokens(env, reply, done):
    await env.world.score("x", reward="overlong")

async def unheard(env, reply, done):
    try:
        await env.world.score("x", reward="length")
    except RuntimeError:
        pass
    return done

async def all_of_them(env, reply, done):
    await env.world.score("x")

async def number(env, reply, done):
    await env.world.score(3)

async def nothing(env, reply, done):
    await env.world.score(None)

async def asked_by_number(env, reply, done):
    await env.world.score("x", prompt=3)

async def answered_by_set(env, reply, done):
    await env.world.score("x", answer={1, 2})

async def huge(env, reply, done):
    await env.world.score("x" * 10**7, reward="length")

async def memory(env, reply, done):
    await env.world.program("1", memory_mb=10**6)

async def no_time(env, reply, done):
    await env.world.program("1", limit_s=0)

async def huge_code(env, reply, done):
    await env.world.program("1" * 10**7)

async def forgets(env, reply, done):
    env.world.score("x", reward="slow")
    return done

async def too_many(env, reply, done):
    """No call has an answer before all are there."""
    calls = [asyncio.ensure_future(env.world.score(env.note, reward="gate")) for _ in range(300)]
    await asyncio.wait(calls[-1:])
    open(env.note, "w").close()
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [str(each) for each in found if isinstance(each, RuntimeError)]
    return EnvStep(done.messages, state=[len(refused), refused[0]], done=True)

async def catches(env, reply, done):
    said = ""
    try:
        await env.world.score("x", reward="raises")
    except RuntimeError as error:
        said = str(error)
    again = await env.world.score("xy", reward="length")
    return EnvStep(done.messages, again.score, state=said, done=done.done)

async def slow(env, reply, done):
    await env.world.score("x", reward="slow")
    return done

async def killed(env, reply, done):
    """Its process is killed once, when the reward is at work."""
    def kill():
        until = time.monotonic() + 60
        while not os.path.exists(env.note) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    if not os.path.exists(env.note):
        threading.Thread(target=kill, daemon=True).start()
    scored = await env.world.score(f"{os.getpid()} {env.note}", reward="outlives")
    return EnvStep(done.messages, scored.score, done=done.done)

async def asks_judge(env, reply, done):
    judged = await env.world.score("a reply", reward="judge", answer="4")
    return EnvStep(done.messages, judged.score, state=judged.parts, done=done.done)

async def differs(env, reply, done):
    return EnvStep(done.messages, (await env.world.score("x", reward="differs")).score, done=done.done)

async def runs(env, reply, done):
    limits = [1.0 if "while True" in code else 60.0 for code in CODES]
    ran = await asyncio.gather(*(env.world.program(c, limit_s=s, memory_mb=512) for c, s in zip(CODES, limits)))
    sizes = [len(each.printed) for each in ran]
    told = [vars(each) | {"printed": each.printed[:100]} for each in ran]
    return EnvStep(done.messages, state=[told, sizes], done=done.done)

CODES = [
    "while True: pass",
    "while True: print('x' * 9999)",
    "import sys, time\\nwhile True: sys.stderr.write('y' * 9999); time.sleep(0.001)",
    "import os\\nos.fork()",
    "bytearray(1 << 30)",
    "print('before')\\ndef f(x):\\n    return 1 / x\\nf(0)",
    "exit('bye')",
    "exit()",
    "open('/etc/passwd')",
    "import os\\nprint(sorted(os.environ))",
]

HOW = {name: value for name, value in list(globals().items()) if asyncio.iscoroutinefunction(value)}
'''

WHO = ("length", "where", "prompted", "outlives", "hangs", "raises", "nan", "grouped", "slow")


def config(folder: Path, *names: str, **more: Any) -> Config:
    """A config with these rewards; `length` and `prompted` alone have a weight and score tasks of source s."""
    (folder / "rewards.py").write_text(REWARDS)
    given = {
        n: {"function": f"{folder}/rewards.py:{n}", "weight": 2.0 if n == "length" else 0.0} for n in names
    }
    tree = tree_in(folder) | {"rewards": given | more.pop("rewards", {})}
    tree["reward_workers"] = {"count": 2, "timeout_s": 5.0} | more.pop("reward_workers", {})
    del tree["rollout"]["env"]
    tree["data"]["train"][0] |= {"name": "s", "rewards": [*given][:1]}
    return load(None, [], tree | more).config


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Callable[..., RunWork]]:
    """What a run with these rewards does for its environments."""
    opened: list[RewardSet] = []

    def made(*names: str, **more: Any) -> RunWork:
        cfg = config(tmp_path, *names, **more)
        rewards = RewardSet.from_config(cfg.rewards, cfg.reward_workers, open_judge=judges_of(cfg))
        opened.append(rewards)
        return RunWork(rewards, cfg)

    yield made
    for rewards in opened:
        rewards.close()


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., EnvHosts]]:
    (tmp_path / "worlds.py").write_text(WORLDS)
    opened: list[EnvHosts] = []

    def made(how: str, name: str = "Asks", timeout_s: float = 20.0, **arguments: Json) -> EnvHosts:
        make = f"{tmp_path}/worlds.py:{name}"
        cfg = EnvironmentConfig(make=make, arguments={"how": how, **arguments}, timeout_s=timeout_s)
        opened.append(EnvHosts(cfg))
        return opened[-1]

    yield made
    for hosts in opened:
        hosts.close()


def played(make: MakeEnv, work: RunWork | None, **options: Any) -> Rollout:
    """The rollout whose environment asks; the others are well."""
    found = play(make, 3, make_work=work.of if work else None, **options)
    asked = found.pop(10)
    assert [(r.error, r.reward) for r in found.values()] == [(None, 1.0)] * 2
    return asked


# ---------------------------------------------------------------- what they get


@needs_sandbox
@pytest.mark.parametrize("name", ["Asks", "PlainAsks", "here"])
def test_scores_and_programs_are_the_same_wherever_an_environment_is_played(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], tmp_path: Path, name: str
) -> None:
    run = work("length", "where", "prompted")
    if name == "here":
        (tmp_path / "worlds.py").write_text(WORLDS)
        asks = load_object(f"{tmp_path}/worlds.py:Asks", what="asks")
        found = played(lambda task, world: asks(task, world, "works"), run)
    else:
        found = played(worlds("works", name).make, run)
    assert found.error is None
    alone, whole, prompted, ran = found.state
    assert alone == {
        "score": 3.0,
        "parts": {"length": 3.0, "length/answer_length": 4.0, "length/messages": 0.0},
    }
    assert whole["score"] == 2.0 * 3.0 + 0.0
    assert whole["parts"].keys() == {*alone["parts"], "where", "prompted"}
    assert (whole["parts"]["length/answer_length"], whole["parts"]["length/messages"]) == (0.0, 3.0)
    assert whole["parts"]["prompted"] == len("50"), "the task's own prompt"
    assert prompted == {"score": 5.0, "parts": {"prompted": 5.0}}, "its weight is 0, its value counts"
    assert ran == {"ended": "well", "printed": "42\n", "errors": ""}
    assert found.reward == 6.0
    assert run.counts == {"scores": 6, "programs": 2}


def test_rewards_are_asked_in_their_own_processes(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts]
) -> None:
    host, reward = played(worlds("processes").make, work("where")).state
    assert len({host, reward, os.getpid()}) == 3


def test_the_judge_of_a_run_is_asked(
    work: Callable[..., RunWork],
    worlds: Callable[..., EnvHosts],
    chat_model: Path,  # noqa: F811
) -> None:
    """A tiny model with random weights: what it says is no rating, and so it is `unread`."""
    arguments = {"max_tokens": 8, "unread": 0.25}
    judge = {"function": "judge", "arguments": arguments, "model": {"path": str(chat_model)}}
    found = played(worlds("asks_judge").make, work("length", rewards={"judge": judge}))
    assert (found.error, found.state) == (None, {"judge": 0.25, "judge/read": 0.0})
    assert found.reward == 0.5


@needs_sandbox
def test_programs_end_at_their_limits_and_say_how(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_TEST_KEY", "hunter2-hunter2")
    ran, sizes = played(worlds("runs").make, work("length")).state
    assert [each["ended"] for each in ran] == [
        "time",
        "printed",
        "time",
        *["error"] * 4,
        "exit",
        "error",
        "well",
    ]
    forever, prints, complains, forks, fills, divides, leaves, _, reads, environment = ran
    assert forever == {"ended": "time", "printed": "", "errors": ""}
    assert (sizes[1], set(prints["printed"])) == (program_module.MOST_PRINTED, {"x"})
    assert complains["errors"] == "y" * program_module.MOST_ERRORS
    assert forks["errors"].endswith("PermissionError: [Errno 1] Operation not permitted\n")
    assert fills["errors"].endswith("MemoryError\n")
    assert divides["printed"] == "before\n"
    assert divides["errors"].startswith(
        'Traceback (most recent call last):\n  File "<program>", line 4, in <module>\n'
    )
    assert "    return 1 / x\n" in divides["errors"]
    assert divides["errors"].endswith("ZeroDivisionError: division by zero\n")
    assert (leaves["errors"], leaves["printed"]) == ("bye\n", "")
    assert "PermissionError" in reads["errors"]
    assert "WHET_TEST_KEY" not in environment["printed"]


@needs_sandbox
def test_a_program_that_closes_its_outputs_or_breaks_its_exceptions_is_ended_too() -> None:
    codes = {
        "import os\nos.close(1)\nos.close(2)\nwhile True: pass": ("time", ""),
        "class E(Exception):\n    def __str__(self): raise E\nraise E()": (
            "error",
            "E: <exception str() failed>",
        ),
        "import sys\nsys.stderr = None\n1 / 0": ("error", "ZeroDivisionError: division by zero"),
        "import sys\nsys.stderr.write('w')": ("well", "w"),
        "x ==": ("error", "SyntaxError: invalid syntax"),
    }
    for code, (ended, last) in codes.items():
        asked = Programs(runs=[(code, "")], seconds=1.0 if ended == "time" else 60.0, memory_mb=512)
        (ran,) = asyncio.run(run_programs(asked))
        assert (ran.ended, ran.errors.rstrip().rpartition("\n")[2]) == (ended, last)


# ---------------------------------------------------------------- what they do not get


REFUSED = {
    "unknown": "raised RuntimeError: world.score: no reward is named 'lenght'; did you mean 'length'?",
    "hangs": "raised RuntimeError: world.score: reward hangs: timeout: no result in 1 s (reward_workers.timeout_s)",
    "raises": "raised RuntimeError: world.score: reward raises: raised ValueError: no good (rewards.py:",
    "nan": "raised RuntimeError: world.score: reward nan: bad_value: nan",
    "none": "raised RuntimeError: world.score: grouped gave no value for this reply",
    "tokens": "raised RuntimeError: world.score: reward 'overlong' reads the tokens of a rollout",
    "all_of_them": "raised RuntimeError: world.score: reward 'overlong' reads the tokens of a rollout",
    "number": "raised ValueError: world.score: int; expected a text, a Message, or a list of Message",
    "nothing": "raised ValueError: world.score: NoneType; expected a text, a Message, or a list of Message",
    "asked_by_number": "raised ValueError: world.score prompt: int; expected a text, a Message, or a list of Message",
    "answered_by_set": "raised ValueError: world.score answer: it is not a JSON value: Object of type set is not",
    "huge": "raised ValueError: world.score: 10000",
    "memory": "raised RuntimeError: world.program: memory_mb=1000000; at most reward_workers.memory_mb=2048",
    "no_time": "raised ValueError: world.program limit_s=0; expected seconds above 0",
    "huge_code": "raised ValueError: world.program: 10000000 characters of code and stdin; at most 1048576",
    "forgets": "bad value: step returned before its calls of world.score were answered",
}


def test_a_call_that_fails_is_told_with_the_line_of_the_environment(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts]
) -> None:
    asks = {
        "Asks": '    await env.world.score("x", reward="lenght")',
        "PlainAsks": "        return at_once(self.inner.score(*given, **named))",
    }
    for name, code in asks.items():
        line = WORLDS.split("\n").index(code) + 1
        failed = played(worlds("unknown", name).make, work("length"))
        assert f" (worlds.py:{line}) in step (after turn 1)" in str(failed.error)


def test_no_environment_goes_on_where_the_processes_of_the_rewards_have_ended(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts]
) -> None:
    """It would take that for a failure of its reply, and the run would train on what it makes of it."""
    hosts, before = worlds("unheard"), confine.children(os.getpid())
    run = work("length")
    (keeper,) = confine.children(os.getpid()) - before
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(
        EnvBroken, match="the processes that guard the rewards ended; the same command resumes"
    ):
        played(hosts.make, run)


@pytest.mark.parametrize("how", REFUSED)
def test_a_call_that_comes_to_nothing_is_a_named_fault_of_its_episode(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], how: str
) -> None:
    overlong = {"function": "overlong", "arguments": {"max_tokens": 8, "buffer": 4}}
    run = work(
        *WHO, rewards={"overlong": overlong}, reward_workers={"timeout_s": 1.0 if how == "hangs" else 30.0}
    )
    failed = played(worlds(how).make, run)
    assert str(failed.error).startswith(f"env {REFUSED[how]}")
    assert failed.reward is None


def test_an_environment_may_go_on_after_a_call_that_failed(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts]
) -> None:
    found = played(worlds("catches").make, work("length", "raises"))
    assert (found.error, found.reward) == (None, 4.0)
    assert found.state.startswith("world.score: reward raises: raised ValueError: no good")


def test_without_rewards_or_a_sandbox_the_reason_is_told(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = played(worlds("raises").make, RunWork(None, work("length").cfg))
    assert str(failed.error).startswith(
        "env raised RuntimeError: world.score: the config has no rewards; give one"
    )
    monkeypatch.setattr(program_module.sandbox, "lacking", lambda: "it is too old")
    failed = played(worlds("runs").make, work("length"))
    said = (
        "env raised RuntimeError: world.program: programs of the policy run only in a sandbox: it is too old"
    )
    assert str(failed.error).startswith(said)
    failed = played(worlds("raises").make, None)
    assert "this world belongs to no run" in str(failed.error)


def test_an_episode_has_so_many_calls_at_once(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], tmp_path: Path
) -> None:
    hosts = worlds("too_many", note=str(tmp_path / "open"))
    found = played(hosts.make, work("gate", reward_workers={"timeout_s": 30.0}))
    assert found.error is None
    count, said = found.state
    assert count == 300 - MOST_ASKED
    assert said.startswith(f"world.score: more than {MOST_ASKED} calls of the run at once in one episode")


# ---------------------------------------------------------------- time, ends, repetitions


def test_a_wait_for_the_run_is_no_time_of_the_environment(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts]
) -> None:
    found = played(worlds("slow", timeout_s=1.5).make, work("slow", reward_workers={"timeout_s": 30.0}))
    assert found.error is None


def test_a_rollout_that_waits_too_long_ends_and_the_rewards_go_on(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts]
) -> None:
    run = work("hangs", "length", "raises", reward_workers={"timeout_s": 30.0})
    failed = played(worlds("hangs").make, run, timeout_s=4.0)
    assert str(failed.error).startswith("not finished within rollout.timeout_s=4")
    assert played(worlds("catches").make, run).error is None


@pytest.mark.parametrize("name", ["Asks", "PlainAsks"])
def test_a_host_that_is_killed_in_mid_call_is_replaced_and_the_episode_begins_anew(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], tmp_path: Path, name: str
) -> None:
    hosts = worlds("killed", name, note=str(tmp_path / "once"))
    found = played(hosts.make, work("outlives"))
    assert (tmp_path / "once").exists()
    assert (found.error, found.reward, hosts.restarts) == (None, 2.0, 1)


def test_what_stands_in_the_journal_is_not_asked_again_whatever_the_judge_would_say(
    work: Callable[..., RunWork], worlds: Callable[..., EnvHosts], tmp_path: Path
) -> None:
    reward = {"function": f"{tmp_path}/rewards.py:differs", "arguments": {"counter": str(tmp_path / "count")}}
    run, hosts = work("length", rewards={"differs": reward}), worlds("differs")

    def again() -> Rollout:
        journal = Journal(tmp_path / "journal")
        try:
            return played(journaled(hosts.make, journal, "code", counts=Counter()), run)
        finally:
            journal.close()

    first = again()
    assert (first.error, first.reward, run.counts["scores"]) == (None, 1.0 + 2.0, 2)
    assert again() == first
    assert run.counts["scores"] == 2
    assert played(hosts.make, run).reward == 3.0 + 4.0, "without the journal it differs"


# ---------------------------------------------------------------- a run


GRADED = '''
from whet.envs.env import EnvStep
from whet.types import Message


class Graded:
    """Pays for each reply what the reward `has` says, and what a program prints."""

    def __init__(self, task, world):
        self.world, self.turn = world, 0

    async def first(self):
        return []

    async def step(self, reply):
        self.turn += 1
        found = await self.world.score(reply, reward="has")
        ran = await self.world.program("print(len(input()))", stdin=reply.content + "\\n")
        parts = {"length": float(ran.printed)}
        return EnvStep([Message("user", "b")], found.score, parts, done=self.turn == 2)


def has(response, answer):
    return float(answer in response)
'''


@needs_sandbox
def test_a_run_whose_environment_asks_for_scores_and_programs(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    tree = tree_in(tmp_path)
    tree["rewards"] = {"has": {"function": f"{tmp_path}/graded.py:has", "weight": 0.0}}
    tree["data"]["eval"] = [{"rows": [{"prompt": "abx", "answer": "a"}], "name": "held"}]
    tree["track"] |= {"rollouts_interval": 1}
    done = train(tree, env={"make": f"{tmp_path}/graded.py:Graded"}, train={"steps": 1})
    (step,) = (line for line in lines(done) if "train/loss" in line)
    assert step["rollout/failed_count"] == 0
    rows = rollouts(done)
    turns = [json.loads(row["turns"]) for row in rows]
    assert [row["reward"] for row in rows] == [sum(turn["reward"] for turn in each) for each in turns]
    assert len({row["reward"] for row in rows}) > 1
    assert any(line.get("eval/accuracy") is not None for line in lines(done)), "an evaluation's may ask, too"
    asked = Counter[str]()
    for line in lines(done, "timings.jsonl"):
        asked.update({k: int(line.get(f"env/{k}_count", 0)) for k in ("scores", "programs")})
    assert asked["scores"] == asked["programs"] >= sum(map(len, turns))
    assert host_pids() == []


def test_a_rehearsal_lets_environments_ask_for_rewards_that_are_not_here(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text(
        GRADED.replace("ran = await", "ran = 0 and await").replace("ran.printed", "1")
    )
    tree = tree_in(tmp_path)
    tree["rollout"]["env"]["make"] = f"{tmp_path}/graded.py:Graded"
    tree["rewards"] = {"has": {"model": {"path": "/nowhere/model"}, "weight": 0.5}}
    loaded = load(None, [], tree)
    found = probe(loaded)
    assert found.untried == {"has"}
    assert [f.kind for f in found.findings if f.what.startswith("rollout.env")] == ["works"]
    small = shrink(loaded, run_dir=tmp_path / "small", lost={}, broken=found.broken | found.untried)
    assert small["rewards"] == {"has": {"function": "whet.rewards.made_up:coin", "weight": 0.5}}


def test_the_run_is_asked_only_while_a_call_of_the_environment_waits(tmp_path: Path) -> None:
    """What is left running between two steps, and `close`, are refused at once, also in a thread."""
    said: list[tuple[Any, ...]] = []
    refused: list[str] = []
    asking: list[World] = []

    class Outside:
        def __init__(self, task: Task, world: World) -> None:
            asking.append(world)

        async def first(self) -> list[Message]:
            return []

        async def step(self, reply: Message) -> EnvStep:
            found = await self.world.score("x")
            return EnvStep([Message("user", "7")], found.score, done=False)

        def close(self) -> None:
            refused.append(why())

        @property
        def world(self) -> World:
            return asking[0]

    def why() -> str:
        with pytest.raises(RuntimeError) as caught:
            asking[0].chat([Message("user", "9")])
        return str(caught.value)

    async def heard(host: EnvHost, kind: str, *what: Any, until: str) -> None:
        host.heard(kind, 1, *what)
        async with asyncio.timeout(30):
            while not any(each[0] == until for each in said):
                await asyncio.sleep(0.01)

    async def main() -> None:
        Marks.create(str(tmp_path / "marks"))
        host = EnvHost(Outside, {}, 60.0, Marks(str(tmp_path / "marks")), lambda *what: said.append(what))
        task = pack_task(Task(uid=0, source="s", prompt="p", token_ids=(1,)))
        await heard(host, "first", task, 7, 0, 0, until="done")
        refused.append(why())
        said.clear()
        await heard(host, "step", Message("assistant", "a").to_json(), until="score")
        host.heard("reply", 1, said[0][2], {"score": 0.5, "parts": {}})
        await heard(host, "none", until="done")
        refused.append(await asyncio.to_thread(why))
        await heard(host, "close", until="closed")

    asyncio.run(main())
    between = "world.chat: a call of the environment has returned; ask in `first` or `step`, and await the answer there"
    assert refused == [between, between, "world.chat: the episode has ended"]

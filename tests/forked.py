"""Processes forked from one that has torch and whet loaded already: an import takes seconds of CPU, a fork none.

Nothing of torch has run in the process that is forked, so a child is as good as one of a new interpreter. Call `FORKS`
only from tests: its server starts with the first child and ends with pytest.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from whet.guard import line

FORKS = multiprocessing.get_context("forkserver")
LOADED = [
    "whet.cli", "whet.stages", "whet.job", "whet.training.rank", "whet.sync.collective", "whet.sync.files",
    "matplotlib.backends.backend_agg", "pyarrow.parquet", "processes", "pytest",
    "transformers.models.qwen3.modeling_qwen3", "warm",
]  # fmt: skip
FORKS.set_forkserver_preload(LOADED)
ROOT = Path(__file__).parents[1]
_begun = forkserver._forkserver.ensure_running  # type: ignore[attr-defined]


def _on_our_path() -> None:
    """Start the server, if it is not there. It finds what it loads by its environment alone: it is told our path and
    does not use it (Python 3.11), and what it does not find it leaves out."""
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        _begun()


forkserver._forkserver.ensure_running = _on_our_path  # type: ignore[attr-defined]


def whet(*words: str, timeout_s: float = 300.0) -> str:
    """What the command says, run in the checkout; AssertionError where it fails."""
    return said(_command, *words, timeout_s=timeout_s)


def said(function: Callable[..., object], *arguments: str, timeout_s: float) -> str:
    """What function(*arguments) prints, in a process of its own; AssertionError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        process = FORKS.Process(target=_redirected, args=(function, arguments, str(out)))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
        text = out.read_text()
        assert process.exitcode == 0, text[-3000:]
        return text


COMMAND = "import forked; forked.fork_lines(); from whet.cli import main; main()"
"""`whet`, whose ranks are forked, too."""


class Forked:
    """What `subprocess.Popen` is to a new interpreter, for a process that is forked."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.process = FORKS.Process(target=function, args=arguments)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):  # it has ended meanwhile, as Popen has it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Started(Forked):
    """`whet WORDS...` under way, in a session of its own; or `code` in its place, WORDS being its arguments."""

    def __init__(
        self,
        *words: str,
        said: Path | str = os.devnull,
        code: str = COMMAND,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """said: the file that what it prints is appended to."""
        self.said = Path(said)
        super().__init__(_started, words, code, str(said), str(cwd), dict(os.environ if env is None else env))

    def text(self) -> str:
        return self.said.read_text(errors="replace")


def ran(
    code: str,
    *words: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, "-c", code, *words])` returns. For code that has nothing to say about what
    an interpreter reads when it starts, or torch when it is loaded."""
    pipes = [os.pipe() for _ in range(2)]
    given = [Connection(into, readable=False) for _, into in pipes]
    with ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(_read, out) for out, _ in pipes]
        try:
            run = Forked(played, words, code, given, str(cwd), dict(os.environ if env is None else env))
        finally:
            for end in given:
                end.close()
        try:
            returned = run.wait(timeout_s)
        finally:
            run.kill()
        return subprocess.CompletedProcess(code, returned, *(text.result() for text in texts))


def _read(pipe: int) -> str:
    with open(pipe, errors="replace") as file:
        return file.read()


def played(words: tuple[str, ...], code: str, ends: list[Connection], cwd: str, env: dict[str, str]) -> None:
    """In the child. ends: its standard output and error."""
    for number, end in enumerate(ends, start=1):
        os.dup2(end.fileno(), number)
    _executed(words, code, cwd, env)


def _started(words: tuple[str, ...], code: str, out: str, cwd: str, env: dict[str, str]) -> None:
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    _executed(words, code, cwd, env)


def _executed(words: tuple[str, ...], code: str, cwd: str, env: dict[str, str]) -> None:
    _settled(env)
    os.chdir(cwd)
    sys.argv = ["whet", *words]
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


def _settled(env: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]


def fork_from_the_same() -> None:
    """In a process that is forked: its own come from the server that it comes from, not from another one."""
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]


def fork_lines() -> None:
    """In a process that is forked: those that it starts at the other end of a line are forked, too."""
    fork_from_the_same()
    line.subprocess = SimpleNamespace(Popen=partial(_Rank, tied=hasattr(os, "pidfd_open")), DEVNULL=None)  # type: ignore[attr-defined]


def lines_forked() -> AbstractContextManager[object]:
    """While the block runs, this process forks those that it starts at the other end of a line. They end with it, not
    with a thread of it."""
    return mock.patch.object(line, "subprocess", SimpleNamespace(Popen=_Rank, DEVNULL=None))


class _Rank(Forked):
    def __init__(
        self,
        command: list[str],
        *,
        pass_fds: list[int],
        env: Mapping[str, str],
        stdout: int,
        tied: bool = False,
        **_: object,
    ) -> None:
        """tied: it ends with the process that starts it, even if it is stopped."""
        with Connection(os.dup(pass_fds[0])) as ours, Connection(os.dup(stdout), readable=False) as out:
            super().__init__(_rank, ours, out, command[command.index("-m") + 2 :], dict(env), tied)


def _rank(connection: Connection, out: Connection, told: list[str], env: dict[str, str], tied: bool) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    _settled(env)
    _let_go()
    module, _, file, starter, *others = told
    if own := [word for word in others if word.startswith("rank-")]:  # as its command line would say
        Path("/proc/self/comm").write_text(f"{starter} {own[0]}")
    if tied:
        _end_with(int(starter))
    ours = line.picked_up([str(os.dup(connection.fileno())), file, str(os.getppid()), *others])
    import_module(module).serve(ours)


def _let_go() -> None:
    """Close what a new interpreter would not have. An environment that writes into all that is open would end the
    server with it, and every test would wait for another one to load torch."""
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    os.close(tracker._fd)
    server._forkserver_alive_fd = tracker._fd = None


def _end_with(other: int) -> None:
    """Another process kills this one when that one ends: the system does so for the children of a process alone."""
    ours = os.getpid()
    if os.fork() == 0:
        try:
            first, last = sorted(os.pidfd_open(pid) for pid in (other, ours))
            for begin, end in ((0, first), (first + 1, last), (last + 1, os.sysconf("SC_OPEN_MAX"))):
                os.closerange(begin, end)  # whoever waits for the end of a line waits for this process, too
            select.select([first, last], [], [])
        finally:
            os.kill(ours, signal.SIGKILL)
            os._exit(0)


def _redirected(function: Callable[..., object], arguments: tuple[str, ...], out: str) -> None:
    """In the child. Prints go to the file, from what it starts as well."""
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(ROOT)
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _command(*words: str) -> None:
    from whet.cli import main

    fork_lines()
    sys.argv = ["whet", *words]
    main()

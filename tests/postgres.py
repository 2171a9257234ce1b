"""A PostgreSQL server of our own: loopback only, in a temporary folder, ended with the test or by its death."""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PR_SET_PDEATHSIG = 1
SHM = Path("/dev/shm")
QUICK = str(SHM) if SHM.is_dir() else None
"""Where waiting for the disk costs nothing; tests of faults write there a thousand times."""


def binaries() -> Path:
    """Where initdb and postgres are; skips the test where they are not."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    return found[-1].parent


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


@contextmanager
def server(also: str | None = None) -> Iterator[str]:
    """The URL of its database. also: another address that it listens at, to clients of that network."""
    programs = binaries()
    as_root = os.geteuid() == 0
    who = "postgres" if as_root else pwd.getpwuid(os.geteuid()).pw_name
    user = {"user": "postgres"} if as_root else {}  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="whet-pg-", dir=QUICK))
    if as_root:
        shutil.chown(folder, "postgres")
    init = [programs / "initdb", "-D", folder / "data", "-A", "trust", "-N"]
    subprocess.run(init, check=True, capture_output=True, cwd="/", **user)
    if also is not None:
        with (folder / "data/pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet trust\n")
    listens = ",".join(filter(None, ("127.0.0.1", also)))

    def started() -> tuple[int, subprocess.Popen | None]:
        """The port, and the server; None where another program has taken the port meanwhile."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        settings = {"listen_addresses": listens, "port": port, "unix_socket_directories": "", "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        running = subprocess.Popen(
            [programs / "postgres", "-D", folder / "data", *options],
            stderr=subprocess.DEVNULL,
            cwd="/",
            preexec_fn=end_with_parent,
            **user,
        )
        ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        return port, running if comes_up(ready, running) else None

    for _ in range(3):
        port, running = started()
        if running is not None:
            break
    assert running is not None, "PostgreSQL ends as it starts"
    try:
        yield f"postgresql://{who}@127.0.0.1:{port}/postgres"
    finally:
        running.send_signal(signal.SIGQUIT)
        running.wait()
        shutil.rmtree(folder)


def comes_up(ready: list[str | Path], running: subprocess.Popen) -> bool:
    """Whether the server answers; False if it has ended."""
    for _ in range(600):
        if subprocess.run(ready, check=False).returncode == 0:
            return running.poll() is None
        if running.poll() is not None:
            return False
        time.sleep(0.1)
    raise AssertionError("PostgreSQL did not come up in a minute")

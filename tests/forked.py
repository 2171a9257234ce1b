"""Processes forked from one that has torch and whet loaded already: an import takes seconds of CPU, a fork none.

Nothing of torch has run in the process that is forked, so a child is as good as one of a new interpreter. Call `FORKS`
only from tests: its server starts with the first child and ends with pytest.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["whet.cli", "whet.stages", "whet.shared", "whet.sync.collective", "whet.sync.files", "processes"]
)
ROOT = Path(__file__).parents[1]


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

    sys.argv = ["whet", *words]
    main()

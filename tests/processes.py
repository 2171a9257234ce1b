"""Real processes that run a piece of code, forked from one that has torch loaded already: starting one is cheap."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from forked import FORKS


def play(code: str, arguments: list[str], out: str) -> None:
    """In the child: run it, prints and errors into the file `out`."""
    sys.argv = ["child", *arguments]
    with open(out, "w", buffering=1) as file:
        sys.stdout = file
        try:
            exec(code, {"__name__": "child"})
        except BaseException:
            traceback.print_exc(file=file)
            raise


class Child:
    """A process of its own, from `code`, with sys.argv[1:] as given."""

    def __init__(self, code: str, *arguments: str) -> None:
        handle, name = tempfile.mkstemp(prefix="whet-child-")
        os.close(handle)
        self.out = Path(name)
        self.process = FORKS.Process(target=play, args=(code, list(arguments), name), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def await_line(self) -> str:
        """The first line it prints."""
        end = time.monotonic() + 60
        while "\n" not in (text := self.out.read_text()):
            assert self.process.is_alive(), text
            assert time.monotonic() < end, "the child says nothing"
            time.sleep(0.005)
        return text.partition("\n")[0]

    def said(self) -> str:
        """All it printed, once it has ended well."""
        self.process.join(60)
        text = self.out.read_text()
        assert self.process.exitcode == 0, text
        return text

    def blow(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        """Whatever it does, it is gone after this."""
        self.process.kill()
        self.process.join(30)
        self.out.unlink()

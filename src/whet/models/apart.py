"""A process that has a whole model for as long as one job takes: it builds one, or writes an export.

The process of a run whose models are all on ranks gives such jobs away, so that it needs memory for no model itself.
"""

from __future__ import annotations

import logging
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from whet.guard import pulse
from whet.guard.imports import import_all
from whet.guard.line import Local, OpenLines, end, how_it_ended
from whet.types import CheckpointError, ConfigError, WhetError

T = TypeVar("T")

_LOGGER = "whet"
_ERRORS = {e.__name__: e for e in (CheckpointError, ConfigError, WhetError)}


@dataclass(frozen=True)
class _Setting:
    """What the process is told first."""

    threads: int
    deterministic: bool
    imports: tuple[str, ...]
    level: int
    """Of the log records that it passes on."""


def call(
    function: Callable[[], T],
    *,
    what: str,
    threads: int = 1,
    deterministic: bool = True,
    imports: Sequence[str] = (),
    beat: Callable[[str], object] = lambda what: None,
    open_lines: OpenLines | None = None,
) -> T:
    """function(), in a process of its own that ends with it; what it logs is logged here.

    function: of a module, or a `functools.partial` of one; its arguments and its result are pickled. what: it does, for
    errors. imports: user code that it may need. beat: told of job and progress. open_lines: starts the process.
    Raises CheckpointError and ConfigError that the function raises, else WhetError with its traceback.
    """
    beat(f"a process of its own: to {what}")
    lines = (open_lines or partial(Local, module=__name__))(1, threads)
    try:
        line, level = lines.lines[0], logging.getLogger(_LOGGER).getEffectiveLevel()
        setting = _Setting(threads, deterministic, tuple(imports), level)
        try:
            for message in (setting, function):
                line.connection.send_bytes(pickle.dumps(message, protocol=5))
            while True:
                kind, *rest = pickle.loads(line.connection.recv_bytes())
                if kind == "done":
                    return rest[0]  # type: ignore[no-any-return]
                if kind == "failed":
                    raise _ERRORS.get(rest[0], WhetError)(rest[1])
                if kind == "beat":
                    beat(rest[0])
                else:
                    logging.getLogger(rest[0]).log(rest[1], "%s", rest[2])
        except (EOFError, OSError):
            raise WhetError(
                f"the process that was to {what} died ({how_it_ended(line)}). It holds one whole model: if it was "
                "killed, there was probably too little memory"
            ) from None
    finally:
        end(lines)


# ---------------------------------------------------------------- in the process


def serve(connection: Connection) -> None:
    """Do the one job."""
    say = _Said(connection)
    try:
        setting: _Setting = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    logger = logging.getLogger(_LOGGER)
    logger.setLevel(setting.level)
    logger.propagate = False
    logger.addHandler(_Passed(say))
    try:
        torch.set_num_threads(setting.threads)
        torch.use_deterministic_algorithms(setting.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        import_all(setting.imports)
        function: Callable[[], Any] = pickle.loads(connection.recv_bytes())  # it may hold what is imported
        with pulse.heard_by(partial(say, "beat")):
            answer = function()
        say("done", answer)
    except Exception as error:  # noqa: BLE001  # whatever it was, who asked has to hear of it
        known = isinstance(error, WhetError)
        say("failed", type(error).__name__, str(error) if known else traceback.format_exc())


class _Said:
    """Messages to who asked, one at a time, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()

    def __call__(self, *message: object) -> None:
        with self.lock:
            self.connection.send_bytes(pickle.dumps(message, protocol=5))


class _Passed(logging.Handler):
    """Log records as messages."""

    def __init__(self, say: Callable[..., object]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say("log", record.name, record.levelno, record.getMessage())

"""Where the loggers of `whet` write: run.log, and the display."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path

from whet.guard.foreign import plain
from whet.guard.printed import CONSOLE, FIRST_LINE
from whet.secrets import learn_environment, redact
from whet.track.files import file_error, not_linked


class _Strike(logging.Filter):
    """Removes known secrets from a message, and what files do not take or a terminal obeys, before it is written."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
            record.exc_info = record.exc_text = None
        record.msg, record.args = plain(redact(text)), None
        return True


class _LogFile(logging.FileHandler):
    """Other writes report a full disk; a lost line of the log does not raise."""

    def _open(self) -> TextIOWrapper:
        file = open(self.baseFilename, "ab", opener=not_linked)  # noqa: SIM115
        return TextIOWrapper(file, encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Shown(logging.Handler):
    """Hands messages to a function, e.g. the display's: those from a level on, and those that foreign code has printed
    for people to see (`guard.printed`), as they are."""

    def __init__(self, show: Callable[[str], None], *, least: int) -> None:
        super().__init__()
        self._show, self._least = show, least

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, CONSOLE, False):
            self._show(record.getMessage())
        elif record.levelno >= self._least:
            text = self.format(record)
            if getattr(record, FIRST_LINE, False) and self._least > logging.DEBUG:
                text = text.splitlines()[0] + " (more in run.log)"
            self._show(text)


def setup_logging(run_dir: Path, *, level: str, show: Callable[[str], None] | None = None) -> None:
    """Send the loggers of `whet` to run.log, and warnings (at level debug: everything) to `show`, if given.

    A second call replaces the first. Times are UTC; known secrets and those of the environment are removed.
    """
    learn_environment()
    close_logging()
    logger = logging.getLogger("whet")
    try:
        handlers: list[logging.Handler] = [_LogFile(run_dir / "run.log", encoding="utf-8")]
    except OSError as e:
        raise file_error(e, run_dir / "run.log") from e
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = lambda *_: datetime.now(UTC).timetuple()
    handlers[0].setFormatter(formatter)
    if show is not None:
        handlers.append(_Shown(show, least=logging.DEBUG if level == "debug" else logging.WARNING))
        handlers[1].setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for handler in handlers:
        handler.addFilter(_Strike())
        logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def close_logging() -> None:
    """Restore the loggers of `whet` to the state before `setup_logging`: training may be a part of a program."""
    logger = logging.getLogger("whet")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True

"""Destinations of metrics: a tracker is a class with two methods; `config.trackers` lists the built-in ones.

The console is not a tracker: it also shows phases and waits (`display.Display`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from whet.config.schema import Config
from whet.config.trackers import TRACKERS
from whet.guard import pulse
from whet.guard.leftover import owned
from whet.guard.printed import CONSOLE
from whet.guard.watch import interrupted_after, own_signals
from whet.secrets import guarded_recorders
from whet.tables import load_object
from whet.track.record import RunDirectory
from whet.track.sinks import Sinks
from whet.types import ConfigError, Json, Metrics, WhetError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

CALL_S = 300.0
"""Longest time of a call of a tracker, such as `close`, which may send what waits to its server."""
HURRY_S = 5.0
"""The same of `close` after a second Ctrl-C, and of a tracker that has not returned before."""


@runtime_checkable
class Tracker(Protocol):
    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        """Numbers of a step: `metrics` are equal in equal runs, `timings` (seconds, memory) are not."""

    def close(self) -> None: ...


@runtime_checkable
class ShowsText(Protocol):
    """A tracker that also takes text."""

    def show(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        """Held-out tasks with a reply each: uid, source, prompt, reply, answer, extracted, reward."""


@runtime_checkable
class ShowsRollouts(Protocol):
    """A tracker that also takes rollouts of training (`track.log_samples`)."""

    def show_rollouts(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        """Rollouts of a step: uid, index, source, prompt, reply, answer, extracted, reward, advantage, finish_reason.
        advantage is None for a rollout that was not trained on."""


class Bounded:
    """A tracker of `track.trackers`: foreign code, which may hang. It is beside the run, so the run goes on without one
    that has not returned within CALL_S."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.hangs = tracker, False

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        self._call(step, partial(self.tracker.log, stage, step, metrics=metrics, timings=timings))

    def show(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        if isinstance(self.tracker, ShowsText):
            self._call(step, partial(self.tracker.show, stage, step, rows))

    def show_rollouts(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        if isinstance(self.tracker, ShowsRollouts):
            self._call(step, partial(self.tracker.show_rollouts, stage, step, rows))

    def close(self) -> None:
        self.tracker.close()

    def _call(self, step: int, call: Callable[[], object]) -> None:
        if self.hangs:
            return
        try:
            with interrupted_after(CALL_S) as late:
                call()
        except Exception:
            if not late.is_set():
                raise
        if late.is_set():
            self.hangs = True
            log.warning(
                "%s (track.trackers) did not return from step %d within %g s; the run goes on without it, and "
                "metrics.jsonl has all numbers",
                _name(self), step, CALL_S, extra={CONSOLE: True},
            )  # fmt: skip


def _name(tracker: Tracker) -> str:
    """Of its class."""
    return type(tracker.tracker if isinstance(tracker, Bounded) else tracker).__name__


class Jsonl:
    """metrics.jsonl and timings.jsonl of the run directory."""

    def __init__(self, sinks: Sinks) -> None:
        self._record = sinks.record

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        self._record.log(stage, step, metrics=metrics, timings=timings)

    def close(self) -> None:
        self._record.close()


class TensorBoard:
    """Event files in `RUN/tensorboard/STAGE`, a TensorBoard run for each stage, all from step 0."""

    def __init__(self, sinks: Sinks) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter as Writer
        except ImportError as e:
            raise ConfigError(
                "track.trackers names tensorboard, which is not installed; pip install 'whet[tensorboard]', "
                "or remove it from the list"
            ) from e
        self._make = Writer
        self._root = sinks.record.path / "tensorboard"
        self._stages = sinks.record.stages
        self._resumed = sinks.resumed
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, stage: str, step: int, *, metrics: Metrics, timings: Metrics) -> None:
        writer = self._writer(stage)
        for name, number in {**metrics, **timings}.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    def show(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        self._add_texts(stage, step, {f"eval/{row['uid']}": row for row in rows})

    def show_rollouts(self, stage: str, step: int, rows: Sequence[Mapping[str, Json]]) -> None:
        # numbered, not named after tasks: a run has too many of them for a list of tags
        self._add_texts(stage, step, {f"rollout/sample_{n}": row for n, row in enumerate(rows, 1)})

    def _add_texts(self, stage: str, step: int, rows: Mapping[str, Mapping[str, Json]]) -> None:
        """Rows as text, each under a tag."""
        writer = self._writer(stage)
        for tag, row in rows.items():
            # four spaces: TensorBoard reads Markdown, and shows such lines as they are
            text = json.dumps(row, ensure_ascii=False, indent=1, default=str).replace("\n", "\n    ")
            writer.add_text(tag, f"    {text}", step)
        writer.flush()

    def _writer(self, stage: str) -> SummaryWriter:
        if stage not in self._writers:
            purge = first_new_step(self._stages.index(stage), self._resumed)
            self._writers[stage] = self._make(str(self._root / stage), purge_step=purge)
        return self._writers[stage]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def first_new_step(stage: int, resumed: tuple[int, int] | None) -> int | None:
    """The first step of a stage that this run writes itself: what is there already from then on is void."""
    if resumed is None or stage > resumed[0]:
        return 0
    return resumed[1] + 1 if stage == resumed[0] else None


def open_trackers(
    cfg: Config, record: RunDirectory, *, resumed: tuple[int, int] | None = None
) -> list[Tracker]:
    """The trackers of `track.trackers`, without console; jsonl in any case: it is the run's record.

    resumed: (stage index, step) of the checkpoint that the run resumes from.
    """
    sinks = Sinks(cfg, record, resumed)
    wanted = [name for name in dict.fromkeys(["jsonl", *cfg.track.trackers]) if name != "console"]
    return [made if isinstance(made, Jsonl) else Bounded(made) for made in (_made(n, sinks) for n in wanted)]


def _made(name: str, sinks: Sinks) -> Tracker:
    """A tracker by its name in `config.trackers`, or a class of the user's, with its arguments. It has CALL_S."""
    at = TRACKERS[name].at if name in TRACKERS else name
    given = sinks.cfg.track.arguments.get(name, {})
    pulse.beat(f"{name} (track.trackers), as it is made")
    try:
        with (
            interrupted_after(CALL_S) as late,
            owned(f"track.trackers {name}"),
            own_signals(),
            guarded_recorders(),
            unanswered(),
        ):
            made = load_object(at, what="track.trackers")(sinks, **given)
    except TypeError as e:
        asked = ", ".join(["sinks", *(f"{key}=..." for key in given)])
        raise ConfigError(f"track.trackers {name}: called as {at.rpartition(':')[2]}({asked}): {e}") from e
    except Exception as e:
        if late.is_set():
            raise ConfigError(
                f"track.trackers {name}: it did not start within {CALL_S:g} s; look whether its server answers, or "
                "leave it out of the list"
            ) from e
        e.add_note(f"raised by track.trackers {name}, as it was made")
        raise
    if not isinstance(made, Tracker):
        raise ConfigError(f"track.trackers {name}: expected a class with the methods log and close")
    return made


_counting = threading.Lock()
_starts = 0
_unheard = ExitStack()


@contextmanager
def unanswered() -> Iterator[None]:
    """A package that lacks a key asks for it where standard input is a terminal: under the live display nobody sees
    that, and the run waits. Without a terminal it says at once what is missing. Where trackers of several threads are
    made at once, until the last of them is."""
    global _starts
    with _counting:
        if not _starts:
            _unheard.enter_context(_empty_input())
        _starts += 1
    try:
        yield
    finally:
        with _counting:
            _starts -= 1
            if not _starts:
                _unheard.close()


@contextmanager
def _empty_input() -> Iterator[None]:
    """A file, since packages look at its descriptor."""
    given = sys.stdin
    with open(os.devnull) as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = given


@contextmanager
def naming(tracker: Tracker, stage: str, step: int) -> Iterator[None]:
    """What a tracker raises inside ends the run, and says whose it is; callbacks say so themselves. Where it hangs, the
    watch names it."""
    pulse.beat(f"{_name(tracker)} (track.trackers), step {step}")
    try:
        with owned(f"{_name(tracker)} (track.trackers)"):
            yield
        pulse.beat("the record of a step")
    except Exception as e:
        if not getattr(e, "__notes__", ()):
            e.add_note(f"raised by {_name(tracker)} (track.trackers), step {step} of stage {stage!r}")
        raise


def close(tracker: Tracker) -> None:
    """Close a tracker, however the run ended. What foreign code raises here is only logged: all numbers are in
    metrics.jsonl, and the error would stand in the place of the one that has ended the run. It has CALL_S, or HURRY_S
    where a user ends the run at once, and where it has hung before."""
    pulse.beat(f"{_name(tracker)} (track.trackers), as it is closed")
    hurries = isinstance(sys.exception(), KeyboardInterrupt) or (
        isinstance(tracker, Bounded) and tracker.hangs
    )
    limit_s = HURRY_S if hurries else CALL_S
    try:
        with interrupted_after(limit_s), owned(f"{_name(tracker)} (track.trackers)"):
            tracker.close()
    except WhetError:  # of the run's own record
        raise
    except Exception as e:
        log.warning(
            "%s (track.trackers) could not be closed (%s: %s); metrics.jsonl has all numbers",
            _name(tracker),
            type(e).__name__,
            e,
            exc_info=log.isEnabledFor(logging.DEBUG),
        )

"""Console output of a run: live progress in a terminal, plain lines elsewhere, a report at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.protocol import rich_cast
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from whet.config.screen import keep_whole
from whet.guard import pulse
from whet.track.metrics import ACCURACY, FAILED, HELD_OUT, LOSS, MARGIN, REWARD
from whet.track.report import count, duration, printable
from whet.types import Metrics

LINE_EVERY_S = 5.0
"""Where stdout is no terminal: at most one line of progress in this time ..."""
ALIVE_EVERY_S = 30.0
"""... and at least one in this time, however long a step takes."""
REFRESH_PER_S = 4

Doing = Callable[[], tuple[str, float]]
"""What is being done, and seconds since it began."""


class Display:
    """Progress of a run. `stages` are (name, steps), 0 if not known. Methods only take note; a thread draws.

    If the terminal goes away, only the display stops. `quiet` draws nothing.
    Call `close` at the end.
    """

    def __init__(
        self,
        stages: Sequence[tuple[str, int]],
        *,
        quiet: bool = False,
        console: Console | None = None,
        unit: str = "step",
    ) -> None:
        """unit: what a stage has so many of."""
        steady = cast(TextIO, _Steady(sys.stdout))
        self._console = console or Console(file=steady, highlight=False, quiet=quiet)
        self._stages, self._unit = list(stages), unit
        self._exactness = ""
        self._spinner = Spinner("dots", style="cyan")
        self._closed = threading.Event()
        self._last_line = time.monotonic()
        self.stage(0)
        self._live: Live | None = None
        if quiet:
            return
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=REFRESH_PER_S, transient=True)
            self._live.start()
        else:
            threading.Thread(target=self._keep_alive, name="whet-display", daemon=True).start()

    def stage(self, index: int, *, done: int = 0, steps: int | None = None) -> None:
        """Begin a stage, after `done` steps of it (a resumed run). steps: now that they are known."""
        self._index, self._done = index, done
        if steps is not None:
            self._stages[index] = (self._stages[index][0], steps)
        self._times: deque[float] = deque([time.monotonic()], maxlen=51)
        self._metrics: Metrics = {}
        self._timings: Metrics = {}
        self._held_out: float | None = None
        self._failed = 0
        self.phase("start")

    def exactness(self, word: str) -> None:
        """'exact' or 'close': whether sampled log-probs are the trainer's, bit for bit."""
        self._exactness = f"log-prob match: {word}"

    def phase(self, name: str) -> None:
        """Set the current phase: generate, score, update, evaluate, save ..."""
        began = time.monotonic()
        self._doing: Doing = lambda: (name, time.monotonic() - began)
        pulse.beat(name)

    def phase_over(self, doing: Doing) -> None:
        """The phase has ended. doing: tells from then on what the run does, until the next phase."""
        self._doing = doing

    def step(self, metrics: Metrics, timings: Metrics) -> None:
        """One more training step is done."""
        self._done += 1
        self._times.append(time.monotonic())
        self._metrics, self._timings = metrics, timings
        self._failed += int(metrics.get(FAILED, 0))
        due = self._done in (1, self._stages[self._index][1]) or self._since_line() >= LINE_EVERY_S
        if self._live is None and due:
            self._print(f"{self._place(self._done)}  {'  '.join(self._facts())}")

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Held-out numbers after a step; stays on the screen."""
        self._held_out = metrics.get(HELD_OUT, self._held_out)
        if HELD_OUT in metrics:
            self._print(f"{self._place(step)}  held-out {metrics[HELD_OUT]:.3f}")

    def message(self, text: str) -> None:
        """A line that stays on the screen."""
        self._print(printable(text))

    def show(self, what: RenderableType) -> None:
        """A larger block that stays on the screen, e.g. the final report; its tables lose nothing in a narrow one."""
        shown = rich_cast(what)
        keep_whole(self._console, shown)
        self._console.print(shown, crop=False)
        self._last_line = time.monotonic()

    def close(self) -> None:
        """Stop drawing and give the terminal back. Safe to call twice."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()

    # -- inside

    def __rich__(self) -> RenderableType:
        name, steps = self._stages[self._index]
        head = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for ratio in (None, 1, None, None):
            head.add_column(ratio=ratio, no_wrap=True)
        place = f" {self._index + 1}/{len(self._stages)}" if len(self._stages) > 1 else ""
        head.add_row(
            Text.assemble((name, "bold"), (place, "dim")),
            ProgressBar(total=max(steps, 1), completed=self._done),
            Text(f"{self._unit} {self._done} of {steps}" if steps else f"{self._unit} {self._done}"),
            Text(f"{duration(self._left_s())} left" if self._left_s() is not None else "", style="dim"),
        )
        now = Text("  ").join([Text(fact, style=_style(fact)) for fact in self._facts()])
        what, waiting = self._doing()
        self._spinner.update(text=Text(f"{what} {duration(waiting) if waiting >= 1 else ''}", style="dim"))
        return Group(head, now, self._spinner)

    def _place(self, step: int) -> str:
        name, steps = self._stages[self._index]
        return f"{name} {self._unit} {step}/{steps}" if steps else f"{name} {self._unit} {step}"

    def _facts(self) -> list[str]:
        now, facts = self._metrics, []
        if ACCURACY in now:
            facts.append(f"accuracy {now[ACCURACY]:.3f}")
            facts += [f"margin {now[MARGIN]:.3g}"] if MARGIN in now else []
        elif REWARD in now:
            facts.append(f"reward {now[REWARD]:.3f}")
        elif LOSS in now:
            facts.append(f"loss {now[LOSS]:.4f}")
        if self._held_out is not None:
            facts.append(f"held-out {self._held_out:.3f}")
        if "speed/tokens_per_s" in self._timings:
            facts.append(f"{count(self._timings['speed/tokens_per_s'])} tokens/s")
        step_s = self._step_s()
        if step_s is not None:
            facts.append(f"{step_s:.3g} s/{self._unit}")
        if self._live is None and self._left_s():
            facts.append(f"{duration(self._left_s())} left")
        if self._failed:
            facts.append(f"failed {self._failed}")
        return [*facts, self._exactness] if self._exactness else facts

    def _step_s(self) -> float | None:
        """Seconds a step, all work between steps included, over the last 50."""
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def _left_s(self) -> float | None:
        left = self._stages[self._index][1] - self._done
        step_s = self._step_s()
        return None if step_s is None or left <= 0 else step_s * left

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
        self._last_line = time.monotonic()

    def _since_line(self) -> float:
        return time.monotonic() - self._last_line

    def _keep_alive(self) -> None:
        while not self._closed.wait(1.0):
            if self._since_line() >= ALIVE_EVERY_S:
                what, waiting = self._doing()
                self._print(f"{self._place(self._done)}  in {printable(what)} for {duration(waiting)}")


_STYLES = {
    "reward": "cyan",
    "loss": "cyan",
    "accuracy": "cyan",
    "margin": "cyan",
    "held-out": "magenta",
    "failed": "red",
    "exact": "green",
    "close": "yellow",
}
"""By the first word of a fact, or by its last one."""


def _style(fact: str) -> str:
    words = fact.split()
    return _STYLES.get(words[0]) or _STYLES.get(words[-1], "")


class _Steady:
    """A text stream whose reader may go away: then writes are ignored instead of raising."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text.encode(self.encoding, "replace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if self._stream is None:
            return
        try:
            act(self._stream)
        except (OSError, ValueError):
            self._stream = None

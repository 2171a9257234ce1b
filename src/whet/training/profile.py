"""Single training steps under torch's profiler, CUDA's memory history or nsys.

RUN/profile/STAGE-step-000012.json.gz        trace of operators and kernels, one for steps in a row
RUN/profile/STAGE-step-000012.pickle         CUDA's allocator and its history (written, never read here)
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from whet.config.schema import ProfileConfig
from whet.types import ConfigError

Tell = Callable[..., object]
"""`Ranks.ask`"""

HISTORY_EVENTS = 100_000
"""Allocations and frees that a memory snapshot remembers."""


class Profiler:
    """The windows of one stage. Where no step is recorded, everything here does nothing."""

    def __init__(
        self, cfg: ProfileConfig, folder: Path, *, stage: str, device: torch.device, tell: Tell | None = None
    ) -> None:
        """tell: asks the ranks of train.parallel, those that profile.ranks names record the same steps. Errors:
        ConfigError for tools that need CUDA where there is none."""
        tools = [tool for tool in cfg.tools if tool in ("memory", "nsys")]
        if cfg.steps and device.type != "cuda" and tools:
            raise ConfigError(
                f"profile.tools: {', '.join(tools)}: memory snapshots and nsys ranges need CUDA; use tools=[torch]; "
                f"the run is on {device.type}"
            )
        self.cfg, self.folder, self.stage, self.device = cfg, folder, stage, device
        self.steps = frozenset(cfg.steps)
        self._torch: torch.profiler.profile | None = None
        self._window: list[int] = []
        """Steps recorded since the last file."""
        self._inside = False
        self.tell: Tell = tell if tell is not None and cfg.steps else _nobody
        self.tell("profile", cfg, str(folder), stage)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around training step `number`: recorded, if it is asked for."""
        self.tell("begin", number)
        self.begin(number)
        with self.range(f"step {number}"):
            yield
        self.end(number)
        self.tell("end", number)

    def range(self, name: str) -> AbstractContextManager[object]:
        """A named part of a recorded step, in the trace and in nsys."""
        if not self._inside:
            return nullcontext()
        ranges = ExitStack()
        if "torch" in self.cfg.tools:
            ranges.enter_context(torch.profiler.record_function(name))
        if "nsys" in self.cfg.tools:
            ranges.enter_context(torch.cuda.nvtx.range(name))
        return ranges

    def close(self) -> None:
        """Write what a run that was stopped inside a window has recorded so far; no more is recorded. Call it while
        the ranks are there."""
        self.tell("end", None)
        self.tell = _nobody
        self._stop_torch()
        if self._window:
            self._stop_cuda()
            self._window.clear()

    def begin(self, number: int) -> None:
        """Before training step `number`."""
        ahead = window(self.steps, number)
        due = bool(ahead) and number >= ahead[0] - self.cfg.warmup
        if due and self._torch is None and "torch" in self.cfg.tools:
            self._torch = self._profiler(ahead, first=number)
            self._torch.start()
        self._inside = number in self.steps
        if self._inside:
            if not self._window:
                self._start_cuda()
            self._window.append(number)

    def end(self, number: int) -> None:
        """After it."""
        ends = self._inside and number + 1 not in self.steps
        self._inside = False
        if self._torch is not None:
            self._torch.step()  # writes the trace where a window ends
        if ends:
            self._stop_torch()
            self._stop_cuda()
            self._window.clear()

    # -- inside

    def _profiler(self, steps: Collection[int], *, first: int) -> torch.profiler.profile:
        """For one window; its first step is training step `first`."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule(steps, warmup=self.cfg.warmup, first=first),
            on_trace_ready=lambda trace: trace.export_chrome_trace(str(self._file("json.gz"))),
            record_shapes="record_shapes" in self.cfg.torch,
            with_stack="with_stack" in self.cfg.torch,
            profile_memory="profile_memory" in self.cfg.torch,
        )

    def _file(self, suffix: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        first, last = self._window[0], self._window[-1]
        steps = f"step-{first:06d}" if first == last else f"steps-{first:06d}-{last:06d}"
        return self.folder / f"{self.stage}-{steps}.{suffix}"

    def _stop_torch(self) -> None:
        if self._torch is not None:
            self._torch.stop()
            self._torch = None

    def _start_cuda(self) -> None:
        if "memory" in self.cfg.tools:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)
        if "nsys" in self.cfg.tools:
            torch.cuda.profiler.start()

    def _stop_cuda(self) -> None:
        if "nsys" in self.cfg.tools:
            torch.cuda.profiler.stop()
        if "memory" in self.cfg.tools:
            torch.cuda.memory._dump_snapshot(str(self._file("pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)


def _nobody(*what: object) -> None:
    """There are no ranks."""


def memory_peaks() -> dict[str, float]:
    """Most memory of this process so far, and on CUDA of its device since it was last asked, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
    out = {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if torch.cuda.is_initialized():
        out["gpu_peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
    return out


def window(steps: Collection[int], at: int) -> list[int]:
    """The next steps in a row that are recorded, from step `at` on; [] if none is left."""
    start = end = min((step for step in steps if step >= at), default=0)
    while end in steps:
        end += 1
    return list(range(start, end))


def schedule(steps: Collection[int], *, warmup: int, first: int) -> Callable[[int], ProfilerAction]:
    """What torch's profiler does in its n-th step, where n = 0 is training step `first`."""

    def action(n: int) -> ProfilerAction:
        at = first + n
        if at in steps:
            return ProfilerAction.RECORD if at + 1 in steps else ProfilerAction.RECORD_AND_SAVE
        soon = any(at + k in steps for k in range(1, warmup + 1))
        return ProfilerAction.WARMUP if soon else ProfilerAction.NONE

    return action

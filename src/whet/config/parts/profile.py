"""The section about profiling."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Count, Positive, Section


class Profile(Section):
    """Single training steps seen from inside: operators, kernels, memory. It costs time in those steps only; where the
    time of all steps goes stands in timeline.json."""

    steps: tuple[Positive, ...] = ()
    """Training steps of each stage that are recorded, counted from 1; steps in a row make one trace. []: none."""
    warmup: Count = 1
    """Steps before a window in which torch's profiler is on already and what it records is dropped: starting it costs
    time of its own."""
    tools: tuple[Literal["torch", "memory", "nsys"], ...] = ("torch",)
    """torch: a trace for ui.perfetto.dev; memory: a snapshot of CUDA's allocator with its history, for
    pytorch.org/memory_viz; nsys: named ranges, between cudaProfilerStart and cudaProfilerStop, for a run under `nsys
    profile --capture-range=cudaProfilerApi`. The last two need CUDA."""
    ranks: tuple[Count, ...] = (0,)
    """With train.parallel: the ranks that record, beside the process that samples; each writes files of its own,
    STAGE-rank-N-step-000012."""
    record_shapes: bool = False
    """torch: record the shapes of every operator's inputs."""
    with_stack: bool = False
    """torch: record Python call stacks; traces become several times larger."""
    profile_memory: bool = False
    """torch: record every allocation."""
    dir: str | None = None
    """Folder of the traces. Default: `profile` in run_dir, which else is a link to it."""

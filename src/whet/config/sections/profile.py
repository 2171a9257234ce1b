"""Section about profiling."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import Count, Positive, Section


class ProfileConfig(Section):
    """Profiles of single training steps: operators, kernels, memory. Only the profiled steps become slower; the times
    of all steps are in timeline.json."""

    steps: tuple[Positive, ...] = ()
    """Training steps of each stage to profile, counted from 1; consecutive steps share one trace. []: none."""
    warmup: Count = 1
    """Steps before a profiled window in which the profiler of torch already runs and its records are discarded, because
    its start takes time."""
    tools: tuple[Literal["torch", "memory", "nsys"], ...] = ("torch",)
    """torch: a trace for ui.perfetto.dev; memory: a snapshot of the CUDA allocator with its history, for
    pytorch.org/memory_viz; nsys: named ranges between cudaProfilerStart and cudaProfilerStop, for a run under `nsys
    profile --capture-range=cudaProfilerApi`. memory and nsys need CUDA."""
    ranks: tuple[Count, ...] = (0,)
    """With train.parallel: the ranks to profile, in addition to the process that samples; each writes its own files,
    STAGE-rank-N-step-000012."""
    record_shapes: bool = False
    """torch: record the shapes of every operator's inputs."""
    with_stack: bool = False
    """torch: record Python call stacks; traces become several times larger."""
    profile_memory: bool = False
    """torch: record every allocation."""
    dir: str | None = None
    """Folder of the traces. Default: `profile` in run_dir; with another folder, `profile` is a link to it."""

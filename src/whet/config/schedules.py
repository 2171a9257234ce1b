"""Learning rate and weight decay as pure functions of the schedule step: nothing to save, nothing to lose on resume.

A schedule's steps count from 0 and are optimizer steps or training steps, as `schedule.unit` says. Sources: the
schedules of transformers and Megatron-LM, and of the frameworks whose configs whet reads.
"""

from __future__ import annotations

import math

from whet.config.sections.train import OptimizerConfig, ScheduleConfig


def position(schedule: ScheduleConfig, updates: int, *, updates_per_step: int) -> int:
    """The schedule step after so many optimizer steps; of all optimizer steps, the length of the stage."""
    return updates if schedule.unit == "optimizer_step" else updates // updates_per_step


def warmup_steps(schedule: ScheduleConfig, total: int) -> int:
    """Steps of the warm-up in a stage of `total` steps."""
    return _whole(schedule.warmup_steps, schedule.total_steps or total)


def _whole(steps: float, total: int) -> int:
    """Steps, or a share of all where the number is below 1."""
    return math.floor(steps * total if steps < 1 else steps)


def factor(schedule: ScheduleConfig, step: int, total: int) -> float:
    """What the peak learning rate is multiplied with in step `step` (from 0) of a stage of `total`."""
    warmup, end, low = warmup_steps(schedule, total), schedule.total_steps or total, schedule.min_lr_ratio
    if step < warmup:
        return schedule.warmup_start_ratio + (1.0 - schedule.warmup_start_ratio) * _ramp(
            schedule, step, warmup
        )
    if schedule.type == "constant":
        return 1.0
    if step > end:
        return low
    if schedule.type == "inverse_sqrt":
        return max(low, math.sqrt(max(warmup, 1) / max(step, 1)))
    if schedule.type == "wsd":
        decay, shape = _decay_steps(schedule, end, warmup), schedule.decay_type
    else:
        decay, shape = max(end - warmup, 1), schedule.type
    done = min(1.0, max(0.0, (step - (end - decay)) / decay))
    return low + (1.0 - low) * _shape(shape, done, cycles=schedule.num_cycles)


def weight_decay(optimizer: OptimizerConfig, step: int, total: int) -> float:
    """Weight decay in step `step` (from 0) of a stage of `total`."""
    start, end = optimizer.weight_decay, optimizer.schedule.weight_decay_end
    if end is None:
        return start
    done = min(1.0, step / total)
    if optimizer.schedule.weight_decay_type == "cosine":
        done = 0.5 * (1.0 - math.cos(math.pi * done))
    return start + (end - start) * done


def _ramp(schedule: ScheduleConfig, step: int, warmup: int) -> float:
    """Way up the ramp, 0 to 1. An end that is no step itself lies one step outside."""
    before = 0 if schedule.warmup_ends in ("start", "both") else 1
    after = 0 if schedule.warmup_ends in ("peak", "both") else 1
    length = warmup - 1 + before + after
    return (step + before) / length if length else 1.0


def _decay_steps(schedule: ScheduleConfig, end: int, warmup: int) -> int:
    left = end - warmup
    return max(1, left if schedule.decay_steps is None else min(_whole(schedule.decay_steps, end), left))


def _shape(shape: str, done: float, *, cycles: float) -> float:
    """1 where nothing of the decay is done, 0 (cosine: where its waves end) where all is."""
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(2.0 * cycles * math.pi * done))
    if shape == "exponential":
        return 2.0 * 0.5**done - 1.0
    if shape == "minus_sqrt":
        return 1.0 - math.sqrt(done)
    return 1.0 - done

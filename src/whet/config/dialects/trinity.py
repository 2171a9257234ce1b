"""Trinity-RFT (about 0.4.0): what each of its keys means here. The rows stand by section in modules of their own.

Beside the document's keys the tables hold those that its source code knows and its example files use (`MORE_...`).
"""

from __future__ import annotations

from dataclasses import replace

from whet.config.dialects.key import Key, derived, translated
from whet.config.dialects.trinity_algorithm import ALGORITHM, MORE_ALGORITHM
from whet.config.dialects.trinity_buffer import BUFFER, MORE_BUFFER
from whet.config.dialects.trinity_engine import AUXILIARY_MODELS, MORE_ENGINE
from whet.config.dialects.trinity_monitor import GUI, LOG, MONITOR, MORE_SERVICES, SERVICES
from whet.config.dialects.trinity_run import (
    CLUSTER,
    EXPLORER,
    GLOBAL,
    MODEL,
    MORE_RUN,
    TRAINER,
)
from whet.config.dialects.trinity_stages import one_run, stages
from whet.config.dialects.trinity_sync import SYNCHRONIZER
from whet.config.dialects.trinity_values import section
from whet.config.dialects.trinity_verl import MORE_VERL, VERL

_INHERITS = (
    "what a stage leaves out is the global one; with another algorithm_type only its optimizer is inherited"
)


def _stage(name: str, native: str, *, reason: str = _INHERITS) -> Key:
    return translated(f"stages[].{name}", stages, native, default=None, reason=reason)


STAGES: tuple[Key, ...] = (
    translated(
        "stages",
        stages,
        "stages",
        default=[],
        reason="each stage starts from the policy of the one before",
    ),
    _stage("stage_name", "stages", reason="the stage's name"),
    _stage("mode", "stages", reason="the global one where it is not given"),
    section("stages[].algorithm", "stages"),
    section("stages[].buffer", "stages"),
    section("stages[].explorer", "stages"),
    section("stages[].trainer", "stages"),
    _stage("algorithm.algorithm_type", "stages"),
    _stage("buffer.train_batch_size", "stages"),
    _stage("buffer.total_steps", "stages"),
    section("stages[].buffer.trainer_input", "stages"),
    section("stages[].buffer.trainer_input.experience_buffer", "stages"),
    _stage("buffer.trainer_input.experience_buffer.name", "stages"),
    _stage("buffer.trainer_input.experience_buffer.path", "stages"),
)

_DOCUMENT = (
    *(*GLOBAL, *ALGORITHM, *BUFFER, *MODEL, *CLUSTER, *EXPLORER, *AUXILIARY_MODELS, *SYNCHRONIZER, *TRAINER),
    *(*MONITOR, *SERVICES, *LOG, *GUI),
)
_MORE = (*MORE_RUN, *MORE_ENGINE, *MORE_ALGORITHM, *MORE_BUFFER, *MORE_SERVICES)
_OWN = one_run((*_DOCUMENT, *_MORE, *VERL, *MORE_VERL))
_SAID = {row.name for row in STAGES}


def _in_a_stage(row: Key) -> Key:
    """The row of a key in a stage, which is judged as a file of its own: what does something does it by way of it."""
    name = f"stages[].{row.name}"
    if row.status in ("mapped", "translated"):
        return _stage(row.name, "stages")
    if row.status in ("derived", "inert", "refused"):
        return derived(name, stages, default=None, reason=row.reason)
    return replace(row, name=name)


_OF_STAGES = tuple(
    _in_a_stage(row)
    for row in _OWN
    if row.name.split(".")[0] in ("algorithm", "buffer", "data_processor", "explorer", "trainer")
    if f"stages[].{row.name}" not in _SAID
)
"""Every other key that a stage may give."""

_VERL = {row.name for row in (*VERL, *MORE_VERL)}
TRINITY: tuple[Key, ...] = (*(row for row in _OWN if row.name not in _VERL), *STAGES, *_OF_STAGES)
TRINITY_VERL: tuple[Key, ...] = tuple(row for row in _OWN if row.name in _VERL)

ALIASES: dict[str, str | tuple[str, str]] = {
    "algorithm.optimizer.lr_scheduler_type": ("algorithm.optimizer.warmup_style", "the newer name"),
    "buffer.default_workflow_type": (
        "buffer.explorer_input.default_workflow_type",
        "as the document's prose has it",
    ),
    "buffer.default_reward_fn_type": (
        "buffer.explorer_input.default_reward_fn_type",
        "as the document's prose has it",
    ),
    "buffer.explorer_input.taskset.data_selector": (
        "buffer.explorer_input.taskset.task_selector",
        "the newer name",
    ),
    "trainer.max_checkpoints_to_keep": (
        "trainer.trainer_config.trainer.max_actor_ckpt_to_keep",
        "the newer name",
    ),
    "trainer.trainer_config.actor_rollout_ref.actor.optim.lr_scheduler_type": (
        "trainer.trainer_config.actor_rollout_ref.actor.optim.warmup_style",
        "the newer name",
    ),
    "trainer.trainer_config.critic.optim.lr_scheduler_type": (
        "trainer.trainer_config.critic.optim.warmup_style",
        "the newer name",
    ),
}
"""Newer names, and two that the document's prose misspells."""

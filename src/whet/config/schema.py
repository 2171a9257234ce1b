"""The native schema: one experiment, and the machine it runs on.

Strict and frozen. The docstring under each field is its documentation: meaning, unit, reason of the default;
`whet explain KEY` and `docs/config.md` are generated from it. The schema has no behaviour: validators may only reject.
`None` means "derived": `whet plan FILE` prints the derived value. The sections are in `parts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.parts.algorithm import Algorithm, Reward
from whet.config.parts.base import Section
from whet.config.parts.buffer import Buffer
from whet.config.parts.cluster import Cluster
from whet.config.parts.correction import Correction, Reject
from whet.config.parts.data import Data, ReasoningGym, Source
from whet.config.parts.eval import Eval
from whet.config.parts.groups import Groups
from whet.config.parts.kl import Kl, RewardKl
from whet.config.parts.lora import Lora
from whet.config.parts.mix import Mix
from whet.config.parts.model import Critic, Model, Reference, Scratch, Tokenizer
from whet.config.parts.parallel import Parallel
from whet.config.parts.precision import Precision
from whet.config.parts.profile import Profile
from whet.config.parts.reward_model import RewardModel
from whet.config.parts.rollout import Environment, Rollout, SamplingConfig
from whet.config.parts.run import Checkpoint, Machine, RewardWorkers, Track
from whet.config.parts.sync import Sync
from whet.config.parts.train import CriticOptimizer, Optimizer, OptimizerGroup, Schedule, Train

__all__ = [
    "Algorithm",
    "Buffer",
    "Checkpoint",
    "Cluster",
    "Config",
    "Correction",
    "Critic",
    "CriticOptimizer",
    "Data",
    "Environment",
    "Eval",
    "Groups",
    "Kl",
    "Lora",
    "Machine",
    "Mix",
    "Model",
    "Optimizer",
    "OptimizerGroup",
    "Parallel",
    "Precision",
    "Profile",
    "ReasoningGym",
    "Reference",
    "Reject",
    "Reward",
    "RewardKl",
    "RewardModel",
    "RewardWorkers",
    "Rollout",
    "SamplingConfig",
    "Schedule",
    "Scratch",
    "Section",
    "Source",
    "Stage",
    "Sync",
    "Tokenizer",
    "Track",
    "Train",
]


class Stage(Section):
    """One stage of a run. It inherits the whole config; its own keys override it."""

    name: str
    """Label of the stage, in the display and in paths."""
    algorithm: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `algorithm`."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `data`."""
    rewards: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `rewards`."""
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `rollout`."""
    buffer: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `buffer`."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `train`."""
    critic: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `critic`."""
    reference: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `reference`."""
    eval: dict[str, Any] = Field(default_factory=dict)
    """Keys that override `eval`."""


class Config(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run."""
    mode: Literal["both", "train", "explore", "eval"] = "both"
    """both: explore and train in one process. Or disaggregated, one process per mode, with buffer.url and the same
    run_dir: train takes groups from the buffer and publishes weights; explore (any number, each with its
    buffer.explorer_name) samples with these weights; eval evaluates the checkpoints of the run in their order. Each
    process can be stopped, killed and started independently."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run is a function of this number."""
    run_dir: str = "runs/${name}"
    """Folder of everything that the run writes. (verl: default_local_dir; TRL: output_dir) {time} in it is the time of
    the first start, UTC: the run resumes in the newest such folder unless that run is finished."""
    imports: tuple[str, ...] = ()
    """Your own modules, 'package.module' or 'path/to/file.py', imported first, in this process and in the reward
    processes: a module may register models, tokenizers and the like."""
    model: Model = Field(default_factory=Model)
    """The policy."""
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    """The tokenizer."""
    critic: Critic = Field(default_factory=Critic)
    """The value model; used where the advantage is gae."""
    reference: Reference = Field(default_factory=Reference)
    """The reference policy; used where a KL term or DPO needs it."""
    data: Data = Field(default_factory=Data)
    """Sources of tasks."""
    algorithm: Algorithm = Field(default_factory=Algorithm)
    """The training objective."""
    rewards: dict[str, Reward] = Field(default_factory=dict)
    """Rewards by name: functions and models."""
    rollout: Rollout = Field(default_factory=Rollout)
    """Sampling from the policy."""
    buffer: Buffer = Field(default_factory=Buffer)
    """Storage of groups between explorers and a trainer in separate processes."""
    sync: Sync = Field(default_factory=Sync)
    """Transfer of weights from the trainer to engines in separate processes."""
    train: Train = Field(default_factory=Train)
    """Steps, batches, optimizer."""
    eval: Eval = Field(default_factory=Eval)
    """Held-out evaluation."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Saving and resuming."""
    track: Track = Field(default_factory=Track)
    """Metrics and records."""
    profile: Profile = Field(default_factory=Profile)
    """Traces of single steps."""
    reward_workers: RewardWorkers = Field(default_factory=RewardWorkers)
    """Limits for reward code."""
    cluster: Cluster = Field(default_factory=Cluster)
    """Engines and other parts of the run in separate processes, by Ray."""
    machine: Machine = Field(default_factory=Machine)
    """Devices, threads, memory."""
    stages: tuple[Stage, ...] = ()
    """Stages that run one after the other, each from the end of the one before. Default: one stage, this config."""

"""The native schema: one experiment, and the machine it runs on.

Strict and frozen. The docstring under each field is its documentation: meaning, unit, reason of the default;
`whet explain KEY` and `docs/config.md` are generated from it. The schema has no behaviour: validators may only reject.
`None` means "derived": `whet plan FILE` prints the derived value. Sections are in `sections`; import them from here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from whet.config.sections.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    GroupsConfig,
    KlConfig,
    MixConfig,
    RejectConfig,
    RepromptConfig,
    RewardKlConfig,
)
from whet.config.sections.base import Place, Section
from whet.config.sections.buffer import BufferConfig
from whet.config.sections.cluster import ClusterConfig
from whet.config.sections.data import DataConfig, SourceConfig
from whet.config.sections.eval import EvalConfig
from whet.config.sections.model import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    TokenizerConfig,
)
from whet.config.sections.parallel import ParallelConfig
from whet.config.sections.precision import PrecisionConfig
from whet.config.sections.rewards import RewardConfig, RewardModelConfig
from whet.config.sections.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig
from whet.config.sections.run import (
    CheckpointConfig,
    MachineConfig,
    ProfileConfig,
    RewardWorkersConfig,
    TrackConfig,
)
from whet.config.sections.server import ServerConfig
from whet.config.sections.sync import SyncConfig
from whet.config.sections.train import (
    CriticOptimizerConfig,
    EarlyStoppingConfig,
    OptimizerConfig,
    OptimizerGroupConfig,
    PolicyOptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)


class StageConfig(Section):
    """One stage of a run. It inherits the whole config; its own keys override it. Sections that are not listed here are
    the same in all stages."""

    name: str
    """Label of the stage, in the display, in metrics and in names of files: letters of ASCII, digits, _ . and -, unique
    in the run."""
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
    """Name of the run: part of the default run_dir, and the run's name in trackers. (verl: trainer.experiment_name;
    TRL: run_name)"""
    mode: Literal["both", "train", "explore", "eval"] = "both"
    """both: explore and train in one process. Or disaggregated, one process per mode, with buffer.url and the same
    run_dir: train takes groups from the buffer and publishes weights; explore (any number, each with its
    buffer.explorer_name) samples with these weights; eval evaluates the checkpoints of the run in their order. Each
    process can be stopped, killed and started independently."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run (new weights, order of rows, sampling, minibatches) is a function of this
    number."""
    run_dir: Place = "runs/${name}"
    """Folder of everything that the run writes. (verl: default_local_dir; TRL: output_dir) {time} in it is the time of
    the first start, UTC: the run resumes in the newest such folder unless that run is finished."""
    dirs: dict[Literal["checkpoints", "export", "rollouts", "eval", "profile"], Place] = Field(
        default_factory=dict
    )
    """Folders of run_dir that lie elsewhere: {checkpoints: /large/disk/run}. In run_dir a link of that name leads
    there. Each belongs to one run."""
    imports: tuple[str, ...] = ()
    """Your own modules, 'package.module' or 'path/to/file.py', imported first in every process that loads a model or
    runs your code: this one, ranks, replicas, explorers, reward and environment processes. A module may register
    models, tokenizers and the like."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy: the model that is trained and sampled from."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The model that learns beside the policy: PPO's value model (advantage gae or turn_level_gae) or PRIME's implicit
    reward model (advantage prime). Other algorithms have none."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    """The frozen model that the policy is compared with. It is loaded only where something reads it: a KL term
    (algorithm.kl.coef or algorithm.reward_kl.coef above 0), a loss such as dpo or kto, PRIME, or distillation, whose
    teacher it is."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Sources of tasks."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """The training objective."""
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """Rewards by name: functions and models."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Sampling from the policy."""
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    """Where scored groups wait for the trainer, and whether they are trained on again."""
    sync: SyncConfig = Field(default_factory=SyncConfig)
    """Transfer of weights from the trainer to engines in separate processes."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Steps, batches, optimizer."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    track: TrackConfig = Field(default_factory=TrackConfig)
    """Metrics and records."""
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Traces of single steps."""
    reward_workers: RewardWorkersConfig = Field(default_factory=RewardWorkersConfig)
    """Limits for reward code."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Engines and other parts of the run in separate processes, by Ray."""
    machine: MachineConfig = Field(default_factory=MachineConfig)
    """Devices, threads, memory."""
    stages: tuple[StageConfig, ...] = ()
    """Stages that run one after the other, each from the end of the one before. Default: one stage, this config."""

"""What follows from one stage of a config, as numbers. `whet plan FILE` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from whet.config import schedules, sizes
from whet.config.checks_parallel import ranks_of
from whet.config.evaluation import longest_rollout
from whet.config.functions import Kind
from whet.config.groups import sampled_tasks
from whet.config.learns import ROUTERS, Learns, is_matrix, is_stack
from whet.config.recipes import Resolved, resolve
from whet.config.schema import AlgorithmConfig, Config, OptimizerConfig, SamplingConfig, TrainConfig
from whet.config.sections.rollout import Quantization
from whet.config.sizes import Shape, cache_dtype
from whet.types import ConfigError

QUANTISED = "quantised weights"
"""Of an engine, in tables of memory."""


def quantised_size(tensors: Mapping[str, tuple[int, ...]], kind: Quantization) -> tuple[int, int]:
    """(numbers in the matrices that `rollout.quantization` takes, their bytes then: one each, and a float32 scale a
    row; in mxfp4 half a byte each, and a byte for 32). tensors: every parameter by its name."""
    if kind == "mxfp4":
        stacks = sum(prod(size) for name, size in tensors.items() if is_stack(name) and not size[-1] % 32)
        return stacks, stacks // 2 + stacks // 32
    still = ("embed_tokens", "lm_head", *ROUTERS)
    taken = [
        size
        for name, size in tensors.items()
        if is_matrix(name, size) and not any(s in name for s in still) and not any(n % 16 for n in size[-2:])
    ]
    return sum(map(prod, taken)), sum(prod(size) + 4 * prod(size[:-1]) for size in taken)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One stage, everything decided that needs neither data nor device."""

    name: str
    cfg: Config
    """Of the stage, with its learning rate."""
    algorithm: Resolved
    rows: int | None
    """Training rows of one epoch, if they are known."""
    total_steps: int | None
    """None: given as epochs, and the rows are not known yet."""
    tasks_per_step: int
    group_size: int
    """Rollouts of one task: 1 for given replies, 2 for preferences."""
    experts_per_step: int
    """Tasks of a step whose reply is a demonstration among the policy's own rollouts."""
    minibatches: int
    passes: int
    train: TrainConfig
    critic: TrainConfig | None
    """Training as the critic sees it; None: there is no critic."""
    critic_warmup_steps: int
    optimizer: OptimizerConfig
    reply_tokens: int
    """The longer of training's and evaluation's limit."""
    train_reply_tokens: int
    """Training's alone."""
    total_tokens: int | None
    """The user's limit for both together."""
    eval_sampling: SamplingConfig
    """Greedy with the training limits, and `eval.sampling` put over it key by key."""
    evaluates: bool
    judges: bool
    """Evaluation asks and judges; else it only measures the loss of given replies."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of the parameters; float32 where machine.device=auto leaves it open."""
    dtype_open: bool
    """On CUDA it will be bfloat16."""
    device: Literal["cpu", "cuda"]
    """What it trains on, as far as that can be told without torch."""
    compiled: bool
    """The C kernels are wanted, where they can be used."""
    mode: Literal["synchronous", "overlapped", "asynchronous", "train"]
    """How exploring and training take turns."""
    saves_parts: bool
    """No rank gathers whole tensors to save them: each writes its parts, or sends them to this process."""
    quantized: Quantization | None
    """What rollouts are sampled from: a copy of the weights, rounded to this. None: the weights."""
    samples_apart: bool
    """Rollouts are sampled from a copy of the weights, for the policy moves on meanwhile."""
    threads: int
    shape: Shape | None
    """None: the model's folder is not on this machine."""
    learns: Learns | None
    """How much of the policy learns; None where its size is not known."""
    critic_learns: Learns | None
    """The same of the critic, as if it were the policy's size."""
    vocab_is_bound: bool
    """The tokenizer is yet to be built: the vocabulary, and so the parameters, are at most this."""
    reference_saved: bool
    reference_from_folder: bool
    reference_is_base: bool
    """In the first stage its adapters do nothing, so there are no adapted weights of its own."""
    reward_models: Mapping[str, int]
    """Bytes of their weights by name."""
    critic_whole: bool
    """The critic's checkpoints hold the weights under adapters too: it starts as a copy of the policy."""
    models_elsewhere: bool = False
    """No stage of the run computes with a model in the main process: another one makes them, for the ranks to read."""

    @property
    def steps(self) -> int:
        """Training steps."""
        if self.total_steps is None:
            raise ConfigError("train.epochs: the number of steps follows from the rows: plan(cfg, rows=...)")
        return self.total_steps

    @property
    def own_tasks_per_step(self) -> int:
        """Tasks of a step that are no demonstrations of a mix."""
        return self.tasks_per_step - self.experts_per_step

    @property
    def sampled_tasks_per_step(self) -> int:
        """Tasks of a step that are sampled; more than are trained on with algorithm.oversample."""
        return sampled_tasks(self.own_tasks_per_step, self.algorithm)

    @property
    def rollouts_per_step(self) -> int:
        return self.own_tasks_per_step * self.group_size + self.experts_per_step

    @property
    def rollouts_per_minibatch(self) -> int:
        return self.rollouts_per_step // self.minibatches

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one training step."""
        return self.minibatches * self.passes

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole stage: what its schedule runs over."""
        return (self.steps - self.critic_warmup_steps) * self.updates_per_step

    @property
    def critic_updates_per_step(self) -> int:
        """Optimizer steps of the critic in one training step."""
        return self.critic.minibatches * self.critic.update_epochs if self.critic else 0

    @property
    def critic_optimizer_steps(self) -> int:
        """Optimizer steps of the critic in the whole stage."""
        return self.steps * self.critic_updates_per_step

    @property
    def schedule_steps(self) -> int:
        """Length of the policy's schedule, in its own unit."""
        schedule = self.optimizer.schedule
        return schedules.position(schedule, self.optimizer_steps, updates_per_step=self.updates_per_step)

    @property
    def warmup_steps(self) -> int:
        """The policy's linear warm-up, in the unit of its schedule."""
        return schedules.warmup_steps(self.optimizer.schedule, self.schedule_steps)

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.needs_reference

    @property
    def references(self) -> tuple[str, ...]:
        """Names of the references; where there are several, each has a number."""
        several = len(self.cfg.reference.models)
        if not self.needs_reference:
            return ()
        return tuple(f"reference-{n}" for n in range(1, several + 1)) or ("reference",)

    @property
    def masters(self) -> bool:
        """Parameters that are not float32 have float32 copies."""
        return self.train.precision.master_weights

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.needs_critic

    @property
    def max_sequence_tokens(self) -> int:
        return longest_rollout(self.cfg)

    @property
    def generates(self) -> bool:
        """Whether a rollout engine is needed at all."""
        return self.algorithm.kind == "online" or self.judges

    @property
    def cache_dtype(self) -> str:
        """Of the KV cache."""
        return cache_dtype(self.device, self.dtype)

    @property
    def kv_cache_bytes(self) -> int | None:
        """What max_num_seqs rows of full length need, or the user's limit."""
        if self.shape is None or not self.generates:
            return None if self.generates else 0
        if self.cfg.machine.kv_cache_mb is not None:
            return self.cfg.machine.kv_cache_mb * 2**20
        return self.shape.kv_bytes(
            rows=self.cfg.rollout.max_num_seqs, tokens=self.max_sequence_tokens, dtype=self.cache_dtype
        )

    @property
    def quantized_bytes(self) -> int:
        """Of the quantised weights that an engine has."""
        there = self.quantized and self.generates and self.shape is not None
        return (
            quantised_size(self.shape.tensors, self.quantized)[1]
            if there and self.shape and self.quantized
            else 0
        )

    @property
    def beside(self) -> dict[str, int]:
        """Bytes of what this process holds beside its models: those that judge, and the engine's weights in 8 bits."""
        own = (
            {} if self.cfg.rollout.replicas or not self.quantized_bytes else {QUANTISED: self.quantized_bytes}
        )
        return {**self.reward_models, **own}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by what they are for; empty if the model's size is not known. Activations come on top."""
        if self.learns is None:
            return {}
        policy = self.learns.train_bytes(self.optimizer, self.dtype, masters=self.masters)
        out = {with_state("policy", self.optimizer): policy}
        out |= dict.fromkeys(self.references, self._reference_bytes(self.learns))
        if self.critic is not None and self.critic_learns is not None:
            optimizer = self.critic.optimizer
            critic = self.critic_learns.train_bytes(optimizer, self.dtype, masters=self.masters)
            out[with_state("critic", optimizer)] = critic
        if self.generates:
            out["KV cache"] = self.kv_cache_bytes or 0
        return {**out, **self.beside}

    @property
    def checkpoint_bytes(self) -> int | None:
        """Disk for one checkpoint: weights and moments of all that learns, and the run's own reference."""
        if self.learns is None:
            return None
        out = self.learns.checkpoint_bytes(self.optimizer, self.dtype, whole=False, masters=self.masters)
        if self.critic is not None and self.critic_learns is not None:
            whole, optimizer = self.critic_whole, self.critic.optimizer
            out += self.critic_learns.checkpoint_bytes(
                optimizer, self.dtype, whole=whole, masters=self.masters
            )
        if self.reference_saved:
            shares = self.learns.adapters and not self.reference_from_folder
            base = self.learns.own if shares else self.learns.base
            out += base * sizes.DTYPE_BYTES[self.dtype] + (self.learns.adapters * 4 if shares else 0)
        return out

    @property
    def policy_on_ranks(self) -> bool:
        """The policy trains on ranks, and no engine in the main process samples."""
        here = self.generates and not self.cfg.rollout.replicas
        return "policy" in ranks_of(self.train.parallel) and not here

    @property
    def copies(self) -> dict[str, int]:
        """Bytes of the models that stand beside policy and critic and never learn."""
        if self.learns is None:
            return {}
        out = dict.fromkeys(self.references, self._reference_bytes(self.learns))
        if self.samples_apart and self.generates:
            shared = self.learns.own + self.learns.adapted if self.learns.adapters else self.learns.base
            out["sampler"] = shared * sizes.DTYPE_BYTES[self.dtype] + self.learns.adapters * 4
        return out

    def _reference_bytes(self, policy: Learns) -> int:
        """Beside a policy with adapters it shares the base, unless it comes from a folder."""
        if not policy.adapters or self.reference_from_folder:
            return policy.base * sizes.DTYPE_BYTES[self.dtype]
        adapted = 0 if self.reference_is_base else policy.adapted
        return (policy.own + adapted) * sizes.DTYPE_BYTES[self.dtype] + policy.adapters * 4


LEARNING_RATES: Mapping[Kind, tuple[float, float]] = {
    "online": (1e-6, 1e-5),
    "preferences": (1e-6, 1e-5),
    "labels": (1e-6, 1e-5),
    "demonstrations": (1e-5, 2e-4),
}
"""Peak learning rates by kind of algorithm where none is given: of all weights, of adapters. Of all weights: GRPO, DPO
and KTO as TRL 1.16, GRPO and SFT as verl 0.9.1. Adapters take ten times as much (Schulman et al., "LoRA Without
Regret", 2025); with SFT 2e-4, as QLoRA (arXiv:2305.14314, table 9)."""


def method_lr(algorithm: AlgorithmConfig, *, lora: bool) -> float:
    """The learning rate of a method where none is given."""
    try:
        kind = resolve(algorithm).kind
    except ConfigError:  # the plan refuses this algorithm, and says where it is given
        kind = "online"
    return LEARNING_RATES[kind][lora]


def with_lr(cfg: Config) -> Config:
    """The config of a stage, with the learning rate of its method where none is given."""
    optimizer = cfg.train.optimizer
    if optimizer.lr is not None:
        return cfg
    lr = method_lr(cfg.algorithm, lora=cfg.model.lora is not None)
    train = cfg.train.model_copy(update={"optimizer": optimizer.model_copy(update={"lr": lr})})
    return cfg.model_copy(update={"train": train})


def with_state(model: str, optimizer: OptimizerConfig) -> str:
    """'policy with gradients and Adam'."""
    kind = {"adam": "Adam", "adamw": "Adam", "sgd": "SGD", "muon": "Muon"}[optimizer.name]
    return f"{model} with gradients and {kind}"


def for_critic(cfg: Config) -> TrainConfig:
    """The section `train` with the critic's own settings put over it."""
    critic = cfg.critic
    own = {
        k: v
        for k in ("minibatches", "update_epochs", "gradient_checkpointing")
        if (v := getattr(critic, k)) is not None
    }
    if critic.micro_batch_tokens or critic.micro_batch_rollouts:
        own |= {
            "micro_batch_tokens": critic.micro_batch_tokens,
            "micro_batch_rollouts": critic.micro_batch_rollouts,
        }
    routers = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0, "router_replay": "none"}
    return cfg.train.model_copy(update=own | {"optimizer": critic.optimizer} | routers)


def content_of(cfg: Config) -> Literal["full", "delta", "adapters"]:
    """The effective value of sync.content."""
    if cfg.sync.content != "auto":
        return cfg.sync.content
    apart = cfg.sync.dtype == "auto" and cfg.rollout.quantization is None
    return "adapters" if cfg.model.lora is not None and apart else "full"


def has_adapters(cfg: Config) -> bool:
    """Whether the model of this process has adapters: an explorer that receives merged weights has none."""
    explores = cfg.mode == "explore" and resolve(cfg.algorithm).kind == "online"
    return cfg.model.lora is not None and not (explores and content_of(cfg) != "adapters")

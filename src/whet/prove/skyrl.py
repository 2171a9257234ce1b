"""How SkyRL's own functions are called, and what `--prove` compares of one of its files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf
from torch import Tensor

from whet.config.schema import Config
from whet.prove import numbers, schedules, settings
from whet.prove import skyrl_engines as engines
from whet.prove.cases import Case, case
from whet.prove.checks import (
    DRAWN,
    Check,
    File,
    micro_batch,
    of_rates,
    of_rows,
    our_batches,
    reachable,
    scalars,
)
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.types import Json

CONFIG = "skyrl.train.config:SkyRLTrainConfig"
TRAINER = "skyrl.train.trainer:RayPPOTrainer"
PPO = "skyrl.backends.skyrl_train.utils.ppo_utils"
SAMPLING = "skyrl.backends.skyrl_train.inference_servers.engine_utils:get_sampling_params_for_backend"
A = "trainer.algorithm."
FLOAT32 = 2e-6
"""Tolerance where SkyRL computes in float32."""


def advantage(function: Any, case: Case, made: Any) -> Numbers:
    """As `compute_advantages_and_returns` calls it, before a normalisation over the batch. made: AlgorithmConfig."""
    adv, returns = function(
        token_level_rewards=case.reward,
        response_mask=case.mask,
        index=case.index,
        values=case.padded(case.batch.value_N),
        grpo_norm_by_std=made.grpo_norm_by_std,
        gamma=made.gamma,
        lambd=made.lambd,
        config=made,
    )
    return {"advantage": adv, "return": returns} if made.advantage_estimator == "gae" else {"advantage": adv}


def loss(function: Any, case: Case, made: Any, *, micro: int = 1) -> Numbers:
    """The loss of a minibatch: the reduction scales the advantages, then the loss is a sum; the KL, if there is one, is
    a mean over sequences (`_forward_backward_micro` of workers/worker.py). micro: rollouts of a micro-batch."""
    mask = case.mask
    scale = theirs("skyrl", f"{PPO}:apply_loss_reduction_to_advantages_minibatch")
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(case.index), 1) if a != b), len(case.index)]
    adv = case.padded(case.batch.adv_N)
    reduced = scale(
        adv, mask, made.loss_reduction, micro, made.max_seq_len, prompt_boundaries=list(pairwise(starts))
    )
    logp = case.padded(case.logp_N).requires_grad_()
    sampled = case.padded(case.batch.logp_sample_N)
    torch.manual_seed(0)
    total, _ = function(logp, case.padded(case.batch.logp_old_N), reduced, made, mask, sampled)
    if made.use_kl_loss:
        approximate, mean = (
            theirs("skyrl", path) for path in (f"{PPO}:compute_approx_kl", f"{PPO}:masked_mean")
        )
        kl = approximate(logp, case.padded(case.batch.logp_ref_N), mask, made.kl_estimator_type)
        total = total + made.kl_loss_coef * mean(kl, mask, dim=-1).mean()
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def value_loss(function: Any, case: Case, made: Any) -> Numbers:
    values = case.padded(case.value_N).requires_grad_()
    old, returns = case.padded(case.batch.value_N), case.padded(case.batch.return_N)
    total, _ = function(values, old, returns, made, case.mask)
    total.backward()
    return {"loss": total.detach(), "grad": values.grad}


# ---------------------------------------------------------------- a file


@cache
def known() -> Json:
    """All keys of SkyRL's config."""
    return dataclasses.asdict(theirs("skyrl", CONFIG)())


def configured(tree: Mapping[str, Json]) -> Any:
    """SkyRL's config of a file."""
    resolved = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    build = theirs("skyrl", "skyrl.train.config.config:build_nested_dataclass")
    made = build(theirs("skyrl", CONFIG), resolved)
    algorithm = made.trainer.algorithm
    if algorithm.use_tis:  # `validate_cfg` of train/utils/utils.py, before a run
        algorithm.off_policy_correction.tis_ratio_type = "token"
        algorithm.off_policy_correction.token_tis_ratio_clip_high = algorithm.tis_imp_ratio_cap
    return made


def checks(config: Any, file: File) -> Iterator[Check]:
    """The rows of a file."""
    made, trainer = config.trainer.algorithm, config.trainer
    group = min(file.plan.group_size, 8)
    micro = math.gcd(4 * group, trainer.micro_train_batch_size_per_gpu)  # divides the batches below
    batches = [case(kind, 0, sizes=[group] * 4) for kind in ("one turn", "far apart")]
    estimate = theirs("skyrl", f"{PPO}:AdvantageEstimatorRegistry").get(made.advantage_estimator)
    lose = theirs("skyrl", f"{PPO}:PolicyLossRegistry").get(made.policy_loss_type)
    yield Check(
        what="batches",
        called="skyrl.train.utils.utils:validate_batch_sizes",
        theirs=lambda _: sizes(config),
        ours=lambda _: our_batches(file.plan),
    )
    yield Check(
        what="training steps",
        called=f"{TRAINER}._build_train_dataloader_and_compute_training_steps",
        theirs=lambda _: of_rows(partial(steps, config), file.plan),
        ours=lambda _: of_rows(file.steps, file.plan),
        keys=("trainer.num_dummy_steps",),
    )
    yield from of_rates(
        file,
        theirs=partial(rates, config),
        ours=partial(_our_rates, config, file),
        called=engines.scheduler(trainer.strategy),
        name="learning rate of each optimizer step",
    )
    yield from _of_settings(config, file)
    yield Check(
        what=f"advantage, {made.advantage_estimator}",
        called=f"{PPO}:{estimate.__name__}",
        refused="SkyRL normalises over the batch within its trainer"
        if made.advantage_batch_normalize
        else "",
        theirs=lambda each: advantage(estimate, each, made),
        ours=lambda each: numbers.advantage(numbers.built(file.config, each), each, kl=False),
        cases=batches,
        tolerance=FLOAT32,
    )
    yield from _of_kl(made, file, batches)
    yield Check(
        what=f"loss and gradient, {made.policy_loss_type}, without the KL",
        called=f"{PPO}:{lose.__name__}",
        refused=DRAWN if made.policy_loss_type == "clip_cov" else "",
        theirs=lambda each: loss(lose, each, dataclasses.replace(made, use_kl_loss=False), micro=micro),
        ours=lambda each: numbers.bare_loss(_of_blocks(file.config, micro), each),
        cases=reachable(batches, file),
        keys=(f"{A}kl_cov.ppo_kl_coef",),
        tolerance=FLOAT32,
    )
    if trainer.critic.model.path is not None:
        critic_loss = theirs("skyrl", f"{PPO}:ppo_critic_loss")
        yield Check(
            what="critic's loss and gradient",
            called=f"{PPO}:ppo_critic_loss",
            theirs=lambda each: value_loss(critic_loss, each, made),
            ours=lambda each: numbers.value_loss(numbers.built(file.config, each), each),
            cases=batches,
            tolerance=FLOAT32,
        )


def _of_settings(config: Any, file: File) -> Iterator[Check]:
    """The optimizer, and how replies are sampled."""
    policy, strategy, generator = config.trainer.policy, config.trainer.strategy, config.generator
    more = policy.megatron_config.optimizer_config_kwargs
    yield settings.optimizer(
        file,
        theirs=lambda: engines.optimizer(policy.optimizer_config, strategy, more),
        called=engines.optimizer_of(strategy),
    )
    yield settings.sampling(
        file,
        theirs=lambda: drawn(generator.sampling_params, generator.n_samples_per_prompt),
        called=SAMPLING,
        prompt=config.trainer.max_prompt_length,
    )
    if file.plan.evaluates:
        yield settings.evaluation(
            file,
            theirs=lambda: drawn(generator.eval_sampling_params, generator.eval_n_samples_per_prompt),
            called=SAMPLING,
        )


def drawn(params: Any, replies: int) -> Numbers:
    """What SkyRL asks vLLM for."""
    asked = theirs("skyrl", SAMPLING)("vllm", params)
    taken = {name: asked[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    return settings.drawn(**taken, tokens=asked["max_tokens"], replies=replies)


def _of_blocks(cfg: Config, rollouts: int) -> Config:
    """token_mean_legacy takes a mean over each micro-batch: those of the small batches here have so many rollouts."""
    if cfg.algorithm.mean_over_rollouts is None:
        return cfg
    blocks = {"mean_over_rollouts": rollouts}
    return cfg.model_copy(update={"algorithm": cfg.algorithm.model_copy(update=blocks)})


def _of_kl(made: Any, file: File, batches: list[Case]) -> Iterator[Check]:
    section_of = file.config.algorithm

    def in_loss(each: Case) -> Numbers:
        plain = theirs("skyrl", f"{PPO}:ppo_policy_loss")
        kl = dataclasses.replace(made, policy_loss_type="regular")  # the KL does not depend on the loss
        return numbers.apart(
            loss(plain, each, kl), loss(plain, each, dataclasses.replace(kl, use_kl_loss=False))
        )

    def taken(each: Case) -> Numbers:
        trainer = theirs("skyrl", TRAINER)
        own = SimpleNamespace(
            cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=made)),
            reward_kl_controller=None,
            all_metrics={},
        )
        if not made.use_kl_in_reward:
            return {"taken": torch.zeros_like(each.mask)}
        old, ref = (each.padded(x) for x in (each.batch.logp_old_N, each.batch.logp_ref_N) if x is not None)
        given = _Batch(
            loss_mask=each.mask,
            rewards=torch.zeros_like(old),
            base_action_log_probs=ref,
            action_log_probs=old,
        )
        return {"taken": -trainer.apply_reward_kl_penalty(own, given)["rewards"]}

    yield Check(
        what=f"KL in the loss, {made.kl_estimator_type}",
        called=f"{PPO}:compute_approx_kl",
        theirs=in_loss,
        ours=lambda each: numbers.kl_in_loss(file.config, each),
        cases=batches,
        keys=(f"{A}use_kl_loss",),
        tolerance=FLOAT32,
    )
    yield Check(
        what="KL in the reward",
        called=f"{TRAINER}.apply_reward_kl_penalty",
        theirs=taken,
        ours=lambda each: numbers.reward_kl(file.config, each),
        cases=batches,
        tolerance=FLOAT32,
    )
    yield Check(
        what="entropy in the loss",
        called="",
        theirs=lambda _: scalars(coefficient=made.entropy_loss_coef if made.use_entropy_loss else 0.0),
        ours=lambda _: scalars(coefficient=section_of.entropy_coef),
    )


class _Batch(dict[str, Tensor]):
    """What SkyRL's trainer takes for a batch, with a place for its metrics."""

    metadata: dict[str, Any]

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__(**tensors)
        self.metadata = {}


def sizes(config: Any) -> Numbers:
    """As SkyRL's own validation has them."""
    theirs("skyrl", "skyrl.train.utils.utils:validate_batch_sizes")(config)
    trainer = config.trainer
    return scalars(
        tasks=trainer.train_batch_size,
        rollouts_of_a_mini_batch=trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt,
        passes=trainer.update_epochs_per_batch,
    ) | micro_batch(trainer.micro_train_batch_size_per_gpu, None)


class _Rows(list[int]):
    """Rows of a file, of which only the number counts."""

    collate_fn: ClassVar[Any] = staticmethod(list)


def steps(config: Any, rows: int) -> int:
    """The training steps that SkyRL's trainer counts for a file of so many rows."""
    own = SimpleNamespace(cfg=config, train_dataset=_Rows(range(rows)))
    theirs("skyrl", TRAINER)._build_train_dataloader_and_compute_training_steps(own)
    return int(own.total_training_steps)


def rates(config: Any, rows: int) -> Tensor:
    """The learning rate of each optimizer step, by the scheduler that SkyRL's strategy gets."""
    trainer = config.trainer
    updates = trainer.train_batch_size // trainer.policy_mini_batch_size * trainer.update_epochs_per_batch
    total = steps(config, rows) * updates
    return engines.rates(trainer.policy.optimizer_config, trainer.strategy, total, total)


def _our_rates(config: Any, file: File, rows: int) -> Tensor:
    return schedules.of_updates(file.plan, file.steps(rows)) / float(
        config.trainer.policy.optimizer_config.lr
    )

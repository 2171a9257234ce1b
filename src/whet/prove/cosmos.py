"""How Cosmos-RL's own functions are called, and what `--prove` compares of one of its files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from whet.algos.segments import need
from whet.prove import numbers, schedules, settings
from whet.prove.cases import Case, case
from whet.prove.checks import (
    Check,
    File,
    micro_batch,
    of_rates,
    of_rows,
    our_micro_batch,
    reachable,
    scalars,
)
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.types import Json

P = "train.train_policy."
CONFIG = "cosmos_rl.policy.config:Config"
GRPO = "cosmos_rl.policy.trainer.llm_trainer.grpo_trainer:compute_loss"
TRAINER = "cosmos_rl.policy.trainer.llm_trainer.grpo_trainer:GRPOTrainer"
TEACHER = f"{TRAINER}.compute_teacher_kl_advantages"
ADVANTAGE = "cosmos_rl.dispatcher.algo.grpo:GRPO"
STATUS = "cosmos_rl.dispatcher.status:PolicyStatusManager"
SCHEDULERS = "cosmos_rl.policy.trainer.optm:build_lr_schedulers"
OPTIMIZERS = "cosmos_rl.policy.trainer.optm:build_optimizers"
FLOAT32 = 2e-6
"""Tolerance where Cosmos computes in float32."""


def section(keys: Mapping[str, Json]) -> Any:
    """Cosmos's own section, with these of its keys."""
    told = {key.removeprefix(P): value for key, value in keys.items() if key.startswith(P)}
    known = {name: value for name, value in told.items() if not name.startswith("dataset.")}
    return theirs("cosmos", "cosmos_rl.policy.config:GrpoConfig")(type="grpo", **known)


def loss(function: Any, case: Case, made: Any) -> Numbers:
    """Over the packed log-probs of the sampled tokens. The denominator is the trainer's own log-prob or the engine's,
    as the trainer chooses it (use_rollout_logprobs_for_loss, use_decoupled_loss). made: GrpoConfig."""
    at = case.batch.mask_N
    logp_N = case.logp_N.clone().requires_grad_()
    lengths = torch.bincount(case.batch.rollout_N[at], minlength=case.batch.rollouts)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    sampled, old, ref, adv = (
        need(x_N, "a field of the case")[at]
        for x_N in (case.batch.logp_sample_N, case.batch.logp_old_N, case.batch.logp_ref_N, case.batch.adv_N)
    )
    total, _, _ = function(
        logp_N[at],
        sampled if made.use_rollout_logprobs_for_loss else old,
        ref,
        adv,
        starts,
        SimpleNamespace(train=SimpleNamespace(train_policy=made)),
        case.mask.bool(),
        rollout_per_token_logps=sampled if made.use_decoupled_loss else None,
    )
    total.backward()
    return {"loss": total.detach(), "grad": case.padded(logp_N.grad)}


def advantage(algorithm: Any, case: Case, made: Any) -> Numbers:
    """Group by group. made: GrpoConfig."""
    algo = algorithm(None, unbiased=made.unbiased_advantage)
    out_R = torch.zeros_like(case.batch.reward_R)
    for group in case.batch.group_R.unique():
        at = case.batch.group_R == group
        out_R[at] = torch.tensor(algo.compute_advantage(case.batch.reward_R[at].tolist())).double()
    return {"advantage": out_R[:, None] * case.mask}


def rates(train: Any, steps: int) -> Tensor:
    """[steps] the factor of the learning rate in each, by Cosmos's scheduler. train: the section of its config."""
    optimizer = schedules.dummy()

    class Optimizers(list[Any]):
        model_parts = (None,)
        optimizers = ((optimizer,),)

    made = theirs("cosmos", SCHEDULERS)(Optimizers([optimizer]), SimpleNamespace(train=train), steps)
    return schedules.of_scheduler(next(iter(made)), optimizer, steps)


# ---------------------------------------------------------------- a file


@cache
def known() -> Json:
    """All keys of Cosmos's config for RL."""
    tree: dict[str, Any] = theirs("cosmos", CONFIG)().model_dump(mode="json")
    tree["train"]["train_policy"] = section({}).model_dump(mode="json")
    return tree


def configured(tree: Mapping[str, Json]) -> Any:
    """Cosmos's config of a file."""
    return theirs("cosmos", CONFIG).model_validate(copy.deepcopy(dict(tree)))


def checks(config: Any, file: File) -> Iterator[Check]:
    """The rows of a file."""
    made, train, plan = config.train.train_policy, config.train, file.plan
    group = min(plan.group_size, 8)
    each = train.train_batch_per_replica * config.policy.parallelism.n_init_replicas
    # Several of its steps, where each is over a part of a group, are one here.
    together = max(plan.tasks_per_step * plan.group_size // each, 1)
    batches = [case(kind, 0, sizes=[group] * 4) for kind in ("one turn", "far apart")]
    yield Check(
        what="batches",
        called=CONFIG,
        theirs=lambda _: (
            scalars(
                rollouts_of_a_step=each,
                rollouts_of_a_task=config.rollout.n_generation,
                passes=made.mu_iterations,
            )
            | micro_batch(made.mini_batch, None)
        ),
        ours=lambda _: (
            scalars(
                rollouts_of_a_step=plan.tasks_per_step * plan.group_size / together,
                rollouts_of_a_task=plan.group_size,
                passes=plan.passes,
            )
            | our_micro_batch(plan)
        ),
    )
    yield Check(
        what="training steps",
        called=f"{STATUS}.recompute_total_steps",
        theirs=lambda _: of_rows(partial(steps, config), plan),
        ours=lambda _: of_rows(lambda rows: file.steps(rows) * together, plan),
    )
    yield from of_rates(
        file,
        theirs=lambda rows: rates(train, steps(config, rows)),
        ours=lambda rows: (
            schedules.of_updates(plan, file.steps(rows))[:: plan.minibatches * plan.passes // together]
            / _peak(train)
        ),
        called=SCHEDULERS,
        short_keys=("train.optm_warmup_steps",),
    )
    yield settings.optimizer(file, theirs=lambda: optimizer(config), called=OPTIMIZERS)
    yield from _of_sampling(config, file)
    if config.distillation.enable:
        yield _of_teacher(config, file, batches)
    else:
        yield Check(
            what="advantage, grpo",
            called=ADVANTAGE,
            theirs=lambda each: advantage(theirs("cosmos", ADVANTAGE), each, made),
            ours=lambda each: numbers.advantage(numbers.built(file.config, each), each, kl=False),
            cases=batches,
            tolerance=FLOAT32,
        )
    yield Check(
        what="KL in the loss",
        called=GRPO,
        theirs=lambda each: _kl(made, each),
        ours=lambda each: numbers.kl_in_loss(file.config, each),
        cases=batches,
        tolerance=FLOAT32,
    )
    yield Check(
        what=f"loss and gradient, {made.variant}, without the KL",
        called=GRPO,
        theirs=lambda each: loss(theirs("cosmos", GRPO), each, made.model_copy(update={"kl_beta": 0.0})),
        ours=lambda each: numbers.bare_loss(file.config, each),
        cases=reachable(batches, file),
        tolerance=FLOAT32,
    )


def _of_teacher(config: Any, file: File, batches: list[Case]) -> Check:
    """The advantage that a teacher gives, in the first update of a step. Cosmos sets the rewards to 0 then."""
    return Check(
        what="advantage, distillation",
        called=TEACHER,
        refused="with top_k it is computed from the logits of both models"
        if config.distillation.top_k > 0
        else "",
        theirs=lambda each: taught(config, each),
        ours=lambda each: numbers.advantage(numbers.built(file.config, each), each, kl=False),
        cases=batches,
        tolerance=FLOAT32,
    )


def taught(config: Any, case: Case) -> Numbers:
    """By the trainer's own method, over the packed log-probs of the sampled tokens."""
    at, trainer = case.batch.mask_N, theirs("cosmos", TRAINER)
    own = SimpleNamespace(config=config, device="cpu")
    own.post_process_teacher_kl_advantages = partial(trainer.post_process_teacher_kl_advantages, own)
    lengths = torch.bincount(case.batch.rollout_N[at], minlength=case.batch.rollouts)
    adv, *_ = trainer.compute_teacher_kl_advantages(
        own,
        need(case.batch.logp_old_N, "a field of the case")[at],
        case.padded(case.batch.logp_ref_N),
        torch.zeros_like(case.mask),
        case.mask.bool(),
        torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
    )
    return {"advantage": torch.zeros_like(case.mask).masked_scatter(case.mask.bool(), adv)}


def optimizer(config: Any) -> Numbers:
    """The optimizer that Cosmos builds. Its fused step is for a GPU's parameters; a norm of 0 or less is no limit."""
    plain = config.model_copy(update={"train": config.train.model_copy(update={"optm_impl": "for-loop"})})
    made = theirs("cosmos", OPTIMIZERS)([torch.nn.Linear(2, 2)], plain)
    return settings.of_optimizer(made, max(config.train.optm_grad_norm_clip, 0.0))


def _of_sampling(config: Any, file: File) -> Iterator[Check]:
    """How replies are sampled. What an evaluation leaves open is as in training (`vLLMRollout` of
    rollout/vllm_rollout/vllm_rollout.py, which cannot be built without vLLM)."""
    sampled, held_out, rollout = config.rollout.sampling_config, config.validation, config.rollout

    def drawn(tokens: int, replies: int, **given: float | None) -> Numbers:
        names = ("temperature", "top_p", "top_k")
        taken = {
            name: given[name] if given.get(name) is not None else getattr(sampled, name) for name in names
        }
        return settings.drawn(**taken, tokens=tokens, replies=replies)  # type: ignore[arg-type]

    yield settings.sampling(
        file,
        theirs=lambda: drawn(rollout.max_response_length, rollout.n_generation),
        called=CONFIG,
        prompt=None,
    )
    if file.plan.evaluates:
        yield settings.evaluation(
            file,
            theirs=lambda: drawn(
                held_out.max_response_length or rollout.max_response_length,
                held_out.n_generation,
                temperature=held_out.temperature,
                top_p=held_out.top_p,
                top_k=held_out.top_k,
            ),
            called=CONFIG,
        )


def _kl(made: Any, each: Case) -> Numbers:
    function, bare = theirs("cosmos", GRPO), made.model_copy(update={"kl_beta": 0.0})
    return numbers.apart(loss(function, each, made), loss(function, each, bare))


def _peak(train: Any) -> float:
    lr = train.optm_lr
    return float(lr[0] if isinstance(lr, list) else lr)


def steps(config: Any, rows: int) -> int:
    """The steps that Cosmos's controller counts, given the samples of so many rows."""
    manager = SimpleNamespace(
        job_phase=None,
        training_finished=lambda: False,
        get_all_atoms_arrived_replicas=lambda: [None] * config.policy.parallelism.n_init_replicas,
        current_step=0,
        config=config,
    )
    samples = rows * config.rollout.n_generation * config.train.epoch
    theirs("cosmos", STATUS).recompute_total_steps(manager, samples)
    return int(manager.total_steps)

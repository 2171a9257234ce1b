"""How verl's own functions are called, and what `--prove` compares of one of its files."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from whet.prove import numbers, schedules, verl_async
from whet.prove import settings as settings_of
from whet.prove import verl_distillation as distillation
from whet.prove import verl_engines as engines
from whet.prove.cases import Case, case
from whet.prove.checks import (
    DRAWN,
    Check,
    File,
    NotComparable,
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

CORE = "verl.trainer.ppo.core_algos"
HELPER = "verl.trainer.ppo.rollout_corr_helper"
TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
LOOP = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker.generate_sequences"
ACTOR = "actor_rollout_ref.actor."
FLOAT32 = 2e-6
"""Tolerance where verl computes in float32, or adds 1e-6 to a denominator."""
EPS = 1e-7
"""Tolerance where verl adds 1e-8 to a denominator."""


SET_BY_TRAINER = (
    *("strategy", "rollout_n", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
    *("global_batch_info", "_target_", "ppo_mini_batch_size"),
)
"""Of the actor's section: sizes, which the trainer splits a batch by; the formulas read the counts of the batch."""


def section(keys: Mapping[str, Json], prefix: str) -> dict[str, Any]:
    """The keys below a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}


def advantage(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """As `compute_advantage` of ray_trainer.py calls the estimators; each takes what it names of it."""
    algorithm = section(keys, "algorithm.")
    config = SimpleNamespace(gamma=algorithm.get("gamma", 1.0), **algorithm_of_gdpo(algorithm))
    config.get = lambda name, default=None: getattr(config, name, default)
    offered: dict[str, Any] = {
        "token_level_rewards": case.reward,
        "response_mask": case.mask,
        "index": case.index,
        "norm_adv_by_std_in_grpo": algorithm.get("norm_adv_by_std_in_grpo", True),
        "config": config,
        "values": case.padded(case.batch.value_N),
        "gamma": algorithm.get("gamma", 1.0),
        "lam": algorithm.get("lam", 1.0),
        "reward_baselines": case.batch.baseline_R,
        "old_log_probs": case.padded(case.batch.logp_old_N),
        "sum_pi_squared": case.padded(case.batch.collision_N),
    }
    taken = function.__code__.co_varnames[: function.__code__.co_argcount]
    adv, returns = function(**{name: value for name, value in offered.items() if name in taken})
    out = {"advantage": adv}
    if "values" in taken:
        out["return"] = returns
    return out


def algorithm_of_gdpo(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in algorithm.items() if name.startswith("gdpo")}


def gdpo(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """With the parts of the reward in the batch, as compute_score returned them."""
    config = SimpleNamespace(**section(keys, "algorithm."))
    config.get = lambda name, default=None: getattr(config, name, default)
    assert case.batch.part_RC is not None
    parts = case.batch.part_RC.numpy()
    named = {name: parts[:, n] for n, name in enumerate(config.gdpo_reward_keys)}
    batch = {"prompts": torch.zeros(case.batch.rollouts, 1), "attention_mask": _attention(case)}
    adv, _ = function(case.reward, case.mask, case.index, config=config, non_tensor_batch=named, batch=batch)
    return {"advantage": adv}


def _attention(case: Case) -> Tensor:
    return torch.cat([torch.ones(case.batch.rollouts, 1), case.exists], -1).long()


def actor(keys: Mapping[str, Json], case: Case) -> Any:
    """verl's config of the actor, with the counts of the minibatch that its trainer fills in."""
    mine = section(keys, ACTOR)
    policy = section(mine, "policy_loss.")
    correction = section(keys, "algorithm.rollout_correction.")
    plain = {name: value for name, value in mine.items() if not name.startswith("policy_loss.")}
    nested = theirs("verl", "verl.workers.config:PolicyLossConfig")(**policy)
    if correction:
        object.__setattr__(nested, "rollout_correction", correction)
    made = theirs("verl", "verl.workers.config:ActorConfig")(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=nested, **plain
    )
    made.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=case.mask.sum(),
        global_batch_size=case.batch.rollouts,
        loss_scale_factor=made.loss_scale_factor,
    )
    return made


def loss(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The policy loss with rollout correction, KL and aggregation, as `ppo_loss` of workers/utils/losses.py puts them
    together."""
    config = actor(keys, case)
    mask, weight = case.mask, None
    old = case.padded(case.batch.logp_old_N)
    sampled = case.padded(case.batch.logp_sample_N)
    bypass = keys.get("algorithm.rollout_correction.bypass_mode")
    if bypass:
        old = sampled
    correction = section(keys, "algorithm.rollout_correction.")
    if _corrects(correction) and not bypass:
        unify = theirs("verl", f"{HELPER}:compute_rollout_correction_and_rejection_mask")
        taken = inspect.signature(unify).parameters
        weights, mask, _ = unify(
            old, sampled, case.mask, **{name: value for name, value in correction.items() if name in taken}
        )
        weight = None if weights is None else weights.batch["rollout_is_weights"]
        config.global_batch_info["batch_num_tokens"] = mask.sum()
    logp = case.padded(case.logp_N).requires_grad_()
    mode = config.loss_agg_mode
    torch.manual_seed(0)
    total, _ = function(old, logp, case.padded(case.batch.adv_N), mask, mode, config, weight)
    if config.use_kl_loss:
        penalty, agg_loss = (theirs("verl", f"{CORE}:{name}") for name in ("kl_penalty", "agg_loss"))
        kl = penalty(logp, case.padded(case.batch.logp_ref_N), config.kl_loss_type)
        total = total + config.kl_loss_coef * agg_loss(kl, mask, mode, **config.global_batch_info)
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def _corrects(correction: Mapping[str, Any]) -> bool:
    return any(correction.get(name) is not None for name in ("rollout_is", "rollout_rs"))


def value_loss(function: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    values = case.padded(case.value_N).requires_grad_()
    total, _ = function(
        values,
        case.padded(case.batch.return_N),
        case.padded(case.batch.value_N),
        case.mask,
        keys["critic.cliprange_value"],
        keys["critic.loss_agg_mode"],
        batch_num_tokens=case.mask.sum(),
        global_batch_size=case.batch.rollouts,
    )
    total.backward()
    return {"loss": total.detach(), "grad": values.grad}


# ---------------------------------------------------------------- a file


DEFAULTS = {
    "fsdp": "_generated_ppo_trainer.yaml",
    "megatron": "_generated_ppo_megatron_trainer.yaml",
    "veomni": "_generated_ppo_veomni_trainer.yaml",
}
"""verl's files of all its keys with their defaults, by the kind of engine."""

READ_IF_GIVEN: Json = {
    "defaults": None,
    "model_engine": None,
    "algorithm": {"gdpo_reward_keys": None},
}
"""Keys that verl's code reads where a file has them, and its defaults have not; a list of Hydra's, and its choice of
an engine."""

FREE = ("override_transformer_config", "turbo_config", "teacher_models")
"""Names of sections with the options of another program, or with names of a user."""


@cache
def known() -> Json:
    """verl's own default files, which have all its keys."""
    found: Any = READ_IF_GIVEN
    for name in DEFAULTS.values():
        found = joined(found, OmegaConf.to_container(_defaults(name), resolve=False))
    found = joined(found, OmegaConf.to_container(verl_async.defaults(megatron=False), resolve=False))
    return freed(found)  # type: ignore[no-any-return]


def freed(tree: Any) -> Any:
    """The tree with free sections empty, which then hold any key."""
    if not isinstance(tree, dict):
        return tree
    return {key: {} if key in FREE else freed(value) for key, value in tree.items()}


def joined(one: Any, other: Any) -> Any:
    """The keys of both trees; the values of the second."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return {
        key: joined(one[key], other[key]) if key in one and key in other else one.get(key, other.get(key))
        for key in {**one, **other}
    }


def _defaults(name: str) -> DictConfig:
    folder = Path(theirs("verl", "verl.trainer:__file__")).parent / "config"
    return OmegaConf.load(folder / name)  # type: ignore[return-value]


def configured(tree: Mapping[str, Json]) -> DictConfig:
    """verl's defaults with the file over them, as its entry point composes them."""
    strategy = OmegaConf.select(OmegaConf.create(dict(tree)), "actor_rollout_ref.actor.strategy")
    named = "ppo_megatron_trainer" in map(str, tree.get("defaults") or ())
    asked = "megatron" if named else tree.get("model_engine") or strategy
    base: Any = _defaults(DEFAULTS.get(str(asked), DEFAULTS["fsdp"]))
    if verl_async.is_its(tree):
        base = OmegaConf.merge(base, verl_async.defaults(megatron=asked == "megatron"))
    given = {key: value for key, value in tree.items() if key not in ("defaults", "model_engine")}
    return OmegaConf.merge(base, given)  # type: ignore[return-value]


def settings(config: DictConfig) -> dict[str, Json]:
    """What the formulas read, by dotted key, references resolved."""
    out: dict[str, Json] = {}
    for name in config.algorithm:
        value = config.algorithm[name]
        if name in ("rollout_correction", "kl_ctrl") and value is not None:
            out |= {f"algorithm.{name}.{key}": value[key] for key in value}
        elif not OmegaConf.is_config(value) or OmegaConf.is_list(value):
            out[f"algorithm.{name}"] = list(value) if OmegaConf.is_list(value) else value
    actor_of = {field.name for field in fields(theirs("verl", "verl.workers.config:ActorConfig"))}
    policy_of = {field.name for field in fields(theirs("verl", "verl.workers.config:PolicyLossConfig"))}
    section_of = config.actor_rollout_ref.actor
    for name in section_of:
        if name in actor_of and name not in SET_BY_TRAINER and not OmegaConf.is_config(section_of[name]):
            out[ACTOR + name] = section_of[name]
    for name in section_of.policy_loss:
        value = section_of.policy_loss[name]
        if name in policy_of and not OmegaConf.is_config(value):
            out[f"{ACTOR}policy_loss.{name}"] = value
    return out


def checks(config: DictConfig, file: File) -> Iterator[Check]:
    """The rows of a file for PPO."""
    yield from _of_run(config, file)
    yield from _of_formulas(config, settings(config), file)


def _of_run(config: DictConfig, file: File) -> Iterator[Check]:
    """Sizes, steps, learning rates, optimizer, sampling."""
    of = config.actor_rollout_ref.actor
    engine = engines.engine(of.strategy)
    yield Check(
        what="batches",
        called=f"{TRAINER}._update_actor",
        theirs=lambda _: update_of(config) | _micro(config.actor_rollout_ref.actor),
        ours=lambda _: our_batches(file.plan),
    )
    asynchronous = verl_async.is_its(config)
    if asynchronous:
        yield Check(
            what="weight syncs",
            called=verl_async.COUNTS,
            theirs=lambda _: verl_async.ahead(config),
            ours=lambda _: verl_async.our_ahead(file.plan),
        )
    yield Check(
        what="training steps",
        called=verl_async.COUNTS if asynchronous else f"{TRAINER}._create_dataloader",
        theirs=lambda _: of_rows(partial(steps, config), file.plan),
        ours=lambda _: of_rows(file.steps, file.plan),
    )
    yield from of_rates(
        file,
        theirs=partial(rates, config),
        ours=partial(_our_rates, config, file),
        called=engine.scheduler,
        keys=("trainer.critic_warmup",),
    )
    yield settings_of.optimizer(
        file,
        theirs=lambda: engines.optimizer(of.optim, of.strategy),
        called=engine.optimizer,
        keys=(f"{ACTOR}optim.betas",),
    )
    yield settings_of.sampling(
        file, theirs=lambda: drawn(config, validate=False), called=LOOP, prompt=config.data.max_prompt_length
    )
    if file.plan.evaluates:
        yield settings_of.evaluation(file, theirs=lambda: drawn(config, validate=True), called=LOOP)


def _of_formulas(config: DictConfig, keys: dict[str, Json], file: File) -> Iterator[Check]:
    """Advantages, KL and losses on random batches."""
    group = min(file.plan.group_size, 8)
    parts = len(keys.get("algorithm.gdpo_reward_keys") or (1, 1))  # type: ignore[arg-type]
    batches = [case(kind, 0, sizes=[group] * 4, parts=parts) for kind in ("one turn", "far apart")]
    estimator, mode = str(keys["algorithm.adv_estimator"]), str(keys[f"{ACTOR}policy_loss.loss_mode"])
    if distillation.enabled(config):
        yield from distillation.checks(config, file, lambda each: actor(keys, each), batches)
        return
    estimate = theirs("verl", f"{CORE}:get_adv_estimator_fn")(estimator)
    if keys.get("algorithm.rollout_correction.bypass_mode"):
        mode = "bypass_mode"
    lose = theirs("verl", f"{CORE}:get_policy_loss_fn")(mode)
    yield Check(
        what=f"advantage, {estimator}",
        called=f"{CORE}:{estimate.__name__}",
        theirs=lambda each: (gdpo if estimator == "gdpo" else advantage)(estimate, each, keys),
        ours=lambda each: numbers.advantage(numbers.built(file.config, each), each, kl=False),
        cases=batches,
        tolerance=FLOAT32,
    )
    yield from _of_kl(config, keys, file, batches)
    yield Check(
        what=f"loss and gradient, {mode}, without the KL",
        called=f"{CORE}:{lose.__name__}",
        refused=DRAWN if mode == "clip_cov" else "",
        theirs=lambda each: loss(lose, each, {**keys, f"{ACTOR}use_kl_loss": False}),
        ours=lambda each: numbers.bare_loss(file.config, each),
        cases=reachable(batches, file),
        keys=("algorithm.rollout_correction.rollout_rs",),
        tolerance=EPS,
    )
    if numbers.built(file.config, batches[0]).needs_critic:
        critic = {f"critic.{name}": config.critic[name] for name in ("cliprange_value", "loss_agg_mode")}
        yield Check(
            what="critic's loss and gradient",
            called=f"{CORE}:compute_value_loss",
            theirs=lambda each: value_loss(theirs("verl", f"{CORE}:compute_value_loss"), each, critic),
            ours=lambda each: numbers.value_loss(numbers.built(file.config, each), each),
            cases=batches,
            tolerance=EPS,
        )


def _of_kl(
    config: DictConfig, keys: Mapping[str, Json], file: File, batches: Sequence[Case]
) -> Iterator[Check]:
    """Where the KL enters, by how much, and its value."""
    section_of = file.config.algorithm
    in_reward = bool(config.algorithm.use_kl_in_reward)

    def in_loss(each: Case) -> Numbers:
        none = {**keys, f"{ACTOR}use_kl_loss": False}
        zero = theirs("verl", f"{CORE}:compute_policy_loss_vanilla")
        vanilla = {f"{ACTOR}policy_loss.loss_mode": "vanilla"}
        return numbers.apart(loss(zero, each, {**keys, **vanilla}), loss(zero, each, {**none, **vanilla}))

    def taken(each: Case) -> Numbers:
        penalty = theirs("verl", f"{CORE}:kl_penalty")
        old, ref = (each.padded(x) for x in (each.batch.logp_old_N, each.batch.logp_ref_N) if x is not None)
        coef = config.algorithm.kl_ctrl.kl_coef if in_reward else 0.0
        return {"taken": coef * penalty(old, ref, config.algorithm.kl_penalty) * each.mask}

    yield Check(
        what=f"KL in the loss, {config.actor_rollout_ref.actor.kl_loss_type}",
        called=f"{CORE}:kl_penalty",
        theirs=in_loss,
        ours=lambda each: numbers.kl_in_loss(file.config, each),
        cases=batches,
        keys=(f"{ACTOR}policy_loss.loss_mode",),
        tolerance=EPS,
    )
    yield Check(
        what="KL in the reward",
        called=f"{CORE}:kl_penalty",
        theirs=taken,
        ours=lambda each: numbers.reward_kl(file.config, each),
        cases=batches,
        tolerance=EPS,
    )
    yield Check(
        what="entropy in the loss",
        called="",
        theirs=lambda _: scalars(coefficient=config.actor_rollout_ref.actor.entropy_coeff),
        ours=lambda _: scalars(coefficient=section_of.entropy_coef),
    )


def _micro(section_of: Any) -> Numbers:
    """With tokens, that of all ranks that share a sequence (`prepare_micro_batches` multiplies by `sp_size`)."""
    if section_of.use_dynamic_bsz:
        return micro_batch(None, section_of.ppo_max_token_len_per_gpu * _sharing(section_of))
    return micro_batch(section_of.ppo_micro_batch_size_per_gpu, None)


def _sharing(section_of: Any) -> int:
    """Devices that share a sequence. FSDP has a former key, which counts where it is above 1."""
    if section_of.strategy == "megatron":
        return int(section_of.megatron.context_parallel_size)
    if section_of.strategy == "veomni":
        return int(section_of.veomni.ulysses_parallel_size)
    former = section_of.ulysses_sequence_parallel_size
    return int(former if former > 1 else section_of.fsdp_config.ulysses_sequence_parallel_size)


class _Seen(Exception):
    """What verl's trainer gives its workers for one update."""


def update_of(config: DictConfig) -> Numbers:
    """The sizes that `_update_actor` sends with a step's batch."""
    given: dict[str, Any] = {}
    tools = theirs("verl", "verl.trainer.ppo.ray_trainer:tu")
    trainer = theirs("verl", TRAINER)
    data = theirs("verl", "verl:DataProto")
    ones = torch.ones(2, 4, dtype=torch.long)
    batch = data.from_single_dict(
        {
            "input_ids": ones,
            "attention_mask": ones.clone(),
            "position_ids": ones.cumsum(-1) - 1,
            "responses": ones[:, 2:].clone(),
            "prompts": ones[:, :2].clone(),
            "response_mask": ones[:, 2:].clone(),
        }
    )

    def update_actor(sent: Any) -> Any:
        given.update({name: tools.get(sent, name) for name in ("mini_batch_size", "epochs")})
        raise _Seen

    worker = SimpleNamespace(update_actor=update_actor)
    try:
        trainer._update_actor(
            SimpleNamespace(
                config=config,
                actor_rollout_wg=worker,
                use_prefix_grouper=False,
                distillation_config=SimpleNamespace(distillation_loss=distillation.section(config)),
            ),
            batch,
        )
    except _Seen:
        return scalars(
            tasks=verl_async.tasks(config) if verl_async.is_its(config) else config.data.train_batch_size,
            rollouts_of_a_mini_batch=given["mini_batch_size"],
            passes=given["epochs"],
        )
    raise NotComparable("verl's trainer did not call its workers")


def steps(config: DictConfig, rows: int) -> int:
    """The training steps of verl's trainer for a file of so many rows: its epochs, or trainer.total_training_steps
    where these are fewer."""
    if verl_async.is_its(config):
        return verl_async.steps(config, rows)
    own = _loaded(config, rows)
    return min(int(own.total_training_steps), len(own.train_dataloader) * config.trainer.total_epochs)


def _loaded(config: DictConfig, rows: int) -> Any:
    """What verl's trainer makes of its data."""
    trainer, own = theirs("verl", TRAINER), SimpleNamespace(config=OmegaConf.create(config))
    trainer._create_dataloader(
        own, range(rows), range(1), list, torch.utils.data.SequentialSampler(range(rows))
    )
    return own


def rates(config: DictConfig, rows: int) -> Tensor:
    """The learning rate of each step, by the scheduler of verl's engine; the engines of the fully asynchronous trainer
    start before it has counted its steps."""
    of = config.actor_rollout_ref.actor
    if verl_async.is_its(config):
        total = int(of.optim.total_training_steps)
    else:
        total = int(_loaded(config, rows).total_training_steps)
    return engines.rates(of.optim, of.strategy, total, steps(config, rows))


def drawn(config: DictConfig, *, validate: bool) -> Numbers:
    """What verl's agent loop asks its servers for, for a batch of one row, and the replies of a task."""
    rollout, seen = config.actor_rollout_ref.rollout, []
    data = theirs("verl", "verl:DataProto")
    batch = data.from_single_dict({"prompts": torch.zeros(1, 1)}, meta_info={"validate": validate})

    async def run(params: dict[str, Any], *rest: Any, **more: Any) -> None:
        seen.append(params)

    own = SimpleNamespace(rollout_config=rollout, _run_agent_loop=run, _postprocess=lambda *a, **more: None)
    asyncio.run(inspect.unwrap(theirs("verl", LOOP))(own, batch))
    return settings_of.drawn(
        **{name: seen[0][name] for name in ("temperature", "top_p", "top_k")},
        replies=rollout.val_kwargs.n if validate else rollout.n,
        tokens=rollout.response_length,
    )


def _our_rates(config: DictConfig, file: File, rows: int) -> Tensor:
    plan = file.plan
    each = schedules.of_updates(plan, file.steps(rows)).view(-1, plan.minibatches * plan.passes)
    if not torch.equal(each, each[:, :1].expand_as(each)):
        raise NotComparable("whet's learning rate changes within a training step, verl's does not")
    return each[:, 0] / float(config.actor_rollout_ref.actor.optim.lr)

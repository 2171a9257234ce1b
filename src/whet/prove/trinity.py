"""How Trinity-RFT's own functions are called, and what `--prove` compares of one of its files."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from whet.config.recipes import kind_of
from whet.prove import given, numbers, schedules, settings
from whet.prove import verl_engines as engines
from whet.prove.cases import Case, case, cases, in_pair_order
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

CONFIG = "trinity.common.config:Config"
VALIDATORS = "trinity.common.config_validator"
OPTIMIZER = "trinity.trainer.verl.config:_build_optimizer_config"
READER = "trinity.buffer.reader.file_reader:_HFBatchReader"
ALGORITHM = "trinity.algorithm"
FORMULAS = ("advantage_fn_args", "policy_loss_fn_args", "kl_loss_fn", "kl_loss_fn_args", "loss_agg_mode")
"""Of the section of the algorithm, what the formulas read."""
READS_ENTROPY = ("clipb", "clipv")
"""Advantages that read the model's entropy at each token."""
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
STAGES = ("stages",)
"""The key that tells how a stage inherits: its settings differ by that, its formulas do not."""
FLOAT32 = 2e-6
"""Tolerance where Trinity computes in float32."""
EPS = 1e-7
"""Tolerance where Trinity adds 1e-8 to a denominator."""


def arguments(made: Any, keys: Mapping[str, Json], section: str) -> dict[str, Any]:
    """What Trinity calls a function with: its default_args(), or the file's arguments alone, so that for others its
    constructor's defaults count. Where this has none (the clip range of ppo), Trinity does not start: then the former.
    """
    given, told = dict(keys.get(f"algorithm.{section}_args") or {}), made.default_args()
    own = {name: each.default for name, each in inspect.signature(made).parameters.items() if given}
    return (
        told
        | {name: own[name] for name in told if own.get(name) not in (None, inspect.Parameter.empty)}
        | given
    )


def in_trainer(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """Of an advantage that the trainer computes from its padded batch."""
    batch = {
        "token_level_rewards": case.reward,
        "response_mask": case.mask,
        "values": case.padded(case.batch.value_N),
        "reward_baselines": case.batch.baseline_R,
        "old_log_probs": case.padded(case.batch.logp_old_N),
        "teacher_logprobs": case.padded(case.batch.logp_ref_N),
    }
    exps = SimpleNamespace(batch=batch, non_tensor_batch={"uid": case.index})
    made(**arguments(made, keys, "advantage_fn"))(exps)
    out = {"advantage": exps.batch["advantages"]}
    return out | ({"return": exps.batch["returns"]} if made.__name__ == "PPOAdvantageFn" else {})


def experiences(case: Case) -> list[Any]:
    """One for each rollout."""
    experience, eid = (
        theirs("trinity", f"trinity.common.experience:{name}") for name in ("Experience", "EID")
    )
    sampled, mask, exists = case.padded(case.batch.logp_sample_N), case.mask, case.exists
    return [
        experience(
            eid=eid(batch=0, task=int(group), run=row, step=0),
            tokens=torch.zeros(1 + int(exists[row].sum()), dtype=torch.int32),
            prompt_length=1,
            reward=float(case.batch.reward_R[row]),
            action_mask=mask[row, : int(exists[row].sum())].bool(),
            logprobs=sampled[row, : int(exists[row].sum())],
        )
        for row, group in enumerate(case.batch.group_R.tolist())
    ]


def by_group(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """Of an advantage that an operator computes from a list of experiences."""
    all_of = experiences(case)
    made(**arguments(made, keys, "advantage_fn"))(list(all_of))
    out = torch.zeros(case.batch.rollouts, case.width, dtype=torch.float64)
    for row, exp in enumerate(all_of):
        if exp.advantages is not None:  # a group that is left out has none
            out[row, : len(exp.advantages)] = exp.advantages
    return {"advantage": out}


def loss(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The policy loss as the class computes it, plus the KL in the loss. The engine's log-probs are the ratio's
    denominator, as `rollout_correction` has it by default (bypass_mode: True)."""
    expert_R = case.batch.expert_R
    function = made(
        **arguments(made, keys, "policy_loss_fn") | ({} if expert_R is None else _shares(expert_R))
    )
    logp = case.padded(case.logp_N).requires_grad_()
    tensors: dict[str, Tensor] = {
        "old_logprob": case.padded(case.batch.logp_sample_N),
        "action_mask": case.mask,
        "advantages": case.padded(case.batch.adv_N if case.batch.adv_N is not None else case.logp_N),
    }
    if expert_R is not None:
        tensors |= {"expert_mask": expert_R, "step": torch.ones(len(expert_R))}
    total, _ = function(logp, **tensors)
    if keys.get("algorithm.kl_loss_fn", "none") != "none":
        kinds = {
            "k1": "K1Fn",
            "k2": "K2Fn",
            "k3": "K3Fn",
            "low_var_kl": "LowVarKLFn",
            "abs": "AbsFn",
            "corrected_k3": "CorrectedK3Fn",
        }
        kl = theirs("trinity", f"trinity.algorithm.kl_fn.kl_fn:{kinds[str(keys['algorithm.kl_loss_fn'])]}")(
            **dict(keys["algorithm.kl_loss_fn_args"])
        )
        mode = getattr(function, "loss_agg_mode", None) or keys.get("algorithm.loss_agg_mode") or "token-mean"
        ref, old = case.padded(case.batch.logp_ref_N), tensors["old_logprob"]
        total = total + kl.calculate_kl_loss(logp, ref, case.mask, mode, old)[0]
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


def _shares(expert_R: Tensor) -> dict[str, Any]:
    """The sizes of a batch, which a mix's loss divides by, for one whole batch on one device."""
    given = int(expert_R.sum())
    return {
        "use_dynamic_bsz": True,
        "ppo_mini_batch_size": len(expert_R),
        "ngpus_trainer": 1,
        "train_batch_size_usual": len(expert_R) - given,
        "train_batch_size_expert": given,
    }


def _with_experts(case: Case) -> Case:
    """The replies of the last group are given, not sampled."""
    expert_R = case.batch.group_R == case.batch.group_R.max()
    return replace(case, batch=replace(case.batch, expert_R=expert_R))


def pair_loss(made: Any, case: Case, keys: Mapping[str, Json]) -> Numbers:
    """The loss of pairs. Trinity gets chosen and rejected replies in turn."""
    function = made(**arguments(made, keys, "policy_loss_fn"))
    logp = case.padded(case.logp_N).requires_grad_()
    pairs = case.batch.rollouts // 2

    def in_turn(x: Tensor) -> Tensor:
        ordered = in_pair_order(case, x)
        return torch.stack([ordered[:pairs], ordered[pairs:]], 1).flatten(0, 1)

    total, _ = function(
        in_turn(logp), ref_logprob=in_turn(case.padded(case.batch.logp_ref_N)), action_mask=in_turn(case.mask)
    )
    total.backward()
    return {"loss": total.detach(), "grad": logp.grad}


# ---------------------------------------------------------------- a file


@cache
def known() -> Json:
    """All keys of Trinity's config."""
    return dataclasses.asdict(theirs("trinity", CONFIG)())


def configured(tree: Mapping[str, Json]) -> Any:
    """Trinity's config of a file, as `load_config` makes it."""
    made = OmegaConf.merge(OmegaConf.structured(theirs("trinity", CONFIG)), dict(tree))
    return OmegaConf.to_object(made)


def stages(config: Any) -> list[Any]:
    """The config of each stage, as Trinity's launcher goes through them, with what two of its validators fill in."""
    found = list(config) if config.stages else [config]
    for stage in found:
        with tempfile.TemporaryDirectory() as place:
            stage.checkpoint_job_dir = place
            for name in ("AlgorithmConfigValidator", "BufferConfigValidator"):
                theirs("trinity", f"{VALIDATORS}:{name}")().validate(stage)
    return found


def checks(config: Any, file: File) -> Iterator[Check]:
    """The rows of a stage. Where given replies are learned there is a loss alone."""
    kind = theirs("trinity", f"{ALGORITHM}:ALGORITHM_TYPE").get(config.algorithm.algorithm_type)
    yield from _of_run(config, file, replies=2 if kind.schema == "dpo" else 1)
    yield from {"sft": _of_replies, "dpo": _of_pairs}.get(kind.schema, _of_formulas)(config, file)


def _of_replies(config: Any, file: File) -> Iterator[Check]:
    lose = theirs("trinity", f"{ALGORITHM}:POLICY_LOSS_FN").get(config.algorithm.policy_loss_fn)
    keys = {"algorithm.policy_loss_fn_args": config.algorithm.policy_loss_fn_args}
    yield given.of_loss(
        file,
        config.algorithm.policy_loss_fn,
        theirs=lambda each: loss(lose, each, keys),
        called=f"{lose.__module__}:{lose.__name__}",
        tolerance=EPS,
    )


def _of_pairs(config: Any, file: File) -> Iterator[Check]:
    """On batches of one pair: of several, Trinity sums the log-ratios before the logarithm, whet those of each pair."""
    chosen = config.algorithm
    lose = theirs("trinity", f"{ALGORITHM}:POLICY_LOSS_FN").get(chosen.policy_loss_fn)
    keys = {"algorithm.policy_loss_fn_args": chosen.policy_loss_fn_args}
    yield Check(
        what=f"loss and gradient of one pair, {chosen.policy_loss_fn}, without the KL",
        called=f"{lose.__module__}:{lose.__name__}",
        theirs=lambda each: pair_loss(lose, each, keys),
        ours=lambda each: numbers.bare_loss(file.config, each),
        cases=list(cases(("one pair",))),
    )


def _of_run(config: Any, file: File, *, replies: int) -> Iterator[Check]:
    """Sizes, steps, learning rates. replies: of an experience of Trinity, which may be a pair."""
    chosen = config.algorithm
    yield Check(
        what="batches",
        called=f"{VALIDATORS}:BufferConfigValidator",
        theirs=lambda _: (
            scalars(
                rollouts_of_a_mini_batch=config.buffer.train_batch_size * replies,
                rollouts_of_a_task=chosen.repeat_times,
            )
            | _micro(config, replies)
        ),
        ours=lambda _: (
            scalars(
                rollouts_of_a_mini_batch=file.plan.rollouts_per_step / file.plan.minibatches,
                rollouts_of_a_task=file.plan.group_size,
            )
            | our_micro_batch(file.plan)
        ),
        keys=(*STAGES, "buffer.train_batch_size"),
    )
    yield Check(
        what="training steps",
        called=CONFIG,
        theirs=lambda _: of_rows(partial(steps, config), file.plan),
        ours=lambda _: of_rows(file.steps, file.plan),
        keys=(*STAGES, "trainer.total_steps"),
    )
    yield from of_rates(
        file,
        theirs=lambda rows: rates(config, file.steps(rows)),
        ours=lambda rows: schedules.of_steps(file.plan, file.steps(rows)) / chosen.optimizer.lr,
        called=OPTIMIZER,
        keys=STAGES,
    )
    yield from _of_settings(config, file)


def _micro(config: Any, replies: int) -> Numbers:
    """Where sizes do not follow from tokens, of experiences: a key of the trainer's own section, of each GPU."""
    if config.trainer.use_dynamic_bsz:
        return micro_batch(None, config.trainer.max_token_len_per_gpu)
    own = OmegaConf.select(OmegaConf.create(config.trainer.trainer_config or {}), MICRO)
    return micro_batch(None if own is None else own * replies, None)


def _sampled_as_old(case: Case) -> Case:
    """With bypass_mode, Trinity's old log-probs are those of the engine."""
    return replace(case, batch=replace(case.batch, logp_old_N=case.batch.logp_sample_N))


def _of_formulas(config: Any, file: File) -> Iterator[Check]:
    """Advantages, KL and losses on random batches."""
    chosen = config.algorithm
    keys = {f"algorithm.{name}": getattr(chosen, name) for name in FORMULAS}
    group = min(file.plan.group_size, 8)
    batches = [case("one turn", seed, sizes=[group] * 4) for seed in (0, 1)]
    kind = theirs("trinity", f"{ALGORITHM}:ALGORITHM_TYPE").get(chosen.algorithm_type)
    estimate = theirs("trinity", f"{ALGORITHM}:ADVANTAGE_FN").get(chosen.advantage_fn)
    lose = theirs("trinity", f"{ALGORITHM}:POLICY_LOSS_FN").get(chosen.policy_loss_fn)
    # whet's norm is the longest reply that may be, Trinity's that of the batch
    shown = ("algorithm.loss_agg_mode",) if chosen.loss_agg_mode == "seq-mean-token-sum-norm" else ()
    bypass = _bypass(config)
    learned = [each if bypass else _recomputed(each) for each in reachable(batches, file)]
    with_kl = batches
    if file.config.algorithm.mix is not None:
        learned, with_kl = ([_with_experts(each) for each in some] for some in (learned, batches))
    yield Check(
        what=f"advantage, {chosen.advantage_fn}",
        called=f"{estimate.__module__}:{estimate.__name__}",
        refused="it reads the model's entropy (a row of make test-peers does, too)"
        if chosen.advantage_fn in READS_ENTROPY
        else "",
        theirs=lambda each: (in_trainer if kind.compute_advantage_in_trainer else by_group)(
            estimate, _sampled_as_old(each) if bypass else each, keys
        ),
        ours=lambda each: numbers.advantage(numbers.built(file.config, each), each, kl=False),
        cases=batches,
        tolerance=FLOAT32,
    )
    yield Check(
        what=f"KL in the loss, {chosen.kl_loss_fn}",
        called="trinity.algorithm.kl_fn.kl_fn",
        theirs=lambda each: _kl(each, keys),
        ours=lambda each: numbers.kl_in_loss(file.config, each),
        cases=with_kl,
        keys=(*shown, "algorithm.kl_loss_fn"),
        tolerance=EPS,
    )
    yield Check(
        what="KL in the reward",
        called="",
        theirs=lambda _: scalars(
            coefficient=(chosen.kl_penalty_fn_args or {}).get("kl_coef", 0.0) if _penalises(chosen) else 0.0
        ),
        ours=lambda _: scalars(coefficient=file.config.algorithm.reward_kl.coef),
    )
    yield Check(
        what="entropy in the loss",
        called="",
        theirs=lambda _: scalars(coefficient=_entropy(chosen)),
        ours=lambda _: scalars(coefficient=file.config.algorithm.entropy_coef),
    )
    yield Check(
        what=f"loss and gradient, {chosen.policy_loss_fn}, without the KL",
        called=f"{lose.__module__}:{lose.__name__}",
        theirs=lambda each: loss(lose, each, {**keys, "algorithm.kl_loss_fn": "none"}),
        ours=lambda each: numbers.bare_loss(file.config, each),
        cases=learned,
        keys=(*(shown or _own_mean(lose, keys)), "algorithm.policy_loss_fn"),
        tolerance=EPS,
    )


def _own_mean(lose: Any, keys: Mapping[str, Json]) -> tuple[str, ...]:
    """The key whose told difference shows where the loss has another mean than the file says (the KL has that)."""
    own = getattr(lose(**arguments(lose, keys, "policy_loss_fn")), "loss_agg_mode", None)
    return ("algorithm.loss_agg_mode",) if own != keys["algorithm.loss_agg_mode"] else ()


def _bypass(config: Any) -> bool:
    """Whether the engine's log-probs are the old ones; of the two sections that may say it, the trainer's own counts
    with a verl before 0.8."""
    told = config.algorithm.rollout_correction or {}
    own = (config.trainer.trainer_config or {}).get("algorithm") or {}
    return bool({"bypass_mode": True, **(own.get("rollout_correction") or {}), **told}["bypass_mode"])


def _recomputed(case: Case) -> Case:
    """Without bypass_mode Trinity's old log-probs are those of the trainer before the step."""
    return replace(case, batch=replace(case.batch, logp_sample_N=case.batch.logp_old_N))


def _penalises(chosen: Any) -> bool:
    return chosen.kl_penalty_fn not in (None, "none")


def _entropy(chosen: Any) -> float:
    if chosen.entropy_loss_fn in (None, "none"):
        return 0.0
    return float((chosen.entropy_loss_fn_args or {}).get("entropy_coef", 0.0))


def _kl(each: Case, keys: Mapping[str, Json]) -> Numbers:
    """Beside the loss of PPO, averaged as the file's. It is of all replies, also of those that are given."""
    each = replace(each, batch=replace(each.batch, expert_R=None))
    plain = theirs("trinity", f"{ALGORITHM}:POLICY_LOSS_FN").get("ppo")
    mode = keys.get("algorithm.loss_agg_mode") or "token-mean"
    told = {**keys, "algorithm.policy_loss_fn_args": {"loss_agg_mode": mode}}
    bare = {**told, "algorithm.kl_loss_fn": "none"}
    return numbers.apart(loss(plain, each, told), loss(plain, each, bare))


def steps(config: Any, rows: int) -> int:
    """The steps that the file gives, or the batches that Trinity's reader gives of so many rows, and no more than the
    trainer's own limit."""
    buffer, limit = config.buffer, config.trainer.total_steps
    if buffer.total_steps:
        return int(buffer.total_steps)
    kind = theirs("trinity", f"{ALGORITHM}:ALGORITHM_TYPE").get(config.algorithm.algorithm_type)
    size = buffer.train_batch_size if kind.schema in ("sft", "dpo") else buffer.batch_size
    reader = theirs("trinity", READER)(
        range(rows), "rows", size, total_epochs=buffer.total_epochs, enable_progress_bar=False
    )
    batches = 0
    with contextlib.suppress(StopIteration):
        while True:
            reader.read_batch(size)
            batches += 1
    return min(batches, limit) if limit else batches


def _optim(config: Any, total: int) -> dict[str, Any]:
    """The section that Trinity gives verl's engine."""
    strategy = config.trainer.trainer_strategy
    return theirs("trinity", OPTIMIZER)(config.algorithm.optimizer, strategy, total)  # type: ignore[no-any-return]


def rates(config: Any, steps: int) -> Tensor:
    """[steps] the factor of the learning rate, by verl's scheduler with the options that Trinity gives it."""
    total = config.buffer.total_steps or steps
    return engines.rates(_optim(config, total), config.trainer.trainer_strategy, total, steps, "trinity")


def _of_settings(config: Any, file: File) -> Iterator[Check]:
    """The optimizer, and how replies are sampled, by the first training set and the first held-out one."""
    yield settings.optimizer(
        file,
        theirs=lambda: engines.optimizer(_optim(config, 1), config.trainer.trainer_strategy, "trinity"),
        called=OPTIMIZER,
        keys=(*STAGES, "algorithm.optimizer.betas"),
    )
    yield Check(
        what="temperature of the trainer",
        called="trinity.trainer.verl.trainer:VERLTrainer.train_step",
        theirs=lambda _: scalars(temperature=config.model.temperature),
        ours=lambda _: scalars(temperature=_trained_at(file)),
    )
    explorer = config.buffer.explorer_input
    for row, sets in ((settings.sampling, explorer.tasksets), (settings.evaluation, explorer.eval_tasksets)):
        if not sets or (row is settings.evaluation and not file.plan.evaluates):
            continue
        limit = {"prompt": config.model.max_prompt_tokens} if row is settings.sampling else {}
        yield row(
            file, theirs=partial(_drawn, sets[0]), called=f"{VALIDATORS}:BufferConfigValidator", **limit
        )


def _trained_at(file: File) -> float:
    """What whet's trainer divides the logits of the first source by."""
    cfg = file.config
    sampled = cfg.rollout.sampling.temperature if kind_of(cfg.algorithm) == "online" else 1.0
    return cfg.train.temperature or sampled or 1.0


def _drawn(tasks: Any) -> Numbers:
    asked = tasks.rollout_args
    return settings.drawn(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        tokens=asked.max_tokens,
        replies=tasks.repeat_times,
    )

"""The models of a stage: the policy that learns, its reference and its critic, in this process or on ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from whet import seeds
from whet.batch import Batch, at_sampled, select, tokens_of
from whet.config.checks_parallel import ranks_of
from whet.config.schema import Config, LoraConfig, ModelConfig, ReferenceConfig
from whet.context import Context
from whet.job import Models
from whet.models.load import build as build_model
from whet.models.load import examined, value_head
from whet.models.lora import attach, merged
from whet.models.mtp import MtpLoss, remove
from whet.models.trainable import choose
from whet.placement import engine_of
from whet.rollout.episode import sampling_by_source
from whet.training import chosen
from whet.training.engine import TrainEngine
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.ranks import Ranks
from whet.types import DataError, Group, Task
from whet.whole import InFiles, Make

Role = Literal["critic", "reference"]
"""Models that may have a folder of their own."""


def trained_temperature(context: Context) -> float:
    """What the trainer divides logits by: the sampling temperature; 1 where nothing was sampled (or greedily)."""
    cfg = context.cfg
    sampled = cfg.rollout.sampling.temperature if context.algorithm.kind == "online" else 1.0
    return cfg.train.temperature or sampled or 1.0


@dataclass(frozen=True)
class Temperatures:
    """What the logits of rollouts are divided by, where sources are sampled at different temperatures: the own one, so
    that sampling and training have the same distribution."""

    by_source: Mapping[str, float]
    others: float
    """Of all other sources, and of demonstrations."""

    @staticmethod
    def of(context: Context) -> Temperatures | None:
        """None where all rollouts have one temperature, as with train.temperature."""
        cfg = context.cfg
        if context.algorithm.kind != "online" or cfg.train.temperature is not None:
            return None
        others = trained_temperature(context)
        own = {name: s.temperature for name, s in sampling_by_source(cfg.rollout).items()}
        return Temperatures(own, others) if any(value != others for value in own.values()) else None

    def __call__(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """The batch, and what the reference computes, with `temperature_R`. groups: those of the batch that were
        sampled, in order."""
        own = [self.by_source.get(g.task.source, self.others) for g in groups for _ in g.rollouts]
        sampled_R = (
            torch.ones(batch.rollouts, dtype=torch.bool) if batch.expert_R is None else ~batch.expert_R
        )
        out_R = torch.full((batch.rollouts,), self.others).masked_scatter(sampled_R, torch.tensor(own))
        other = batch.reprompted
        other = None if other is None else replace(other, temperature_R=out_R)
        return replace(batch, temperature_R=out_R, reprompted=other)


def cut_of(context: Context, models: Models) -> MicroBatchPolicy:
    """How the policy's batches are split."""
    return MicroBatchPolicy.of(
        context.cfg.train,
        models.model,
        whole_groups=context.algorithm.whole_groups,
        entropy_grad=context.algorithm.entropy.is_on,
        temperature=trained_temperature(context),
        colocated=context.cfg.rollout.server.sleep,
        mtp=MtpLoss.of(context.cfg.model),
    )


def policy_of(context: Context, models: Models, ranks: Mapping[str, Ranks]) -> TrainEngine:
    """It starts from what the stage before left in the model."""
    cfg, plan = context.cfg, context.plan
    choose(models.model, cfg.train.trainable)
    return engine_of(
        models,
        cfg,
        "policy",
        models.policy,
        ranks=ranks,
        cut=cut_of(context, models),
        optimizer=cfg.train.optimizer,
        total_steps=plan.optimizer_steps,
        updates_per_step=plan.updates_per_step,
        max_skipped=cfg.train.max_skipped_steps,
        seed=seeds.key(cfg.seed, "policy", plan.name),
        rests="policy" in cfg.train.offload,
    )


def references_of(
    context: Context, models: Models, ranks: Mapping[str, Ranks], cut: MicroBatchPolicy
) -> tuple[TrainEngine, ...]:
    """Frozen: each from its folder, or a copy of the current policy; in the order of reference.models."""
    return tuple(
        _reference_of(context, models, ranks, cut, name=name, path=path)
        for name, path in zip(context.plan.references, _reference_paths(context.cfg.reference), strict=True)
    )


def _reference_paths(given: ReferenceConfig) -> list[str | None]:
    return [each.path for each in given.models] or [given.path]


def _reference_of(
    context: Context,
    models: Models,
    ranks: Mapping[str, Ranks],
    cut: MicroBatchPolicy,
    *,
    name: str,
    path: str | None,
) -> TrainEngine:
    cfg = context.cfg
    if path is None:
        start = models.policy.copied()
    else:
        start = models.place.made(name, model_at(models, context, path, role="reference"))
    start.model.requires_grad_(False)
    rests = "reference" in cfg.train.offload
    own = replace(cut, replays=False)  # its log-probs are those of its own experts
    return engine_of(models, cfg, "reference", start, ranks=ranks, name=name, cut=own, rests=rests)


@dataclass(frozen=True)
class ReferenceChoice:
    """Which of several references scores a rollout."""

    numbers: Mapping[str, int]
    """By the label of its task."""
    column: str | None
    """Of the row, with the label. None: it is the source of the task."""

    @staticmethod
    def of(cfg: ReferenceConfig) -> ReferenceChoice:
        numbers = {value: n for n, each in enumerate(cfg.models) for value in each.values}
        return ReferenceChoice(numbers, cfg.column)

    def __call__(self, groups: Sequence[Group]) -> Tensor:
        """[R] numbers of the references. DataError for a task that has none."""
        return torch.tensor([self.number(g.task) for g in groups for _ in g.rollouts])

    def number(self, task: Task) -> int:
        label = task.source if self.column is None else task.extra.get(self.column)
        if isinstance(label, str) and label in self.numbers:
            return self.numbers[label]
        has = "its source" if self.column is None else f"its column {self.column!r}"
        raise DataError(
            f"A task of source {task.source!r} has no reference: {has} is {label!r}, and reference.models "
            f"has the values {', '.join(map(repr, self.numbers))}; add the value to a model, or leave out such rows."
        )


def reference_logprobs(references: Sequence[TrainEngine], batch: Batch) -> Tensor:
    """[N] of the batch's sampled tokens, after the prompts that the reference sees; of each rollout by its own
    reference, which computes no other."""
    if batch.reference_R is None:
        seen = batch.of_reference
        return at_sampled(batch, seen, references[0].forward(seen, "logprobs"))
    at: list[Tensor] = []
    found: list[Tensor] = []
    for number in batch.reference_R.unique().tolist():
        rows = (batch.reference_R == number).nonzero().flatten()
        part = replace(select(batch, rows), reference_R=None)
        at.append(tokens_of(batch, rows))
        found.append(reference_logprobs([references[number]], part))
    logp_N = torch.cat(found)
    return logp_N[torch.cat(at).argsort().to(logp_N.device)]


def check_models(context: Context, models: Models) -> None:
    """ConfigError or CheckpointError for models that could not be made as the config of a stage says, as far as that
    shows before weights are read."""
    cfg, algorithm = context.cfg, context.algorithm
    choose(models.model, cfg.train.trainable)
    if (users := chosen.of_user(cfg.train)) is not None:
        chosen.maker(*users, on_ranks=bool(ranks_of(cfg.train.parallel)))
    paths: list[tuple[Role, str | None]] = []
    if algorithm.needs_reference:
        paths += [("reference", path) for path in _reference_paths(cfg.reference)]
    if algorithm.needs_critic:
        paths.append(("critic", cfg.critic.path))
    if isinstance(models.place, InFiles) and models.place.open_lines is not None:
        return  # the folders are those of another machine
    own = Path(cfg.run_dir).resolve()
    for role, path in paths:
        if path is None:
            continue
        at = Path(path).expanduser()
        if not at.exists() and at.resolve().is_relative_to(own):  # an earlier stage may export it yet
            continue
        folder, names = _folder(cfg, path, role)
        examined(at, folder, vocab_size=len(models.tokenizer), names=names)


def critic_of(context: Context, models: Models, ranks: Mapping[str, Ranks]) -> TrainEngine:
    """From its folder, or a copy of the current policy, with a value head, or as the language model that it is."""
    cfg, plan = context.cfg, context.plan
    train = plan.critic
    assert train is not None, "planned without a critic"
    path, name = cfg.critic.path, cfg.critic.head
    make: Make
    if path is None:
        make = partial(_of_policy, models.policy.maker())
    else:
        make = model_at(models, context, path, role="critic", head=name)
    seed = seeds.key(cfg.seed, "critic")
    start = models.place.made("critic", partial(build_critic, make, lora=cfg.critic.lora, seed=seed))
    model = start.model
    implicit, value = context.algorithm.implicit is not None, None
    if not implicit:
        value = value_head(model.config.hidden_size, cfg.seed, path=path, name=name)
    cut = MicroBatchPolicy.of(
        train,
        model,
        whole_groups=False,
        entropy_grad=False,
        temperature=trained_temperature(context) if implicit else 1.0,
        critic=not implicit,
        colocated=cfg.rollout.server.sleep,
    )
    return engine_of(
        models,
        cfg,
        "critic",
        start,
        ranks=ranks,
        cut=cut,
        value_head=None if value is None else value.to(model.device, model.dtype),
        whole=path is None,
        optimizer=train.optimizer,
        total_steps=plan.critic_optimizer_steps,
        updates_per_step=plan.critic_updates_per_step,
        max_skipped=cfg.train.max_skipped_steps,
        seed=seeds.key(cfg.seed, "critic", plan.name),
        rests="critic" in cfg.train.offload,
    )


def _of_policy(make: Make) -> PreTrainedModel:
    """A model of its own that begins as the policy."""
    model = copy.deepcopy(merged(make())).requires_grad_(True)
    remove(model)
    return model


def build_critic(make: Make, *, lora: LoraConfig | None, seed: int) -> PreTrainedModel:
    """The model with its adapters."""
    model = make()
    if lora is not None:
        attach(model, lora, seed=seed, key="critic.lora")
    return model


def _folder(cfg: Config, path: str, role: Role) -> tuple[ModelConfig, tuple[str, str]]:
    """How the model of a folder is read: like the policy, with overrides of its own if they are given; and the names of
    its keys."""
    overrides = getattr(cfg, role).overrides
    section = role if path == getattr(cfg, role).path else f"{role}.models"
    names = f"{section}.path", f"{'model' if overrides is None else role}.overrides"
    own = {"path": path, "scratch": None, "mtp": None, "expert_grid": None} | (
        {} if overrides is None else {"overrides": overrides}
    )
    return cfg.model.model_copy(update=own), names


def model_at(
    models: Models,
    context: Context,
    path: str,
    *,
    role: Role,
    head: str | None = None,
) -> Make:
    """Reads the model of a folder. head: name of a value head that the folder may hold."""
    cfg = context.cfg
    folder, names = _folder(cfg, path, role)
    return partial(
        build_model,
        folder,
        vocab_size=len(models.tokenizer),
        eos_token_id=models.tokenizer.eos_token_id,
        pad_token_id=models.tokenizer.pad_token_id,
        seed=cfg.seed,
        device=models.model.device,
        dtype=models.model.dtype,
        head=head,
        names=names,
    )

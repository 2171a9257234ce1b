"""How SkyRL's SFT trainer is called, and what `--prove` compares of one of its files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from whet.prove import given
from whet.prove import skyrl_engines as engines
from whet.prove.cases import Case
from whet.prove.checks import Check, File, micro_batch, scalars
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.prove.skyrl import FLOAT32, PPO
from whet.types import Json

CONFIG = "skyrl.train.config.sft_config:SFTConfig"
TRAINER = "skyrl.train.sft_trainer:SFTTrainer"
COLLATOR = "skyrl.train.dataset.collators:DefaultCollator"
LOSS = f"{PPO}:cross_entropy_loss"


@cache
def known() -> Json:
    """All keys of SkyRL's config for SFT."""
    return dataclasses.asdict(theirs("skyrl", CONFIG)())


def configured(tree: Mapping[str, Json]) -> Any:
    """SkyRL's config of a file."""
    resolved = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    return theirs("skyrl", "skyrl.train.config.config:build_nested_dataclass")(
        theirs("skyrl", CONFIG), resolved
    )


def checks(config: Any, file: File) -> Iterator[Check]:
    """The rows of a file."""
    yield from given.of_run(
        file,
        batches=lambda: scalars(rows_of_a_step=config.batch_size) | _micro(config),
        batches_by=CONFIG,
        steps=partial(steps, config),
        steps_by=f"{TRAINER}._resolve_num_steps",
        rates=partial(rates, config),
        rates_by=engines.scheduler(config.strategy),
        peak=float(config.optimizer_config.lr),
        optimizer=partial(
            engines.optimizer,
            config.optimizer_config,
            config.strategy,
            config.megatron_config.optimizer_config_kwargs,
        ),
        optimizer_by=engines.optimizer_of(config.strategy),
        keys=("num_epochs",),
    )
    yield given.of_loss(file, "sft", theirs=partial(loss, config), called=LOSS, tolerance=FLOAT32)


def _micro(config: Any) -> Numbers:
    if config.use_sequence_packing:
        return micro_batch(None, config.resolved_bin_capacity())
    return micro_batch(config.micro_train_batch_size_per_gpu, None)


def steps(config: Any, rows: int) -> int:
    """The training steps that SkyRL's trainer counts for so many rows of data. A trial run reads none
    (`train_dummy`)."""
    if config.dummy_run_full_ctx:
        return int(config.dummy_run_max_steps)
    trainer = theirs("skyrl", TRAINER)
    own = SimpleNamespace(sft_cfg=config, collator=list)
    own.build_train_sampler = lambda tokenized: trainer.build_train_sampler(own, tokenized)
    loader = trainer.build_train_dataloader(own, list(range(rows)))
    found = trainer._resolve_num_steps(
        num_steps=config.num_steps,
        num_epochs=config.num_epochs,
        steps_per_epoch=len(loader),
        max_training_steps=config.max_training_steps,
    )
    return int(found)


def rates(config: Any, steps: int) -> Tensor:
    """[steps] the factor of the learning rate in each, by the scheduler of SkyRL's strategy. Its length is what SkyRL's
    trainer gives the workers: num_steps and max_training_steps, never num_epochs."""
    own = config.dummy_run_max_steps if config.dummy_run_full_ctx else config.num_steps
    limits = [n for n in (own, config.max_training_steps) if n is not None]
    return engines.rates(config.optimizer_config, config.strategy, min(limits, default=None), steps)


def loss(config: Any, case: Case) -> Numbers:
    """The loss of a step: the collator divides the mask by the number of learned tokens, and the loss is a sum."""
    logp, mask = case.padded(case.logp_N).requires_grad_(), case.mask.long()
    collate = theirs("skyrl", COLLATOR)(
        SimpleNamespace(pad_token_id=0), config.micro_train_batch_size_per_gpu
    )
    width = case.width
    rows = [
        {
            "input_ids": [0] * (width + 1),
            "attention_mask": [1] * (width + 1),
            "num_actions": width,
            "loss_mask": row,
        }
        for row in mask.tolist()
    ]
    batch = collate(rows, batch_size=len(rows))
    none = torch.zeros_like(logp)
    total, _ = theirs("skyrl", LOSS)(logp, none, none, None, batch["loss_mask"])
    total.backward()
    assert logp.grad is not None
    return {"loss": total.detach(), "grad": logp.grad}

"""How Cosmos-RL's SFT trainer is called, and what `--prove` compares of one of its files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from whet.prove import cosmos, given
from whet.prove.cases import Case
from whet.prove.checks import Check, File, micro_batch, scalars
from whet.prove.cosmos import CONFIG, FLOAT32, SCHEDULERS
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.types import Json

WORKER = "cosmos_rl.policy.worker.sft_worker:SFTPolicyWorker"
LOSS = "cosmos_rl.policy.trainer.llm_trainer.sft_trainer:async_safe_ce"

configured = cosmos.configured


@cache
def known() -> Json:
    """All keys of Cosmos's config for SFT."""
    tree: Any = cosmos.known()
    policy = theirs("cosmos", "cosmos_rl.policy.config:SFTDataConfig")(type="sft").model_dump(mode="json")
    return tree | {"train": tree["train"] | {"train_policy": policy}}


def checks(config: Any, file: File) -> Iterator[Check]:
    """The rows of a file. Cosmos's mean over mini-batches is told by whet, and no mean of one."""
    train = config.train
    peak = float(train.optm_lr[0] if isinstance(train.optm_lr, list) else train.optm_lr)
    yield from given.of_run(
        file,
        batches=lambda: (
            scalars(rows_of_a_step=train.train_batch_per_replica * _ranks(config))
            | micro_batch(train.train_policy.mini_batch, None)
        ),
        batches_by=CONFIG,
        steps=partial(steps, config),
        steps_by=f"{WORKER}.build_runner",
        rates=partial(cosmos.rates, train),
        rates_by=SCHEDULERS,
        peak=peak,
        optimizer=partial(cosmos.optimizer, config),
        optimizer_by=cosmos.OPTIMIZERS,
        keys=(
            "train.train_policy.dataloader_drop_last",
            "policy.parallelism.dp_shard_size",
            "policy.parallelism.dp_replicate_size",
        ),
        rate_keys=("train.optm_warmup_steps",),
    )
    yield given.of_loss(file, "sft", theirs=loss, called=LOSS, tolerance=FLOAT32)


def _ranks(config: Any) -> int:
    """Data-parallel ranks, each of which reads its own train_batch_per_replica rows. dp_shard_size=-1 asks for the
    devices that are left, which Cosmos's launcher counts as 1."""
    parallel = config.policy.parallelism
    return int(max(parallel.dp_shard_size, 1) * parallel.dp_replicate_size)


def steps(config: Any, rows: int) -> int:
    """The steps that Cosmos's worker counts on its first rank, for so many rows of data, without a model."""
    trainer = SimpleNamespace(load_model=lambda: (0, 0, None))
    registry = SimpleNamespace(get_trainer_cls=lambda kind: lambda **told: trainer)
    own = SimpleNamespace(
        setup=lambda **told: None,
        config=config,
        parallel_dims=SimpleNamespace(pp_enabled=config.policy.parallelism.pp_size > 1),
        train_stream=None,
        data_packer=None,
        val_data_packer=None,
        hook_fns=None,
        enable_dp_load_balancing=config.train.train_policy.enable_dp_load_balancing,
        dp_world_size=_ranks(config),
        dp_rank=0,
    )
    build = theirs("cosmos", WORKER).build_runner
    with mock.patch.dict(build.__globals__, {"TrainerRegistry": registry}):
        build(own, dataset=TensorDataset(torch.arange(rows)), val_dataset=TensorDataset(torch.arange(1)))
    return int(own.total_steps)


def loss(case: Case) -> Numbers:
    """The cross entropy of padded rows, from logits of two tokens, the first of which is the one that the row has, with
    the log-prob of the case."""
    logp_N = case.logp_N.clone().requires_grad_()
    mask = case.mask.bool()
    own = torch.where(mask, case.padded(logp_N), -1.0)
    logits = torch.stack([own, torch.log(-torch.expm1(own))], -1)
    first = torch.zeros(case.batch.rollouts, 1)
    shifted = torch.cat([logits, torch.zeros_like(logits[:, :1])], 1)
    labels = torch.where(torch.cat([first > 0, mask], 1), 0, -100)

    def cross_entropy(output: Tensor, target: Tensor, lin_weight: object = None, **how: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(output, target, **how)

    total = theirs("cosmos", LOSS)(shifted, labels, cross_entropy)
    total.backward()
    assert logp_N.grad is not None
    return {"loss": total.detach(), "grad": case.padded(logp_N.grad)}

"""How verl's SFT trainer is called, and what `--prove` compares of one of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from whet.prove import given, schedules
from whet.prove.cases import Case
from whet.prove.checks import Check, File, NotComparable, micro_batch, scalars
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.prove.verl import ENGINE, scheduler_of
from whet.types import Json

TRAINER = "verl.trainer.sft_trainer:SFTTrainer"
LOSS = "verl.workers.utils.losses:sft_loss"


@cache
def _composed() -> DictConfig:
    """verl's own defaults, as Hydra composes them."""
    compose, initialize = (theirs("verl", f"hydra:{name}") for name in ("compose", "initialize_config_dir"))
    folder = Path(theirs("verl", "verl.trainer:__file__")).parent / "config"
    with initialize(str(folder), version_base=None):
        return compose("sft_trainer_engine")  # type: ignore[no-any-return]


def known() -> Json:
    """All keys of verl's config for SFT."""
    return OmegaConf.to_container(_composed(), resolve=False)  # type: ignore[return-value]


def configured(tree: Mapping[str, Json]) -> DictConfig:
    """verl's defaults with the file over them."""
    return OmegaConf.merge(OmegaConf.create(known()), dict(tree))  # type: ignore[return-value]


def checks(config: DictConfig, file: File) -> Iterator[Check]:
    """The rows of a file."""
    yield from given.of_run(
        file,
        batches=lambda: (
            scalars(rows_of_a_step=trainer(config, file.plan.tasks_per_step).global_batch_size)
            | _micro(config.data)
        ),
        batches_by=f"{TRAINER}._build_dataloader",
        steps=lambda rows: int(trainer(config, rows).total_training_steps),
        steps_by=f"{TRAINER}._init_engine",
        rates=partial(rates, config),
        rates_by=f"{ENGINE}._build_lr_scheduler",
        peak=float(config.optim.lr),
    )
    yield given.of_loss(file, "sft", theirs=loss, called=LOSS)


def _micro(data: Any) -> Numbers:
    if data.use_dynamic_bsz:
        return micro_batch(None, data.max_token_len_per_gpu)
    return micro_batch(data.micro_batch_size_per_gpu, None)


def trainer(config: DictConfig, rows: int) -> Any:
    """A stand-in for verl's trainer on one device, after its methods that count steps, for so many rows of data."""
    own = SimpleNamespace(
        config=config,
        train_dataset=range(rows),
        val_dataset=None,
        engine=SimpleNamespace(get_data_parallel_rank=lambda: 0, get_data_parallel_size=lambda: 1),
        optimizer_config=SimpleNamespace(),
        training_client=SimpleNamespace(reset=lambda: None),
    )
    for method in ("_build_dataloader", "_init_engine"):
        getattr(theirs("verl", TRAINER), method)(own)
    return own


def rates(config: DictConfig, steps: int) -> Tensor:
    """[steps] the factor of the learning rate in each, by the scheduler of verl's FSDP engine."""
    if config.engine.strategy == "megatron":
        raise NotComparable("Megatron's scheduler needs Megatron-LM")
    optimizer = schedules.dummy()
    return schedules.of_scheduler(scheduler_of(config.optim, optimizer, steps), optimizer, steps)


def loss(case: Case) -> Numbers:
    """Over sequences without padding; a log-prob of verl stands one place before its token."""
    batch = case.batch
    logp_N = case.logp_N.clone().requires_grad_()
    ends = torch.cat([torch.zeros(1, dtype=torch.long), batch.length_S.cumsum(0)])

    def nested(x_N: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x_N, ends)

    data = {
        "loss_mask": nested(batch.mask_N.double()),
        "dp_size": 1,
        "batch_num_tokens": batch.mask_N.sum(),
    }
    total, _ = theirs("verl", LOSS)(None, {"log_probs": nested(logp_N.roll(-1))}, data)
    total.backward()
    assert logp_N.grad is not None
    return {"loss": total.detach(), "grad": case.padded(logp_N.grad)}

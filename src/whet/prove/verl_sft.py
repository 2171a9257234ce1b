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

from whet.prove import given
from whet.prove import verl_engines as engines
from whet.prove.cases import Case
from whet.prove.checks import Check, File, micro_batch, scalars
from whet.prove.numbers import Numbers
from whet.prove.peers import theirs
from whet.prove.verl import freed, joined
from whet.types import Json

TRAINER = "verl.trainer.sft_trainer:SFTTrainer"
LOSS = "verl.workers.utils.losses:sft_loss"


@cache
def _composed(engine: str = "fsdp") -> DictConfig:
    """verl's own defaults, as Hydra composes them for an engine."""
    compose, initialize = (theirs("verl", f"hydra:{name}") for name in ("compose", "initialize_config_dir"))
    folder = Path(theirs("verl", "verl.trainer:__file__")).parent / "config"
    with initialize(str(folder), version_base=None):
        chosen = [f"{group}={engine}" for group in ("engine", "optim")]
        return compose("sft_trainer_engine", chosen)  # type: ignore[no-any-return]


@cache
def known() -> Json:
    """All keys of verl's config for SFT, of any engine."""
    found: Any = {}
    for engine in {each.defaults for each in engines.ENGINES.values()}:
        found = joined(found, OmegaConf.to_container(_composed(engine), resolve=False))
    return freed(found)  # type: ignore[no-any-return]


def configured(tree: Mapping[str, Json]) -> DictConfig:
    """verl's defaults with the file over them."""
    strategy = OmegaConf.select(OmegaConf.create(dict(tree)), "engine.strategy") or "fsdp"
    base = OmegaConf.to_container(_composed(engines.engine(strategy).defaults), resolve=False)
    return OmegaConf.merge(OmegaConf.create(base), dict(tree))  # type: ignore[return-value]


def checks(config: DictConfig, file: File) -> Iterator[Check]:
    """The rows of a file."""
    engine = engines.engine(config.engine.strategy)
    yield from given.of_run(
        file,
        batches=lambda: (
            scalars(rows_of_a_step=trainer(config, file.plan.tasks_per_step).global_batch_size)
            | _micro(config.data)
        ),
        batches_by=f"{TRAINER}._build_dataloader",
        steps=lambda rows: int(trainer(config, rows).total_training_steps),
        steps_by=f"{TRAINER}._init_engine",
        rates=lambda steps: engines.rates(config.optim, config.engine.strategy, steps, steps),
        rates_by=engine.scheduler,
        peak=float(config.optim.lr),
        optimizer=partial(engines.optimizer, config.optim, config.engine.strategy),
        optimizer_by=engine.optimizer,
        optimizer_keys=("optim.betas",),
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

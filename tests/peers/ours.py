"""Whet's side of a row: the algorithm that a config means, and its numbers for a case."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from peers.cases import Case
from peers.table import Numbers, Row
from sections import algorithm as flat_section
from whet.algos.recipes import Algorithm, build
from whet.batch import Batch, LossFn, Outputs
from whet.config.load import load
from whet.config.schema import AlgorithmConfig, Config, CriticConfig
from whet.types import Json

ROOT = Path(__file__).parents[2]

READ_AS = {"verl": "verl@main", "skyrl": "skyrl@0.3", "trinity": "trinity@0.6", "cosmos": "cosmos@0.4"}
"""The version of each peer that its keys are read as: the newest that whet has read. The formulas of verl 0.9.1 are
those of main."""

FILES = {
    "verl": "tests/dialects/verl_letters.yaml",
    "skyrl": "tests/dialects/skyrl_letters.yaml",
    "trinity": "tests/dialects/trinity_letters.yaml",
    "cosmos": "tests/dialects/cosmos_letters.toml",
}
BASE: dict[str, Mapping[str, Json]] = {
    "verl": {"actor_rollout_ref.actor.use_kl_loss": False},
    "skyrl": {"trainer.algorithm.use_kl_loss": False, "trainer.algorithm.eps_clip_high": 0.2},
    "trinity": {"algorithm.kl_loss_fn": "none", "algorithm.kl_loss_fn_args": {}},
    "cosmos": {
        "train.train_policy.dataset.name": "words.jsonl",
        "train.train_policy.kl_beta": 0.0,
        "train.train_policy.epsilon_high": 0.2,
        "train.train_policy.loss_type": "token-mean",
    },
}
"""Settings of every row of a peer, unless it gives them: over what the file says, and the same for both sides."""


def given(row: Row) -> dict[str, Json]:
    """All keys of a row's config, in the peer's names."""
    return {**BASE[row.peer], **row.keys}


@cache
def _config(peer: str, keys: str) -> Config:
    """What whet makes of a config of the peer."""
    place = tempfile.gettempdir()
    os.environ.update(dict.fromkeys(("VERL_TEST", "WORK", "MODEL", "MODEL_PATH"), place), REWARD="gsm8k")
    overrides = [f"{key}={json.dumps(value)}" for key, value in json.loads(keys).items()]
    read = load(
        ROOT / FILES[peer], overrides, dialect=READ_AS[peer], here=False, rehearsal=True, unused="warn"
    )
    return read.config


def config(row: Row) -> Config:
    return _config(row.peer, json.dumps(given(row)))


def algorithm(row: Row, *, width: int = 16) -> Algorithm:
    """The algorithm of a row; width: the longest reply, which some aggregations divide by."""
    if row.native is not None:
        section = AlgorithmConfig.model_validate_json(json.dumps(flat_section(**row.native)))
        return build(section, critic=CriticConfig(), max_tokens=width)
    whole = config(row)
    return build(whole.algorithm, critic=whole.critic, max_tokens=width)


def _before(made: Algorithm, batch: Batch) -> Batch:
    """A batch as it is before the advantages: with old log-probs if the algorithm has the trainer recompute them."""
    known = replace(batch, logp_old_N=batch.logp_old_N if made.needs_old(False) else None)
    return made.correct(known, 0)[0]


def advantage(row: Row, case: Case) -> Numbers:
    """`advantage`, and `return` where a critic learns."""
    made = algorithm(row)
    batch = made.advantage(_before(made, case.batch), made.kl_coef)
    out = {"advantage": case.padded(batch.adv_N)}
    if batch.return_N is not None:
        out["return"] = case.padded(batch.return_N)
    return out


def loss(row: Row, case: Case) -> Numbers:
    """`loss`, a scalar, and `grad`, its gradient by the log-probs of the policy."""
    made = algorithm(row, width=case.width)
    batch = _before(made, case.batch)
    batch = replace(batch, weight_N=made.weights(batch, 1))
    logp_N = case.logp_N.clone().requires_grad_()

    def forward(part: Batch, what: str) -> Tensor:
        return case.logp_N

    return with_gradient(made.loss_of(batch, forward, made.entropy.coef), batch, logp_N, case)


def with_gradient(function: LossFn, batch: Batch, logp_N: Tensor, case: Case) -> Numbers:
    result = function(batch, Outputs(logp_N=logp_N, entropy_N=torch.zeros_like(logp_N)))
    total = (result.loss_N * batch.weight_N).sum()
    total.backward()
    assert logp_N.grad is not None
    return {"loss": total.detach(), "grad": case.padded(logp_N.grad)}


def value_loss(row: Row, case: Case) -> Numbers:
    """The critic's loss and its gradient by the values."""
    made = algorithm(row, width=case.width)
    assert made.value_loss is not None
    batch = replace(case.batch, weight_N=made.value_weights(case.batch))
    value_N = case.value_N.clone().requires_grad_()
    total = (made.value_loss(batch, Outputs(value_N=value_N)).loss_N * batch.weight_N).sum()
    total.backward()
    assert value_N.grad is not None
    return {"loss": total.detach(), "grad": case.padded(value_N.grad)}


def adaptive_kl(row: Row, case: Case) -> Numbers:
    """`coef`: the weight of the KL in the reward after one step."""
    made = algorithm(row)
    return {"coef": torch.tensor(made.next_kl_coef(case.batch, made.kl_coef), dtype=torch.float64)}


def difference(theirs: Numbers, ours: Numbers, names: tuple[str, ...], mask: Tensor) -> float:
    """The largest difference, relative to the larger of 1 and their number; padded numbers count where sampled."""
    worst = 0.0
    for name in names or tuple(theirs):
        a, b = theirs[name].detach().double(), ours[name].detach().double()
        if a.shape != b.shape:
            raise ValueError(f"{name}: theirs has shape {tuple(a.shape)}, ours {tuple(b.shape)}")
        if a.shape == mask.shape:
            a, b = a[mask > 0], b[mask > 0]
        apart = ((a - b).abs() / a.abs().clamp(min=1.0)).nan_to_num(nan=torch.inf)
        worst = max([worst, *apart.flatten().tolist()])
    return worst

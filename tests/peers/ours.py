"""Whet's side of a row: the algorithm that a config means, and its numbers for a case."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch

from peers.table import Row
from sections import algorithm as flat_section
from whet.algos.recipes import Algorithm, build
from whet.config.load import load
from whet.config.schedules import factor
from whet.config.schema import AlgorithmConfig, Config, CriticConfig
from whet.prove import numbers
from whet.prove.cases import Case
from whet.prove.numbers import Numbers
from whet.types import Json

ROOT = Path(__file__).parents[2]

READ_AS = {"verl": "verl@0.9.1", "skyrl": "skyrl@0.3", "trinity": "trinity@0.6", "cosmos": "cosmos@0.4"}
"""The version of each peer that its keys are read as: the newest that whet has read."""

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
    variables = dict.fromkeys(("VERL_TEST", "WORK", "MODEL", "MODEL_PATH"), place) | {"REWARD": "gsm8k"}
    overrides = [f"{key}={json.dumps(value)}" for key, value in json.loads(keys).items()]
    with patch.dict(os.environ, variables):  # the files name these; the next test must not find them
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


def advantage(row: Row, case: Case) -> Numbers:
    """`advantage`, and `return` where a critic learns."""
    return numbers.advantage(algorithm(row), case)


def loss(row: Row, case: Case) -> Numbers:
    """`loss`, a scalar, and `grad`, its gradient by the log-probs of the policy."""
    return numbers.loss(algorithm(row, width=case.width), case)


def value_loss(row: Row, case: Case) -> Numbers:
    """The critic's loss and its gradient by the values."""
    return numbers.value_loss(algorithm(row, width=case.width), case)


def adaptive_kl(row: Row, case: Case) -> Numbers:
    """`coef`: the weight of the KL in the reward after one step."""
    made = algorithm(row)
    return {"coef": torch.tensor(made.next_kl_coef(case.batch, made.kl_coef), dtype=torch.float64)}


TOTAL = 40
"""Steps of a schedule."""


def schedule(row: Row, case: Case) -> Numbers:
    """Whet's factors of the policy's learning rate."""
    made = config(row).train.optimizer.schedule
    return {"factor": torch.tensor([factor(made, step, TOTAL) for step in range(TOTAL)], dtype=torch.float64)}

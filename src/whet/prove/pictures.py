"""Small ragged batches from pictures of rollouts, in float64 so that laws can be checked to the last digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from whet.batch import Batch, pack
from whet.types import Group, Rollout, Strand, Task, given_tokens


def make_batch(
    groups: Sequence[Sequence[str]],
    rewards: Sequence[float] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """A batch from pictures of rollouts: `make_batch([["ppaaoa", "ppa", "pa|ppa"]], [1, 0, 2])`.

    p prompt, o environment, a sampled, | another strand. All log-probs (sampled, old, reference) and values are random,
    near one another, and 0 where nothing was sampled; rewards are random unless given.
    """
    rng = np.random.default_rng(seed)
    packed = pack([_group(number, pictures, rng) for number, pictures in enumerate(groups)])
    total = sum(len(g) for g in groups)
    reward = torch.tensor(rng.normal(size=total) if rewards is None else np.array(rewards, dtype=float))
    mask = packed.mask_N.double()
    logp = -torch.tensor(rng.exponential(size=packed.tokens)) * mask

    def near(x: Tensor, scale: float) -> Tensor:
        return (x + scale * torch.tensor(rng.normal(size=packed.tokens))) * mask

    batch = replace(
        packed,
        reward_R=reward,
        logp_sample_N=logp,
        logp_old_N=near(logp, 0.01),
        logp_ref_N=near(logp, 0.3),
        value_N=near(torch.zeros_like(logp), 1.0),
    )
    floats = {f.name: getattr(batch, f.name) for f in fields(batch)}
    floats = {k: v.to(dtype) for k, v in floats.items() if v is not None and v.is_floating_point()}
    return replace(batch, **floats)


def _group(number: int, pictures: Sequence[str], rng: np.random.Generator) -> Group:
    task = Task(uid=number, source="test", prompt="")
    return Group(task, tuple(_rollout(task, i, p, rng) for i, p in enumerate(pictures)))


def _rollout(task: Task, index: int, picture: str, rng: np.random.Generator) -> Rollout:
    strands = tuple(_strand(part, rng) for part in picture.split("|"))
    return Rollout(task=task, index=index, strands=strands, finish_reason="stop", reward=0.0)


def _strand(picture: str, rng: np.random.Generator) -> Strand:
    mask = np.array([c == "a" for c in picture])
    tokens = given_tokens(rng.integers(0, 50, size=len(picture)).tolist(), mask.tolist())
    return Strand(**tokens | {"versions": mask.astype(np.int32) - 1})

"""Random ragged batches in two forms: whet's packed one, and the padded one [rollouts, response tokens] of the peers.

All numbers are float64. Rewards are multiples of 1/4, so that a peer that computes in float32 gets the same means.
Shape letters as in docs/words.md; T is the length of the longest response, from the first sampled token on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from whet.algos.aggregate import pairs
from whet.batch import Batch
from whet.prove.pictures import make_batch

KINDS = ("one turn", "several turns", "a group of one", "an empty reply", "far apart")
"""far apart: log-probs of the policies differ by up to 60 nats, so that every clamp acts."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    """One batch with what the policy gives its tokens now."""

    kind: str
    seed: int
    batch: Batch
    """With advantages, collision and a greedy baseline filled in."""
    logp_N: Tensor
    value_N: Tensor

    @property
    def name(self) -> str:
        return f"{self.kind}, seed {self.seed}"

    @property
    def column_N(self) -> Tensor:
        """[N] where a token stands in its padded row; below 0 in the prompt."""
        return self.batch.position_N - self.batch.prompt_S[self.batch.segment_N]

    @property
    def width(self) -> int:
        return int(self.column_N.max()) + 1

    def padded(self, x_N: Tensor | None) -> Tensor:
        """[R, T] with 0 at padding; at an environment's tokens what x has there. x is a field that this case has."""
        assert x_N is not None
        at = self.column_N >= 0
        out = x_N.new_zeros(self.batch.rollouts, self.width)
        return out.index_put((self.batch.rollout_N[at], self.column_N[at]), x_N[at])

    @property
    def mask(self) -> Tensor:
        """[R, T] 1 where the policy sampled."""
        return self.padded(self.batch.mask_N.double())

    @property
    def exists(self) -> Tensor:
        """[R, T] 1 at every token of the response, also the environment's."""
        return self.padded(torch.ones_like(self.logp_N))

    @property
    def index(self) -> np.ndarray:
        """[R] the group of each rollout, as the peers give it."""
        return np.array([f"task-{g}" for g in self.batch.group_R.tolist()], dtype=object)

    @property
    def reward(self) -> Tensor:
        """[R, T] the reward at the last sampled token; of an empty reply at its first column."""
        mask, out = self.mask, torch.zeros_like(self.mask)
        last = (mask * torch.arange(1, self.width + 1)).argmax(-1)
        return out.index_put((torch.arange(len(last)), last), self.batch.reward_R)


def case(kind: str, seed: int, *, sizes: Sequence[int] = (), parts: int = 2) -> Case:
    """A batch of some kind; the same for the same arguments. sizes: of the groups; parts: of each reward."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    sizes = sizes or ([4, 3, 5, 2] if kind != "a group of one" else [3, 1, 4, 1])
    pictures = [[_picture(rng, several=kind == "several turns") for _ in range(n)] for n in sizes]
    if kind == "an empty reply":
        pictures[1][1] = "pp"
    rewards = rng.integers(0, 5, size=sum(sizes)) / 4
    rewards[-sizes[-1] :] = 1.0  # a uniform group
    rewards[:2] = 0.0, 0.75
    batch = make_batch(pictures, rewards.tolist(), seed=seed)
    mask = batch.mask_N.double()
    far = 8.0 if kind == "far apart" else 1.0

    def near(x_N: Tensor, scale: float) -> Tensor:
        noise = torch.tensor(rng.normal(size=batch.tokens))
        return (x_N + far * scale * noise).clamp(max=-1e-3) * mask

    sample_N = torch.tensor(-rng.exponential(size=batch.tokens) - 1e-3) * mask
    old_N = near(sample_N, 0.3)
    values = torch.tensor(rng.normal(size=(4, batch.tokens))) * mask
    adv_R = torch.tensor(rng.normal(size=batch.rollouts))
    adv_N = adv_R[batch.rollout_N] * mask
    return Case(
        kind,
        seed,
        replace(
            batch,
            logp_sample_N=sample_N,
            logp_old_N=old_N,
            logp_ref_N=near(old_N, 0.5),
            value_N=values[0],
            return_N=values[1],
            collision_N=torch.tensor(rng.uniform(size=batch.tokens)) * mask,
            baseline_R=torch.tensor(rng.integers(0, 5, size=batch.rollouts) / 4),
            part_RC=torch.tensor(rng.integers(0, 5, size=(batch.rollouts, parts)) / 4),
            adv_N=adv_N,
        ),
        near(old_N, 0.4),
        values[0] + 0.5 * values[2],
    )


def pair_case(seed: int, *, count: int = 5) -> Case:
    """Pairs of a chosen and a rejected reply of one turn; which of the two stands first is random."""
    rng = np.random.default_rng([99, seed])
    pictures = [["pp" + "a" * int(rng.integers(1, 9)) for _ in range(2)] for _ in range(count)]
    rewards = [x for flip in rng.random(count) < 0.5 for x in ((1.0, 0.0) if flip else (0.0, 1.0))]
    batch = make_batch(pictures, rewards, seed=seed)
    mask = batch.mask_N.double()
    ref_N = torch.tensor(-rng.exponential(size=batch.tokens) - 1e-3) * mask
    logp_N = (ref_N + 0.3 * torch.tensor(rng.normal(size=batch.tokens))).clamp(max=-1e-3) * mask
    zero_R = torch.full((batch.rollouts,), 0.07, dtype=torch.float64)
    batch = replace(batch, logp_ref_N=ref_N, logp_old_N=None, kl_zero_R=zero_R)
    return Case("pairs", seed, batch, logp_N, torch.zeros_like(logp_N))


PAIRS: Mapping[str, Callable[[int], Case]] = {"pairs": pair_case, "one pair": partial(pair_case, count=1)}
"""Batches of pairs, by the name of their kind."""


def in_pair_order(made: Case, x: Tensor) -> Tensor:
    """[R, ...] the chosen replies of all pairs, then the rejected ones."""
    chosen, rejected = pairs(made.batch)
    return x[torch.cat([chosen, rejected])]


def cases(kinds: tuple[str, ...]) -> Iterator[Case]:
    for kind in kinds:
        for seed in SEEDS:
            yield PAIRS[kind](seed) if kind in PAIRS else case(kind, seed)


def _picture(rng: np.random.Generator, *, several: bool) -> str:
    text = "p" * int(rng.integers(1, 5)) + "a" * int(rng.integers(1, 9))
    for _ in range(int(rng.integers(1, 4)) if several else 0):
        text += "o" * int(rng.integers(1, 4)) + "a" * int(rng.integers(1, 6))
    return text

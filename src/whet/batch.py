"""The packed tensors of one step.

Shape letters: N tokens of the packed batch, S segments, R rollouts, L layers, E experts of a token. A segment is a
strand of a rollout. The segments of a rollout stand together, in order, rollout after rollout; nothing is padded. A
batch has whole rollouts.
`logp_N[i]` is the log-prob of token i given the tokens before it in its segment, so it stands at the token itself;
`value_N[i]` is the critic's value of the state in which token i was chosen. Both are valid where `mask_N` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.types import Group, Strand, WhetError


@dataclass(frozen=True)
class Batch:
    token_ids_N: Tensor
    """int64"""
    mask_N: Tensor
    """bool: sampled by the policy (trained on)."""
    segment_N: Tensor
    """int64: number of the segment a token belongs to, 0..S-1: attention, positions."""
    rollout_N: Tensor
    """int64: number of the rollout a token belongs to, 0..R-1: statistics, denominators, ratios of sequences."""
    version_N: Tensor
    """int64: policy version of a sampled token; -1 elsewhere."""
    logp_sample_N: Tensor | None
    """float32: engine's log-prob under softmax(logits / temperature), when sampled; 0 elsewhere. None: the engine of
    some rollout cannot tell its log-probs."""
    length_S: Tensor
    """int64: tokens of each segment."""
    prompt_S: Tensor
    """int64: tokens before the first sampled one (what segments of a group can share)."""
    rollout_S: Tensor
    """int64: number of the rollout a segment belongs to."""
    group_R: Tensor
    """int64: number of the rollout's group; rollouts of a group stand together."""
    reward_R: Tensor
    """float32"""
    stopped_R: Tensor
    """bool: ended by itself (finish reason `stop`), not by a limit."""
    uid_R: Tensor | None = None
    """int64: uid of the rollout's task; with `index_R` its name in every record of the run. None: it has no name."""
    index_R: Tensor | None = None
    """int32: which of its task's rollouts it is."""
    truncated_R: Tensor | None = None
    """bool: a limit ended the reply or the episode, so what would have followed has a value. None: not known."""
    part_RC: Tensor | None = None
    """float64 [R, C]: parts of the reward, each in a column, where the advantage reads them."""
    turn_reward_N: Tensor | None = None
    """float32: what the environment gave for a turn, at the turn's last token; a part of reward_R. None: for none."""
    baseline_R: Tensor | None = None
    """float32: reward of the greedy reply to the same task (ReMax)."""
    expert_R: Tensor | None = None
    """bool: the reply was given by data, not sampled (mixes of demonstrations and rollouts). None: all were sampled."""
    reference_R: Tensor | None = None
    """int64: number of the reference that scores the rollout, among several. None: there is one."""
    temperature_R: Tensor | None = None
    """float32: what the rollout's logits are divided by, where its source has a temperature of its own. None: all by
    `MicroBatchPolicy.temperature`."""
    logp_old_N: Tensor | None = None
    logp_ref_N: Tensor | None = None
    implicit_N: Tensor | None = None
    """float32: log-prob of each sampled token by the critic, where that is a language model (PRIME)."""
    rival_R: Tensor | None = None
    """float32: what the loss of that model compares a rollout with, by the model before its update (PRIME with dpo)."""
    value_N: Tensor | None = None
    last_value_R: Tensor | None = None
    """float32: the critic's value of the state after the last token of a truncated rollout; 0 for the others. None: no
    advantage reads it."""
    collision_N: Tensor | None = None
    """float32: sum over the vocabulary of p^2, by the policy before the step (optimal-token baseline)."""
    entropy_N: Tensor | None = None
    """float32: entropy of the policy before the step at each sampled token, in nats (top_entropy_quantile)."""
    discriminant_N: Tensor | None = None
    """float32: by how much the entropy falls with the logit of each sampled token, by the policy before the step, in
    nats; less its mean over the vocabulary with entropy_clip=vocabulary."""
    kl_zero_R: Tensor | None = None
    """float32: KTO's reference point, one number for the whole batch, given to every rollout."""
    adv_N: Tensor | None = None
    return_N: Tensor | None = None
    correction_N: Tensor | None = None
    """float32: off-policy weight of a token's policy loss. None: 1."""
    count_R: Tensor | None = None
    """float32: how often a rollout counts in the loss (resampling). None: once."""
    weight_N: Tensor | None = None
    """float32: weight of one token's loss; the loss of the (mini)batch is sum(loss_N * weight_N)."""
    skipped_R: Tensor | None = None
    """bool: the rollout has no effect on the gradient, so the policy's update leaves it out, and models that have not
    computed it before do not: their log-probs are NaN. None: no rollout is skipped."""
    routed_NLE: Tensor | None = None
    """uint8 or int16: the experts of each token in each layer (`Strand.experts`), which the policy computes it with.
    None: those that its routers choose."""
    reprompted: Batch | None = None
    """The same rollouts after other prompts, which is what the reference computes; its sampled tokens are those of this
    batch, in the same order. None: the reference computes this batch."""

    @property
    def rollouts(self) -> int:
        return len(self.reward_R)

    @property
    def segments(self) -> int:
        return len(self.length_S)

    @property
    def tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def of_reference(self) -> Batch:
        """What the reference computes."""
        return self if self.reprompted is None else self.reprompted

    @property
    def segments_R(self) -> Tensor:
        """[R] number of segments of each rollout."""
        return torch.bincount(self.rollout_S, minlength=self.rollouts)

    @property
    def first_R(self) -> Tensor:
        """[R] number of each rollout's first segment."""
        return self.segments_R.cumsum(0) - self.segments_R

    @property
    def start_S(self) -> Tensor:
        """[S] index of each segment's first token."""
        return self.length_S.cumsum(0) - self.length_S

    @property
    def position_N(self) -> Tensor:
        """[N] position in its segment, from 0."""
        return torch.arange(self.tokens, device=self.segment_N.device) - self.start_S[self.segment_N]

    def sum_R(self, x_N: Tensor) -> Tensor:
        """[R] sum of x over the sampled tokens of each rollout, in all its segments."""
        x_N = torch.where(self.mask_N, x_N, x_N.new_zeros(()))
        return x_N.new_zeros(self.rollouts).index_add(0, self.rollout_N, x_N)

    def to(self, device: torch.device | str) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if v is not None})


@dataclass(frozen=True)
class Outputs:
    """The model's outputs for one (micro-)batch, with gradient. 0 where mask_N is false."""

    logp_N: Tensor | None = None
    entropy_N: Tensor | None = None
    """With gradient only if the loss needs it."""
    value_N: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The result of a loss function: unreduced; the engine reduces it once with `batch.weight_N`."""

    loss_N: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [N] or, for numbers of a rollout, [R]; the engine reports their means over sampled tokens / rollouts.
    Numbers of a part of the rollouts are fewer: then the mean is over those."""


LossFn = Callable[[Batch, Outputs], Loss]


def pack(groups: Sequence[Group]) -> Batch:
    """Groups of rollouts as one Batch, in the order given. Unscored rollouts must have been removed before."""
    rollouts = [r for g in groups for r in g.rollouts]
    strands = [s for r in rollouts for s in r.strands]
    length = np.array([len(s.token_ids) for s in strands], dtype=np.int64)
    prompt = np.array([s.prompt_tokens for s in strands], dtype=np.int64)
    rollout = np.repeat(np.arange(len(rollouts)), [len(r.strands) for r in rollouts])
    segment_n = np.repeat(np.arange(len(strands)), length)
    group = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])

    def flat(name: str, dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in strands], dtype=dtype))

    return Batch(
        token_ids_N=flat("token_ids", np.int64),
        mask_N=flat("mask", np.bool_),
        segment_N=torch.from_numpy(segment_n),
        rollout_N=torch.from_numpy(rollout[segment_n]),
        version_N=flat("versions", np.int64),
        logp_sample_N=_known(flat("logprobs", np.float32)),
        length_S=torch.from_numpy(length),
        prompt_S=torch.from_numpy(prompt),
        rollout_S=torch.from_numpy(rollout),
        group_R=torch.from_numpy(group),
        reward_R=torch.tensor([0.0 if r.reward is None else r.reward for r in rollouts], dtype=torch.float32),
        stopped_R=torch.tensor([r.finish_reason == "stop" for r in rollouts]),
        uid_R=torch.tensor([r.task.uid for r in rollouts]),
        index_R=torch.tensor([r.index for r in rollouts], dtype=torch.int32),
        truncated_R=torch.tensor([r.is_truncated for r in rollouts]),
        turn_reward_N=_turn_rewards(strands, length),
        baseline_R=_all_or_none([r.baseline for r in rollouts]),
        routed_NLE=_routed(strands),
    )


def _routed(strands: Sequence[Strand]) -> Tensor | None:
    """The recorded experts; 0 in strands of which nothing was sampled. WhetError where some have none."""
    given = [s.experts for s in strands if s.experts is not None]
    if not given:
        return None
    if any(s.experts is None and s.tokens for s in strands):
        raise WhetError(
            "some rollouts of this batch have the experts of their tokens, others have not; start again without those "
            "that were sampled with another train.router_replay"
        )
    shape, dtype = given[0].shape[1:], given[0].dtype
    filled = [np.zeros((len(s.mask), *shape), dtype) if s.experts is None else s.experts for s in strands]
    return torch.from_numpy(np.concatenate(filled))


def _known(logp_N: Tensor) -> Tensor | None:
    """None if any is not known (`Rollout.logprobs`)."""
    return None if bool(logp_N.isnan().any()) else logp_N


def _turn_rewards(strands: Sequence[Strand], length: np.ndarray) -> Tensor | None:
    starts = (np.cumsum(length) - length).tolist()
    given = {
        start + turn.end - 1: turn.reward
        for start, strand in zip(starts, strands)
        for turn in strand.turns
        if turn.reward is not None and turn.end > turn.start
    }
    if not given:
        return None
    out = np.zeros(int(length.sum()), np.float32)
    out[list(given)] = list(given.values())
    return torch.from_numpy(out)


def _all_or_none(numbers: list[float | None]) -> Tensor | None:
    """float32, if every rollout has its number."""
    given = [x for x in numbers if x is not None]
    return torch.tensor(given, dtype=torch.float32) if len(given) == len(numbers) else None


def with_parts(batch: Batch, groups: Sequence[Group], names: Sequence[str]) -> Batch:
    """The batch with these parts of the rewards of its rollouts. WhetError where a reward did not give one."""
    rollouts = [r for g in groups for r in g.rollouts]
    for r in rollouts:
        if lacks := [name for name in names if name not in r.reward_parts]:
            has = ", ".join(r.reward_parts) or "none"
            raise WhetError(
                f"algorithm.advantage.parts: no reward returned a part {lacks[0]!r}; there are: {has}"
            )
    parts = [[r.reward_parts[name] for name in names] for r in rollouts]
    return replace(batch, part_RC=torch.tensor(parts, dtype=torch.float64))


def select(batch: Batch, rows: Tensor) -> Batch:
    """The given rollouts (ascending numbers) as a separate batch, with every field that is set."""
    if len(rows) == batch.rollouts:
        return batch
    rows = rows.to(batch.length_S.device)
    at_S = _segments_of(batch, rows)
    at_N = _ranges(batch.start_S[at_S], batch.length_S[at_S])
    at = {"N": at_N, "S": at_S}
    values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "reprompted"}
    of: dict[str, Any] = {
        name: None if value is None else value[at.get(name.rpartition("_")[2][0], rows)]
        for name, value in values.items()
    }
    of["reprompted"] = None if batch.reprompted is None else select(batch.reprompted, rows)
    of["rollout_S"] = torch.arange(len(rows), device=rows.device).repeat_interleave(batch.segments_R[rows])
    of["segment_N"] = torch.arange(len(at_S), device=rows.device).repeat_interleave(of["length_S"])
    of["rollout_N"] = of["rollout_S"][of["segment_N"]]
    of["group_R"] = torch.unique_consecutive(of["group_R"], return_inverse=True)[1]
    return Batch(**of)


def at_sampled(batch: Batch, other: Batch, x_M: Tensor) -> Tensor:
    """[N] the values at the sampled tokens of another batch, which has the same ones in the same order; 0 elsewhere."""
    return x_M.new_zeros(batch.tokens).masked_scatter(batch.mask_N.to(x_M.device), x_M[other.mask_N])


def tokens_of(batch: Batch, rows: Tensor) -> Tensor:
    """Where in the batch the tokens of these rollouts are, one rollout after the other."""
    at_S = _segments_of(batch, rows)
    return _ranges(batch.start_S[at_S], batch.length_S[at_S])


def _segments_of(batch: Batch, rows: Tensor) -> Tensor:
    """Numbers of the segments of these rollouts, one rollout after the other."""
    return _ranges(batch.first_R[rows], batch.segments_R[rows])


def _ranges(start: Tensor, length: Tensor) -> Tensor:
    """start, start + 1, ... start + length - 1 of each range, one range after the other."""
    moved = start - (length.cumsum(0) - length)
    return moved.repeat_interleave(length) + torch.arange(int(length.sum()), device=start.device)


def split(batch: Batch, parts: int, *, cut: bool = False, place: Tensor | None = None) -> list[Tensor]:
    """Numbers of the rollouts of `parts` minibatches of whole groups, or of rollouts if groups are cut, in order or in
    that of the places of the groups or rollouts; sizes differ by at most one of them."""
    unit_R = torch.arange(batch.rollouts, device=batch.group_R.device) if cut else batch.group_R
    units = int(unit_R[-1]) + 1
    parts = min(parts, units)
    place_R = unit_R if place is None else place.to(unit_R.device)[unit_R]
    part_R = place_R * parts // units
    return [torch.nonzero(part_R == p).flatten() for p in range(parts)]


def computed(batch: Batch) -> Batch:
    """The rollouts that are not skipped."""
    return batch if batch.skipped_R is None else select(batch, torch.nonzero(~batch.skipped_R).flatten())


def among_skipped(batch: Batch, x_N: Tensor) -> Tensor:
    """[N] the values for the tokens of `computed(batch)`; NaN at the sampled tokens of skipped rollouts."""
    if batch.skipped_R is None:
        return x_N
    out_N = torch.where(batch.mask_N, torch.nan, 0.0).to(x_N)
    return out_N.masked_scatter(~batch.skipped_R[batch.rollout_N].to(x_N.device), x_N)


# ---------------------------------------------------------------- what a loss is made of


_TOLD_TWICE = ("ratio_max",)
"""Statistics that are maxima over what another one has of each token."""


@dataclass(frozen=True)
class LossTerms:
    """Of one optimizer step, before it."""

    rows: Tensor
    """[R] its rollouts, as numbers of the step's batch."""
    values: dict[str, Tensor]
    """[N] of the tokens of these rollouts, one rollout after the other, or [R]; the name ends in the letter. `logp_N`,
    `weight_N` and `loss_N`: the loss is the sum of loss_N * weight_N. Statistics of the loss have their own names."""

    @staticmethod
    def of(rows: Tensor, batch: Batch, out: Outputs, loss: Loss) -> LossTerms:
        """batch: of these rows, with its weights."""
        assert out.logp_N is not None
        assert batch.weight_N is not None
        values = {"logp_N": out.logp_N, "weight_N": batch.weight_N, "loss_N": loss.loss_N}
        for name, x in loss.stats.items():
            letter = {batch.tokens: "N", batch.rollouts: "R"}.get(len(x))
            if letter is not None and name not in _TOLD_TWICE:  # else of a part of the rollouts
                values[f"{name}_{letter}"] = x
        return LossTerms(rows, {name: x.detach() for name, x in values.items()})

    def own(self, batch: Batch) -> LossTerms:
        """Without demonstrations, the rows as numbers of the batch without them. batch: the step's, with them."""
        if batch.expert_R is None:
            return self
        part = select(batch, self.rows)
        kept = (~batch.expert_R[self.rows]).nonzero().flatten()
        at = {"N": tokens_of(part, kept), "R": kept}
        numbers_R = (~batch.expert_R).long().cumsum(0) - 1
        values = {name: x[at[name[-1]]] for name, x in self.values.items()}
        return LossTerms(numbers_R[self.rows[kept]], values)

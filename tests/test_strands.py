"""Rollouts of several strands: every number is that of their tokens, however they are split, cut or packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from inspect import signature
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batches import by_rollout
from swept import in_turn
from test_losses_oracle import ALL as LOSS_CASES
from test_packing import check as check_predictors
from test_packing import naive_count
from test_train_torch import assert_near, engine, gradients, random_groups
from tiny import VOCAB, tiny_model
from whet.algos.advantages import ADVANTAGES, token_rewards
from whet.algos.aggregate import AGGREGATIONS, weights
from whet.algos.groups import mask_shared_prefixes
from whet.algos.losses import LOSSES
from whet.algos.preference import mismatched
from whet.batch import Batch, LossFn, Outputs, pack, select, split
from whet.models.packing import layout
from whet.track.metrics import summarise
from whet.training.balance import deal
from whet.training.micro_batches import MicroBatchLimits, MicroBatchPolicy
from whet.training.work import BatchFlops, batch_flops
from whet.types import DataError, Group, Rollout, Strand, Task, Turn, given_tokens

MODES = [mode for mode in AGGREGATIONS if mode != "pair-mean"]
NORM = 7
CLIP = {"clip_low": 0.1, "clip_high": 0.15}


# ---------------------------------------------------------------- rollouts by hand


def strand(tokens: Sequence[int], mask: Sequence[int], **more: Any) -> Strand:
    given = given_tokens(tokens, mask)
    given["versions"] = np.array(mask) - 1
    given["logprobs"] = np.where(mask, -0.5 - 0.01 * np.arange(len(mask)), 0.0)
    return Strand(**given | more)


def rollout(task: Task, index: int, strands: Sequence[Strand], reward: float = 0.0) -> Rollout:
    return Rollout(task=task, index=index, strands=tuple(strands), finish_reason="stop", reward=reward)


def one_of(runs: Sequence[tuple[list[int], list[int]]]) -> Strand:
    """Turns of (tokens the policy is given, tokens it samples) one after the other, rewards on each but the last."""
    tokens: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    for number, (told, said) in enumerate(runs):
        tokens += told + said
        mask += [0] * len(told) + [1] * len(said)
        reward = 0.25 * (number + 1) if number < len(runs) - 1 else None
        turns.append(Turn(len(tokens) - len(said), len(tokens), "stop", reward))
    return strand(tokens, mask, turns=tuple(turns))


def divided(r: Rollout) -> Rollout:
    """The same episode with each turn in its own strand, which has all before it as context."""
    whole, before, parts = r.strand, 0, []
    for turn in whole.turns:
        arrays = {name: getattr(whole, name)[: turn.end].copy() for name in ("token_ids", "mask", "logprobs")}
        arrays["sample_logprobs"] = whole.sample_logprobs[: turn.end].copy()
        arrays["versions"] = whole.versions[: turn.end].copy()
        arrays["mask"][:before] = False
        for name in ("logprobs", "sample_logprobs"):
            arrays[name][:before] = 0.0
        arrays["versions"][:before] = -1
        parts.append(Strand(**arrays, turns=(turn,)))
        before = turn.end
    return replace(r, strands=tuple(parts))


def episodes(seed: int = 0, *, groups: int = 3, size: int = 3) -> list[Group]:
    """Groups of rollouts of one to three turns, each in one strand."""
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> list[int]:
        return rng.integers(2, VOCAB, size=int(rng.integers(1, most))).tolist()

    out = []
    for uid in range(groups):
        prompt = tokens(9)
        task = Task(uid=uid, source="s", prompt="", token_ids=tuple(prompt))
        rollouts = []
        for index in range(size):
            runs = [(tokens(5), tokens(7)) for _ in range(index % 3)]
            strands = [one_of([(prompt, tokens(7)), *runs])]
            rollouts.append(rollout(task, index, strands, reward=float(rng.normal())))
        out.append(Group(task, tuple(rollouts)))
    return out


def forked(seed: int = 0) -> list[Group]:
    """Groups in which some rollouts have strands with other prompts, some without a sampled token."""
    rng = np.random.default_rng(seed + 100)
    given = random_groups(count=3, seed=seed)

    def more(r: Rollout) -> Rollout:
        prompt = list(r.task.token_ids)
        rewritten = [*rng.integers(2, VOCAB, size=4).tolist(), *prompt[:3]]
        said = rng.integers(2, VOCAB, size=5).tolist()
        extra = [
            strand(rewritten + said, [0] * len(rewritten) + [1, 1, 0, 1, 1]),
            strand(prompt + said[:3], [0] * len(prompt) + [1] * 3),  # begins as the first one does
            strand(rewritten, [0] * len(rewritten)),  # nothing was sampled
        ]
        return replace(r, strands=(*r.strands, *extra[: r.index + 1]))

    return [
        Group(g.task, tuple(more(r) if (r.index + g.task.uid) % 3 else r for r in g.rollouts)) for g in given
    ]


def numbered(batch: Batch, seed: int = 0, *, dtype: torch.dtype = torch.float64) -> Batch:
    """Log-probs of every model, values and advantages, drawn for the sampled tokens in their order."""
    rng, at = np.random.default_rng(seed), batch.mask_N
    sampled = int(at.sum())

    def drawn(x: np.ndarray) -> Tensor:
        out = torch.zeros(batch.tokens, dtype=dtype)
        return out.masked_scatter(at, torch.tensor(x, dtype=dtype))

    old = -rng.exponential(size=sampled) - 0.05
    return replace(
        batch,
        logp_sample_N=drawn(old + 0.1 * rng.normal(size=sampled)),
        logp_old_N=drawn(old),
        logp_ref_N=drawn(old + 0.3 * rng.normal(size=sampled)),
        value_N=drawn(rng.normal(size=sampled)),
        collision_N=drawn(rng.random(sampled)),
        adv_N=drawn(rng.normal(size=sampled)),
        reward_R=batch.reward_R.to(dtype),
        baseline_R=torch.tensor(rng.normal(size=batch.rollouts), dtype=dtype),
        part_RC=torch.tensor(rng.normal(size=(batch.rollouts, 2))),
        implicit_N=drawn(old + 0.3 * rng.normal(size=sampled)),
    )


# ---------------------------------------------------------------- (c) a divided episode is the episode


ADVANTAGE_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_std": True, "std_epsilon": 1e-6, "rank_penalty": 0.1},
    "gdpo": {"parts": ["a", "b"], "part_weights": None, "normalize_std": True, "std_epsilon": 1e-6},
    "grpo_passk": {"normalize_std": True, "std_epsilon": 1e-6},
    "rloo": {},
    "rec": {"normalize_std": True, "std_epsilon": 1e-6},
    "opo": {},
    "gpg": {},
    "opmd": {"opmd_baseline": "logavgexp", "tau": 0.5},
    "asymre": {"baseline_shift": -0.1},
    "maxrl": {"std_epsilon": 1e-6},
    "best": {},
    "softmean": {"softmean_eta": 0.7},
    "win_rate": {},
    "prime": {
        "process_coef": 5.0,
        "outcome_coef": 3.0,
        "implicit_beta": 0.05,
        "implicit_granularity": "token",
        "implicit_normalize": True,
    },
    "gae": {"gamma": 0.97, "lam": 0.9},
    "turn_level_gae": {"gamma": 0.97, "lam": 0.9},
    "reinforce": {"gamma": 0.97},
    "reinforce_plus_plus": {"gamma": 0.9},
    "reinforce_plus_plus_baseline": {},
    "remax": {},
    "gigpo": {"normalize_std": True, "std_epsilon": 1e-6, "gamma": 0.9, "turn_weight": 1.0},
    "step_wise_grpo": {"std_epsilon": 1e-6, "divide_by_turns": True},
    "optimal_token_baseline": {},
    "tir_optimal_token_baseline": {},
    "distill": {"distill_coef": 0.5, "distill_discount": 0.9},
    "reward": {},
    "none": {},
}


def both(seed: int) -> tuple[Batch, Batch]:
    """Episodes as one strand each and divided, with equal numbers at their sampled tokens."""
    whole = episodes(seed)
    parts = [Group(g.task, tuple(map(divided, g.rollouts))) for g in whole]
    one, other = numbered(pack(whole), seed), numbered(pack(parts), seed)
    assert (one.segments, one.rollouts) == (9, 9)
    assert (other.segments, other.rollouts) == (18, 9)
    return one, other


def test_every_advantage_is_compared() -> None:
    assert ADVANTAGE_SETTINGS.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_divided_episode_has_the_advantages_of_the_episode(name: str, seed: int) -> None:
    def run(batch: Batch) -> list[Tensor]:
        reward_N = token_rewards(batch, kl_coef=0.1)
        function = ADVANTAGES[name]  # gdpo and prime read other rewards
        given = {"reward_N": reward_N} if "reward_N" in signature(function).parameters else {}
        adv_N, return_N = function(batch, **given, **ADVANTAGE_SETTINGS[name])
        return [x_N[batch.mask_N] for x_N in (reward_N, adv_N, return_N) if x_N is not None]

    one, other = (run(batch) for batch in both(seed))
    for x_M, y_M in zip(one, other, strict=True):
        torch.testing.assert_close(y_M, x_M, rtol=1e-13, atol=1e-13)
    assert one[1].abs().sum() > 0


@pytest.mark.parametrize(("case", "mode"), in_turn(LOSS_CASES, MODES, name=lambda case: case[0]))
def test_a_divided_episode_has_the_loss_and_the_gradient_of_the_episode(case: Any, mode: str) -> None:
    name, keys, _ = case

    def run(batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert batch.logp_old_N is not None
        noise = torch.tensor(np.random.default_rng(7).normal(size=int(batch.mask_N.sum())))
        logp_N = (
            batch.logp_old_N.masked_scatter(batch.mask_N, noise) * 0.2 + batch.logp_old_N
        ).requires_grad_()
        found = LOSSES[name](batch, Outputs(logp_N=logp_N), **keys)
        total = (found.loss_N * weights(batch, mode, norm_tokens=NORM)).sum()
        (grad_N,) = torch.autograd.grad(total, logp_N)
        stats = {k: x[batch.mask_N] if len(x) == batch.tokens else x for k, x in found.stats.items()}
        return total.detach(), grad_N[batch.mask_N], stats

    (one, grad_M, stats), (other, other_grad_M, other_stats) = (run(batch) for batch in both(1))
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(other_grad_M, grad_M, rtol=1e-12, atol=1e-13)
    assert grad_M.abs().sum() > 0
    assert stats.keys() == other_stats.keys()
    for key in stats:
        torch.testing.assert_close(other_stats[key], stats[key], rtol=1e-12, atol=1e-13)


def test_a_divided_episode_has_the_metrics_of_the_episode() -> None:
    whole = episodes(2)
    parts = [Group(g.task, tuple(map(divided, g.rollouts))) for g in whole]
    assert summarise(parts) == summarise(whole)
    for one, other in zip(whole[0].rollouts, parts[0].rollouts, strict=True):
        assert other.tokens == one.tokens
        assert other.sampled_versions == one.sampled_versions == {0}
        assert other.turns == one.turns
        assert len(other.strands) == len(one.turns)


# ---------------------------------------------------------------- (b) the engine, against tokens one by one


def clipped(name: str) -> LossFn:
    """PPO's clip of token ratios, or GSPO's of rollout ratios."""
    if name == "gspo":
        return lambda b, o: LOSSES["gspo"](b, o, **CLIP, gspo_form="sequence")
    more = {"dual_clip": None, "sequence_mask_delta": None, "fallback_to_policy_gradient": False}
    return lambda b, o: LOSSES["ppo"](b, o, **CLIP, **more)


def by_hand(batch: Batch, name: str, mode: str) -> dict[str, Tensor]:
    """The gradient, strand after strand through transformers' own forward, rollout after rollout in the loss."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    logp: list[list[Tensor]] = [[] for _ in range(batch.rollouts)]
    for s in range(batch.segments):
        at = (batch.segment_N == s).nonzero().flatten()
        ids = batch.token_ids_N[at]
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        for t in range(1, len(ids)):
            if batch.mask_N[at[t]]:
                logp[int(batch.rollout_S[s])].append(table[t - 1, ids[t]])
    assert batch.logp_old_N is not None
    assert batch.adv_N is not None
    old, adv = by_rollout(batch, batch.logp_old_N), by_rollout(batch, batch.adv_N)
    sizes = [len(row) for row in logp]
    group = batch.group_R.tolist()
    of_group = {g: sum(n for n, h in zip(sizes, group, strict=True) if h == g) for g in group}
    rollouts = sum(n > 0 for n in sizes)
    total = torch.zeros(())
    for r, n in enumerate(sizes):
        over = {
            "token-mean": sum(sizes),
            "token-sum": 1,
            "token-sum-norm": NORM,
            "seq-mean-token-sum": rollouts,
            "seq-mean-token-mean": rollouts * n,
            "seq-mean-token-sum-norm": rollouts * NORM,
            "prompt-mean": len(of_group) * of_group[group[r]],
        }[mode]
        mean = sum((x - y for x, y in zip(logp[r], old[r], strict=True)), torch.zeros(())) / max(n, 1)
        for x, y, a in zip(logp[r], old[r], adv[r], strict=True):
            ratio = (mean if name == "gspo" else x - y).exp()
            total = total + torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.15)) / over
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CUTS = {
    "whole": MicroBatchPolicy(),
    "unshared": MicroBatchPolicy(share_prompts=False),
    "one by one": MicroBatchPolicy(max_tokens=1),
    "tokens": MicroBatchPolicy(max_tokens=40),
    "rollouts": MicroBatchPolicy(max_tokens=None, max_rollouts=2, share_prompts=False),
}


def prepared(groups: list[Group], mode: str) -> Batch:
    """With old log-probs near the model's, so that the clip bites at some tokens, and advantages a token."""
    batch = pack(groups)
    rng = np.random.default_rng(3)
    noise = torch.tensor(rng.normal(size=(2, int(batch.mask_N.sum()))), dtype=torch.float32)
    zero_N = torch.zeros(batch.tokens)
    old_N = engine(MicroBatchPolicy()).forward(batch, "logprobs") + 0.2 * zero_N.masked_scatter(
        batch.mask_N, noise[0]
    )
    batch = replace(batch, logp_old_N=old_N, adv_N=zero_N.masked_scatter(batch.mask_N, noise[1]))
    return replace(batch, weight_N=weights(batch, mode, norm_tokens=NORM))


@pytest.mark.parametrize(("mode", "name"), in_turn(MODES, ["ppo", "gspo"]))
def test_the_gradient_of_several_strands_is_that_of_their_tokens_in_any_cut(name: str, mode: str) -> None:
    batch = prepared(forked(), mode)
    assert batch.segments > batch.rollouts
    expected, loss = by_hand(batch, name, mode), clipped(name)
    whole: dict[str, float] = {}
    for cut in CUTS.values():
        found, numbers = gradients(cut, batch, loss=loss)
        assert_near(found, expected, 2e-4)
        whole = whole or numbers
        assert numbers == pytest.approx(whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_the_engine_learns_the_same_from_a_divided_episode(name: str) -> None:
    whole = episodes(4)
    parts = [Group(g.task, tuple(map(divided, g.rollouts))) for g in whole]
    one, numbers = gradients(MicroBatchPolicy(), prepared(whole, "seq-mean-token-mean"), loss=clipped(name))
    for share in (True, False):
        cut = MicroBatchPolicy(share_prompts=share, max_tokens=60)
        other, others = gradients(cut, prepared(parts, "seq-mean-token-mean"), loss=clipped(name))
        assert_near(other, one, 2e-5)
        assert others == pytest.approx(numbers, rel=1e-4, abs=1e-6)


def test_a_forward_over_strands_is_bitwise_the_same_in_any_micro_batch() -> None:
    batch = pack(forked(1))
    whole = engine(MicroBatchPolicy()).forward(batch, "logprobs")
    for cut in CUTS.values():
        assert torch.equal(engine(cut).forward(batch, "logprobs"), whole)
    assert (whole[batch.mask_N] < 0).all()


def test_a_prompt_is_computed_once_for_all_strands_of_a_group_that_begin_with_it() -> None:
    task = Task(uid=0, source="s", prompt="")
    first, second = strand([5, 6, 7], [0, 0, 1]), strand([8, 7, 9], [0, 0, 1])
    again = strand([5, 6, 9, 9], [0, 0, 1, 1])
    group = Group(task, (rollout(task, 0, [first, second, again]), rollout(task, 1, [first, second])))
    plan = layout(pack([group]), share_prompts=True)
    assert plan.token_ids_U.tolist() == [5, 6, 8, 7, 9]
    assert plan.predictor_N.tolist() == [-1, 0, 1, -1, 2, 3, -1, 0, 1, 4, -1, 0, 1, -1, 2, 3]


def test_the_arithmetic_of_strands_is_that_of_as_many_sequences() -> None:
    """Layers 2, output 1, attention 0.1. Strands of 2 + 1 and 3 + 2 tokens, in one rollout or in two."""
    task = Task(uid=0, source="s", prompt="")
    strands = [strand([1, 2, 3], [0, 0, 1]), strand([4, 5, 6, 7, 8], [0, 0, 0, 1, 0])]
    work = BatchFlops(layers=2.0, output=1.0, attention=0.1)
    one = pack([Group(task, (rollout(task, 0, strands),))])
    two = pack([Group(task, tuple(rollout(task, i, [s]) for i, s in enumerate(strands)))])
    # layers 2 * 8, output 1 * 2, attention 0.1 * (9 + 25) / 2
    assert batch_flops(work, one, shared=False) == pytest.approx(16 + 2 + 1.7, rel=1e-12)
    assert batch_flops(work, two, shared=False) == pytest.approx(16 + 2 + 1.7, rel=1e-12)


# ---------------------------------------------------------------- (d) every sampled token once


Runs = list[tuple[int, int]]  # tokens that are given, and sampled ones, in turn
STRAND = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3)
GROUPS = st.lists(
    st.lists(st.lists(STRAND, min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
)


def unique(groups: list[list[list[Runs]]]) -> list[Group]:
    """Every token has its own id, so that it can be followed."""
    ids = count()
    made = []
    for uid, rollouts in enumerate(groups):
        task = Task(uid=uid, source="s", prompt="")
        parts = []
        for index, strands in enumerate(rollouts):
            masks = [[m for told, said in runs for m in [0] * told + [1] * said] for runs in strands]
            made_of = [strand([next(ids) for _ in mask], mask) for mask in masks]
            parts.append(rollout(task, index, made_of))
        made.append(Group(task, tuple(parts)))
    return made


def sampled(batches: Sequence[Batch]) -> list[int]:
    return sorted(t for b in batches for t in b.token_ids_N[b.mask_N].tolist())


def is_whole(part: Batch, batch: Batch) -> bool:
    """Every rollout has all its tokens, in order, and its segments stand together."""
    where = {int(t): n for n, t in enumerate(batch.token_ids_N)}
    at = [where[int(t)] for t in part.token_ids_N]
    rows = batch.rollout_N[at]
    return (
        torch.equal(part.rollout_N, torch.unique_consecutive(rows, return_inverse=True)[1])
        and all(int((rows == r).sum()) == int((batch.rollout_N == r).sum()) for r in set(rows.tolist()))
        and torch.equal(part.rollout_S[part.segment_N], part.rollout_N)
        and torch.equal(part.position_N, batch.position_N[at])
        and torch.equal(part.segment_N, torch.arange(part.segments).repeat_interleave(part.length_S))
        and torch.equal(part.segments_R, torch.bincount(part.rollout_S))
    )


@settings(max_examples=60, deadline=None)
@given(
    GROUPS,
    st.integers(1, 4),
    st.booleans(),
    st.one_of(
        st.builds(
            MicroBatchLimits, max_tokens=st.integers(1, 40), shared=st.booleans(), whole_groups=st.booleans()
        ),
        st.builds(
            MicroBatchLimits, max_rollouts=st.integers(1, 3), shared=st.booleans(), whole_groups=st.booleans()
        ),
    ),
)
def test_no_cut_loses_or_doubles_a_sampled_token(
    drawn: list[list[list[Runs]]], parts: int, cut: bool, limits: MicroBatchLimits
) -> None:
    groups = unique(drawn)
    batch = pack(groups)
    batch = replace(batch, weight_N=batch.mask_N.float(), skipped_R=torch.arange(batch.rollouts) % 2 == 0)
    everything = sampled([batch])
    assert len(everything) == sum(r.tokens for g in groups for r in g.rollouts)
    minibatches = [select(batch, rows) for rows in split(batch, parts, cut=cut)]
    assert sampled(minibatches) == everything
    assert all(is_whole(part, batch) for part in minibatches)
    dealt = deal(batch, parts, limits)
    micros = [micro for part in dealt for micro in part.micros[: part.real]]
    assert sampled(micros) == everything
    assert all(is_whole(micro, batch) for micro in micros)
    for field in fields(Batch):
        if field.name.endswith("_S") and field.name != "rollout_S":
            joined = torch.cat([getattr(m, field.name) for m in minibatches])
            assert sorted(joined.tolist()) == sorted(getattr(batch, field.name).tolist())


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.booleans())
def test_every_sampled_token_is_predicted_by_the_history_of_its_own_strand(
    drawn: list[list[list[Runs]]], share: bool
) -> None:
    groups = unique(drawn)
    groups = [  # few different tokens, so that prompts come up again
        Group(g.task, tuple(replace(r, strands=tuple(map(_coarse, r.strands))) for r in g.rollouts))
        for g in groups
    ]
    rows = [
        [(s.token_ids.tolist(), s.mask.astype(int).tolist()) for r in g.rollouts for s in r.strands]
        for g in groups
    ]
    plan = layout(pack(groups), share_prompts=share)
    check_predictors(rows, plan)
    assert len(plan.token_ids_U) == naive_count(rows, share=share)


def _coarse(s: Strand) -> Strand:
    return replace(s, token_ids=s.token_ids % 2)


# ---------------------------------------------------------------- what looks at replies


def test_first_strands_share_prefixes_with_first_ones_and_second_with_second() -> None:
    task = Task(uid=0, source="s", prompt="")

    def made(index: int, first: list[int], second: list[int]) -> Rollout:
        strands = [strand([5, *first], [0, 1, 1, 1]), strand([6, 7, *second], [0, 0, 1, 1, 1])]
        return rollout(task, index, strands, reward=float(index))

    given = Group(task, (made(0, [1, 2, 3], [1, 8, 9]), made(1, [1, 2, 4], [8, 8, 8])))
    masks = [[s.mask.tolist() for s in r.strands] for r in mask_shared_prefixes(given, 2).rollouts]
    # first strands share 1, 2; second ones nothing, though one begins as the first strands do
    assert masks == [[[0, 0, 0, 1], [0, 0, 1, 1, 1]]] * 2


def test_kto_refuses_rollouts_of_several_strands() -> None:
    with pytest.raises(DataError, match="9 rollouts have 18 strands; it needs rollouts of one strand each"):
        mismatched(both(0)[1])


def test_a_shorter_history_stands_before_the_place_of_the_first_reply() -> None:
    """optimal_token_baseline: the second strand's prompt is 2 tokens shorter, so its reply stands at -2 and meets
    nobody; in the other rollout the reply stands at 0, with the first strand's."""
    task = Task(uid=0, source="s", prompt="")
    two = rollout(task, 0, [strand([1, 2, 3, 4], [0, 0, 0, 1]), strand([1, 5], [0, 1])], reward=1.0)
    one = rollout(task, 1, [strand([1, 2, 3, 6], [0, 0, 0, 1])], reward=0.0)
    batch = pack([Group(task, (two, one))])
    half_N = torch.where(batch.mask_N, math.log(0.5), 0.0)
    batch = replace(batch, logp_old_N=half_N, collision_N=batch.mask_N * 1.0)
    adv_N, _ = ADVANTAGES["optimal_token_baseline"](batch, reward_N=token_rewards(batch))
    # w = 1 - 1 + 1: at place 0 the returns 1 and 0 with W = 1 each; at -2 return 1 alone, without a baseline
    assert adv_N[batch.mask_N].tolist() == pytest.approx([0.5, 1.0, -0.5], abs=1e-6)

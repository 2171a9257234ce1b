"""What the parallel layouts are made of, each by itself: schedules, cuts, the balance of a router, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from batches import micro_batches
from layouts import OPS, Case, Learner, batch, prices
from test_forward import foreign
from tiny import tiny_model
from whet.batch import Batch, select
from whet.models import expert_parallel, router, tensor_parallel
from whet.models.attention import PackedAttention, Segments
from whet.models.collectives import Peers, SplitDim
from whet.models.context_parallel import Share, Ulysses
from whet.models.packing import layout
from whet.models.pipeline import Action, schedule
from whet.types import ConfigError


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("micros", [1, 2, 3, 4, 5, 7, 9])
def test_a_schedule_does_everything_once_and_never_too_early(ranks: int, chunks: int, micros: int) -> None:
    orders = schedule(ranks, chunks, micros, learning=True)
    parts = ranks * chunks
    every = {
        Action(kind, m, p) for kind, m, p in product(("forward", "backward"), range(micros), range(parts))
    }  # type: ignore[arg-type]
    assert sorted(map(str, every)) == sorted(str(a) for order in orders for a in order)
    done: set[Action] = set()
    at = [0] * ranks
    while len(done) < len(every):  # each rank runs its list as far as it can: nobody waits for ever
        before = len(done)
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and needs(order[at[rank]], parts) <= done:
                assert order[at[rank]].part % ranks == rank
                done.add(order[at[rank]])
                at[rank] += 1
        assert len(done) > before


def needs(action: Action, parts: int) -> set[Action]:
    if action.kind == "forward":
        return {Action("forward", action.micro, action.part - 1)} if action.part else set()
    after = {Action("backward", action.micro, action.part + 1)} if action.part < parts - 1 else set()
    return {Action("forward", action.micro, action.part), *after}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_1f1b_holds_few_micro_batches(ranks: int) -> None:
    for rank, order in enumerate(schedule(ranks, 1, 12, learning=True)):
        held = [sum(1 if a.kind == "forward" else -1 for a in order[: i + 1]) for i in range(len(order))]
        assert max(held) == ranks - rank
    assert not any(a.kind == "backward" for order in schedule(ranks, 1, 12, learning=False) for a in order)


@pytest.mark.parametrize("size", [1, 2, 5, 61])
def test_spans_cover_everything_evenly(size: int) -> None:
    for ranks in (1, 2, 3, 4):
        spans = [Peers(rank, ranks).span(size) for rank in range(ranks)]
        assert [i for span in spans for i in range(size)[span]] == list(range(size))
        assert max(Peers(0, ranks).spans(size)) - min(Peers(0, ranks).spans(size)) <= 1


def test_gate_and_up_are_cut_each_by_itself() -> None:
    whole = torch.arange(24.0).view(2, 6, 2)  # rows 0..2 gate, 3..5 up
    part = SplitDim(1, Peers(1, 3), 2).part(whole)
    torch.testing.assert_close(part, whole[:, [1, 4]])


def test_each_sampled_token_is_predicted_on_one_rank() -> None:
    whole = batch()
    packed = layout(whole, share_prompts=True)
    found = [Share(packed, Peers(rank, 3)).predicted(whole.mask_N)[0] for rank in range(3)]
    assert sorted(torch.cat(found).tolist()) == torch.nonzero(whole.mask_N).flatten().tolist()


# ---------------------------------------------------------------- balance of the router


def routed(learner: Learner, whole: Batch) -> tuple[list[router.Routed], torch.Tensor]:
    with router.watching() as seen:
        learner.hidden(whole, None)
    return seen, learner.uses(whole)


def loads(seen: list[router.Routed], uses_U: torch.Tensor) -> torch.Tensor:
    """Choices of each expert, over all layers."""
    return router.counts(seen, uses_U)[0].sum(0)


def test_the_balance_term_is_that_of_transformers() -> None:
    learner = Learner(Case(family="qwen3_moe", aux=1.0, share_prompts=False))
    seen, uses_U = routed(learner, batch())
    ours = router.balance(seen, uses_U, prices(seen, loads(seen, uses_U)))
    logits = tuple(layer.probability_UX.log() for layer in seen)
    theirs = load_balancing_loss_func(logits, 4, top_k=learner.model.config.num_experts_per_tok)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)


def test_the_balance_term_knows_no_cut_and_no_sharing() -> None:
    whole = batch()
    values = []
    for share_prompts, micro in product((True, False), (1 << 20, 40)):
        learner = Learner(Case(family="qwen3_moe", aux=1.0, share_prompts=share_prompts))
        micros = list(
            micro_batches(whole, max_tokens=micro, max_rollouts=None, shared=True, whole_groups=False)
        )
        each = [routed(learner, m) for m in micros]
        load_X = sum((loads(*one) for one in each), torch.zeros(4, dtype=torch.float64))
        values.append(sum(float(router.balance(*one, prices(one[0], load_X))) for one in each))
    assert values == pytest.approx([values[0]] * 4, rel=1e-6)
    half = select(whole, torch.arange(5))
    seen, uses_U = routed(learner, half)
    assert float(router.balance(seen, uses_U, prices(seen, load_X))) < values[0]


# ---------------------------------------------------------------- refusals


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 key/value heads"):
        tensor_parallel.apply(tiny_model(), Peers(0, 4))
    with pytest.raises(ConfigError, match="does not divide the 4 experts"):
        expert_parallel.apply(tiny_model("qwen3_moe"), Peers(0, 3))
    with pytest.raises(ConfigError, match="has no experts"):
        expert_parallel.apply(tiny_model(), Peers(0, 2))
    with pytest.raises(ConfigError, match="no routers"):
        router.mixture(tiny_model())
    attend = Ulysses(PackedAttention(Segments.of_lengths(torch.tensor([4])), OPS), Peers(0, 3), 4)
    x = torch.zeros(2, 4, 16)
    with pytest.raises(ConfigError, match="cp=3 does not divide the 4 attention heads"):
        attend(0, x, x, x, scale=1.0, window=None, softcap=None, sinks=None)


def test_a_block_with_unknown_parts_is_refused() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.extra"):
        tensor_parallel.apply(model, Peers(0, 2))
    model = tiny_model()
    model.model.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(ConfigError, match="o_proj"):
        tensor_parallel.apply(model, Peers(0, 2))
    with pytest.raises(ConfigError, match=r"cannot partition .*q_norm"):  # one norm of all heads together
        tensor_parallel.apply(foreign("olmo2"), Peers(0, 2))


def test_a_part_of_what_an_optimizer_keeps() -> None:
    """Alone nothing is cut; numbers have no parts."""
    learner = Learner(replace(Case(), layers=1))
    x = torch.arange(6.0).view(3, 2)
    assert learner.parallel.part("exp_avg.model.norm.weight", x) is x
    assert learner.parallel.whole("steps.model.norm.weight", x[0, 0]).ndim == 0

"""Terms of routers, however a minibatch is cut: transformers' own load balancing, Megatron-LM's and the z term, written
out over all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from grid import BIG, Layout, Way, error, learning, moved, pair, started
from test_lora_experts import partly_dense
from test_train_torch import CUT, pg_loss, random_groups, weighted
from tiny import tiny_model
from whet.batch import Batch, Loss, Outputs, pack, select
from whet.models import kernels, router
from whet.models.lora import learned
from whet.models.mesh import Dims
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import ConfigError

AUX = replace(CUT, router_aux=0.7)
ROUTERS = "mlp.gate.weight"


def nothing(batch: Batch, out: Outputs) -> Loss:
    """The term is all there is to learn from."""
    return Loss(0.0 * out.logp_N, {})  # type: ignore[operator]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    worst = max(expected, key=lambda name: error(found[name], expected[name]))
    assert error(found[worst], expected[worst]) <= tolerance, worst


def made(cut: MicroBatchPolicy, *, hooked: bool = False, **how: Any) -> TorchEngine:
    model = tiny_model("qwen3_moe")
    if hooked:
        router.hook(model)
    return TorchEngine(model, kernels.load("auto"), cut=cut, **learning(optimizer=BIG, **how))


def learned_by(engine: TorchEngine, batch: Batch, loss: Any = nothing) -> dict[str, torch.Tensor]:
    before = {n: p.detach().clone() for n, p in learned(engine.module)}
    engine.update(batch, loss)
    return {n: g for n, g in moved(engine, before).items() if g.any()}


def whole(layers: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """transformers' own."""
    return load_balancing_loss_func(tuple(layers), config.num_experts, config.num_experts_per_tok)


def by_layer(layers: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """Megatron-LM's aux_loss: X / (E T^2) times the sum of choices and probabilities, a sum over layers."""
    terms, experts = [], config.num_experts
    for logits in layers:
        likely, tokens = logits.softmax(-1), len(logits)
        chosen = likely.topk(config.num_experts_per_tok).indices.flatten().bincount(minlength=experts)
        scale = experts / (config.num_experts_per_tok * tokens * tokens)
        terms.append(scale * (likely.sum(0) * chosen).sum())
    return torch.stack(terms).sum()


def z_term(layers: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """The mean over tokens of logsumexp squared, a sum over layers."""
    return torch.stack([logits.exp().sum(-1).log().square().mean() for logits in layers]).sum()


def oracle(
    batch: Batch, coef: float, term_of: Callable[..., torch.Tensor] = whole
) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers' model and a term in float64, each rollout by itself, all tokens that predict one at the end."""
    model = tiny_model("qwen3_moe").double()
    model.config._experts_implementation = "eager"
    layers: list[list[torch.Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    for row in range(batch.rollouts):
        at = batch.rollout_N == row
        last = int(torch.nonzero(batch.mask_N[at]).max())
        out = model(input_ids=batch.token_ids_N[at][None, :last], output_router_logits=True)
        for seen, logits in zip(layers, out.router_logits):
            seen.append(logits)
    term = term_of([torch.cat(seen) for seen in layers], model.config)
    (coef * term).backward()
    return float(term), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()
    }


TERMS: dict[str, tuple[MicroBatchPolicy, Any]] = {
    "router_aux": (AUX, whole),
    "router_aux each": (replace(AUX, router_aux_each=True), by_layer),
    "router_z": (replace(CUT, router_z=0.7), z_term),
}


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"share_prompts": False}, marks=pytest.mark.sweep),
        pytest.param({"max_tokens": 25}, marks=pytest.mark.sweep),
        {"max_rollouts": 1, "checkpoint": True},
    ],
    ids=str,
)
def test_gradient_is_that_of_the_term_written_out(how: dict[str, Any], hooked: bool, name: str) -> None:
    batch = weighted()
    cut, term_of = TERMS[name]
    term, expected = oracle(batch, 0.7, term_of)
    engine = made(replace(cut, **how), hooked=hooked)
    assert engine.decoder.path == ("modules" if hooked else "functional")
    before = {n: p.detach().clone() for n, p in learned(engine.module)}
    said = engine.update(batch, nothing)
    assert said[name.partition(" ")[0]] == pytest.approx(term, rel=1e-6)
    assert said["loss"] == 0.0
    found = {n: g for n, g in moved(engine, before).items() if g.any()}
    assert found.keys() == expected.keys()
    assert any(n.endswith(ROUTERS) for n in found)
    assert_close(found, expected, 2e-5)


def test_it_is_added_to_the_loss() -> None:
    batch = weighted()
    both, policy, term = (
        learned_by(made(cut), batch, loss) for cut, loss in ((AUX, pg_loss), (CUT, pg_loss), (AUX, nothing))
    )
    sums = {n: policy.get(n, 0.0) + term.get(n, torch.zeros(())) for n in both}
    assert_close(both, sums, 1e-4)


def test_a_rollout_that_counts_twice_is_two() -> None:
    group = random_groups(count=1, size=2)[0]
    first, second = group.rollouts
    once, copied = (
        replace(batch, weight_N=batch.mask_N / batch.mask_N.sum())
        for batch in (pack([group]), pack([replace(group, rollouts=(first, first, second))]))
    )
    twice = replace(once, count_R=torch.tensor([2.0, 1.0]))
    a, b = (learned_by(made(AUX), batch) for batch in (twice, copied))
    assert_close(a, b, 2e-5)
    c = learned_by(made(AUX), once)
    assert max(error(a[n], c[n]) for n in a) > 1e-3


def test_a_minibatch_of_which_no_rollout_counts_has_no_term() -> None:
    """As of replies that were all cut short, with `finished_only`."""
    batch = weighted()
    none = replace(batch, count_R=torch.zeros(batch.rollouts), weight_N=torch.zeros(batch.tokens))
    engine = made(replace(AUX, router_z=0.7))
    before = {n: p.detach().clone() for n, p in learned(engine.module)}
    said = engine.update(none, pg_loss)
    assert (said["router_z"], said["router_aux"], said["grad_norm"]) == (0.0, 0.0, 0.0)
    assert not any(g.any() for g in moved(engine, before).values())


def test_metrics_by_hand() -> None:
    """All probabilities 1/4, and of equals the first two are taken."""
    engine = made(AUX)
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            if name.endswith(ROUTERS):
                p.zero_()
    said = engine.update(weighted(), nothing)
    assert said["router_aux"] == pytest.approx(4 * 2 * 0.25)
    assert said["router_max_load"] == pytest.approx(2.0)
    assert "router_z" not in said


def test_megatrons_terms_by_hand() -> None:
    """Logits 0 of 4 experts, 2 layers. Layer by layer: 4 / (2 T^2) times 2 experts of T choices and T / 4; twice 1. z:
    twice log(4) squared."""
    engine = made(replace(AUX, router_aux_each=True, router_z=0.1))
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            if name.endswith(ROUTERS):
                p.zero_()
    said = engine.update(weighted(), nothing)
    assert said["router_aux"] == pytest.approx(2 * 4 / 2 * 2 / 4)
    assert said["router_z"] == pytest.approx(2 * math.log(4) ** 2)


def test_both_terms_are_added_up() -> None:
    batch = weighted()
    each = replace(AUX, router_aux_each=True)
    both, aux, z = (
        learned_by(made(cut), batch)
        for cut in (replace(each, router_z=0.1), each, replace(CUT, router_z=0.1))
    )
    assert_close(both, {n: aux[n] + z[n] for n in both}, 1e-4)


def test_the_z_term_takes_no_other_forward_pass() -> None:
    engine = made(replace(CUT, router_z=0.7))
    assert engine.balance is not None
    engine.update(weighted(), nothing)
    assert engine.balance.found is None


def test_routers_learn_to_spread() -> None:
    engine = made(AUX)
    assert engine.optimizer is not None
    engine.optimizer.cfg = BIG.model_copy(update={"lr": 0.05})
    said = [engine.update(weighted(), nothing)["router_aux"] for _ in range(8)]
    assert said[-1] < said[0] - 0.02
    assert said[-1] > 2.0 - 0.2


def test_ranks_have_the_same_term() -> None:
    """Micro-batches of one rollout: where two ranks share three, one computes some that do not count. With the first
    layer dense, the first rank of a pipeline has no router."""
    ranks = started(2)
    batch = select(weighted(), torch.arange(3))
    whole, each = AUX, replace(AUX, router_aux_each=True, router_z=0.05)
    try:
        for dims, loss, given in (
            (Dims(dp_shard=2), pg_loss, whole),
            (Dims(dp_shard=2, ep=2), nothing, whole),
            (Dims(tp=2), nothing, whole),
            (Dims(cp=2), nothing, whole),
            (Dims(pp=2), nothing, whole),
            (Dims(dp_shard=2), pg_loss, each),
            (Dims(tp=2), nothing, each),
            (Dims(cp=2), nothing, each),
            (Dims(pp=2), nothing, each),
            (Dims(pp=2), nothing, (partly_dense, whole)),
            (Dims(pp=2), nothing, (partly_dense, each)),
        ):
            make, cut = given if isinstance(given, tuple) else (partial(tiny_model, "qwen3_moe"), given)
            way, model = Way(replace(cut, max_rollouts=1)), make()
            before = {n: p.detach().clone() for n, p in learned(model)}
            one, many = pair(ranks, Layout(dims), way, model=model, **learning(optimizer=BIG))
            told = [engine.update(batch, loss) for engine in (one, many)]
            assert told[1] == pytest.approx(told[0], rel=5e-6, abs=1e-9)
            assert_close(moved(many, before), moved(one, before), 1e-5)
    finally:
        ranks.close()


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no routers to balance"):
        TorchEngine(tiny_model(), kernels.load("auto"), cut=AUX, **learning())

"""Layers of multi-token prediction: the loss and its gradient written out, whatever the cut; folders and exports; the
policy is the same with and without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from grid import BIG, Layout, Way, moved, pair, started
from test_models import equal, open_model
from test_router_loss import assert_close, learned_by, nothing
from test_train_torch import CUT, pg_loss, random_groups, weighted
from tiny import VOCAB, tiny_model
from whet.batch import Batch, pack, select
from whet.config.schema import ModelConfig, PrecisionConfig
from whet.config.sizes import folder_shape, new_shape
from whet.models import kernels, mtp
from whet.models.attention import PackedAttention, Segments
from whet.models.forward import decoder
from whet.models.load import build, empty, export
from whet.models.lora import learned
from whet.models.mesh import Dims
from whet.models.mtp import MtpLoss
from whet.models.mtp_forward import embedding_of, hidden_of
from whet.models.optim import Optimizer
from whet.models.packing import layout
from whet.rollout.http.published import write_weights
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.training.work import work_of
from whet.types import CheckpointError, ConfigError

COEF = 0.7
TOKENS = MtpLoss(COEF, "nothing", distill=False)
HEAD = replace(TOKENS, detach="head")
ALONE = replace(TOKENS, detach="model")
DISTILL = MtpLoss(COEF, "model", distill=True)
LIKELIEST = replace(DISTILL, top_k=5)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "mimo", "qwen3_moe")
OPS = kernels.load("auto")


def with_layers(family: str = "qwen3", count: int = 2, *, seed: int = 0) -> PreTrainedModel:
    model = tiny_model(family, seed=seed)
    mtp.attach(model, count, seed=seed)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms begin at 1, or 0: then a gradient would not show which is which
        for layer in mtp.layers_of(model):
            for norm in (layer.embedding_norm, layer.hidden_norm, layer.norm):
                norm.weight += 0.3 * torch.randn(norm.weight.shape, generator=gen)
    return model


def experts(seed: int = 0) -> PreTrainedModel:
    """GLM-4.5's kind: no family of which a new model can be made, computed by its own modules."""
    config = AutoConfig.for_model(
        "glm4_moe",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    mtp.attach(model, 1, seed=seed)
    return model


def engine_of(model: PreTrainedModel, loss: MtpLoss | None, **how: Any) -> TorchEngine:
    cut: MicroBatchPolicy = replace(CUT, mtp=loss, **how)
    return TorchEngine(model, OPS, cut=cut, optimizer=BIG)


# ---------------------------------------------------------------- the loss, written out


def oracle(model: PreTrainedModel, batch: Batch, loss: MtpLoss) -> tuple[float, dict[str, Tensor]]:
    """(the mean over layers, gradients of coef times it): float64, strand by strand, the model's own modules."""
    model = model.double()
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    base, head, layers = model.get_decoder(), model.get_output_embeddings(), mtp.layers_of(model)
    sums = [torch.zeros((), dtype=torch.float64) for _ in layers]
    counts = [0.0] * len(layers)
    count_R = torch.ones(batch.rollouts) if batch.count_R is None else batch.count_R
    for segment in range(batch.segments):
        at = batch.segment_N == segment
        ids, mask = batch.token_ids_N[at], batch.mask_N[at]
        if not mask.any():
            continue
        times = float(count_R[batch.rollout_S[segment]])
        hidden = base(input_ids=ids[None]).last_hidden_state[0]
        state = hidden
        for number, layer in enumerate(layers):
            ahead = number + 1
            if len(ids) <= ahead:
                break
            state = state[: len(ids) - ahead]
            embedded = model.get_input_embeddings()(ids[ahead:])
            if loss.detach == "model":
                embedded = embedded.detach()
                if number == 0 or not loss.distill:
                    state = state.detach()
            both = [layer.embedding_norm(embedded), layer.hidden_norm(state)]
            x = layer.project(torch.cat(both[::-1] if layer.names.hidden_first else both, -1))[None]
            seen = torch.full((len(state), len(state)), -torch.inf).triu(1).double()
            window = getattr(model.config, "sliding_window", None)
            if window:
                seen += torch.full_like(seen, -torch.inf).tril(-window)
            positions = torch.arange(len(state))[None]
            out = layer.module(
                x,
                attention_mask=seen[None, None],
                position_ids=positions,
                position_embeddings=base.rotary_emb(x, positions),
            )
            state = layer.norm((out[0] if isinstance(out, tuple) else out)[0])
            weight = head.weight if loss.detach == "nothing" else head.weight.detach()
            logq = (state @ weight.T).log_softmax(-1)
            if loss.distill:
                target = (hidden[ahead:] @ weight.T).detach()
                if loss.top_k is not None:
                    target, compared = target.topk(loss.top_k)
                    logq = (state @ weight.T).gather(1, compared).log_softmax(-1)
                p = target.softmax(-1)
                sums[number] = sums[number] - times * (p * logq).sum()
                counts[number] += times * len(state)
            else:
                for place in range(ahead + 1, len(ids)):
                    if mask[place]:
                        sums[number] = sums[number] - times * logq[place - ahead - 1, ids[place]]
                        counts[number] += times
    mean = torch.stack([total / max(n, 1) for total, n in zip(sums, counts)]).mean()
    (loss.coef * mean).backward()
    return float(mean.detach()), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()
    }


def check(model: PreTrainedModel, again: PreTrainedModel, batch: Batch, loss: MtpLoss, **how: Any) -> None:
    mean, expected = oracle(again, batch, loss)
    engine = engine_of(model, loss, **how)
    before = {n: p.detach().clone() for n, p in learned(engine.module)}
    told = engine.update(batch, nothing)
    assert told["mtp_loss"] == pytest.approx(mean, rel=2e-6)
    assert told["loss"] == 0.0
    found = {n: g for n, g in moved(engine, before).items() if g.any()}
    assert_close(found, expected, 3e-5)


CUTS: list[dict[str, Any]] = [{}, {"share_prompts": False}, {"max_rollouts": 1, "checkpoint": True}]


@pytest.mark.parametrize("how", CUTS, ids=str)
@pytest.mark.parametrize("loss", [TOKENS, HEAD, ALONE, DISTILL, LIKELIEST], ids=str)
def test_gradient_is_that_of_the_loss_written_out(loss: MtpLoss, how: dict[str, Any]) -> None:
    check(with_layers(), with_layers(), weighted(), loss, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    check(with_layers(family, 1), with_layers(family, 1), weighted(), TOKENS)


@pytest.mark.parametrize("how", CUTS, ids=str)
def test_a_model_of_modules(how: dict[str, Any]) -> None:
    check(experts(), experts(), weighted(), HEAD, **how)


def test_offloaded_activations() -> None:
    check(with_layers(), with_layers(), weighted(), TOKENS, offload=("activations",))


def test_strands_and_turns() -> None:
    """Tokens that others wrote are context: no layer learns them; strands are sequences of their own."""
    from batches import ragged

    batch = ragged(3, dtype=torch.float32)
    batch = replace(batch, weight_N=batch.mask_N.float() / batch.mask_N.sum())
    for loss in (TOKENS, DISTILL):
        check(with_layers(), with_layers(), batch, loss)


def test_a_token_without_weight_teaches_nothing_and_a_rollout_that_counts_twice_is_two() -> None:
    group = random_groups(count=1, size=2)[0]
    first, second = group.rollouts
    once, copied = (
        replace(batch, weight_N=batch.mask_N / batch.mask_N.sum())
        for batch in (pack([group]), pack([replace(group, rollouts=(first, first, second))]))
    )
    for loss in (TOKENS, DISTILL):
        twice = replace(once, count_R=torch.tensor([2.0, 1.0]))
        a, b, c = (learned_by(engine_of(with_layers(), loss), batch) for batch in (twice, copied, once))
        assert_close(a, b, 2e-5)
        assert max(float((a[n] - c[n]).abs().max()) for n in a) > 1e-4
    assert once.weight_N is not None
    rejected = replace(once, weight_N=torch.where(once.rollout_N == 0, 0.0, once.weight_N))
    alone = select(once, torch.tensor([1]))
    told = [
        engine_of(with_layers(), TOKENS).update(batch, nothing)["mtp_loss"] for batch in (rejected, alone)
    ]
    assert told[0] == pytest.approx(told[1], rel=1e-6)


def test_the_mean_is_that_of_tokens_that_count_less_than_once() -> None:
    """As in a step whose few groups come several times, in minibatches that share them (`passes.minibatch`)."""
    batch = pack(random_groups(count=1, size=2))
    batch = replace(batch, weight_N=batch.mask_N / batch.mask_N.sum())
    part = replace(batch, count_R=torch.full((batch.rollouts,), 1 / 64))
    for loss in (TOKENS, DISTILL):
        a, b = (learned_by(engine_of(with_layers(), loss), each) for each in (part, batch))
        assert_close(a, b, 2e-5)


def test_no_token_of_another_sequence_is_seen() -> None:
    batch = weighted()
    assert batch.weight_N is not None
    other = select(batch, torch.arange(batch.rollouts - 1))
    changed = torch.where(
        batch.rollout_N == batch.rollouts - 1, (batch.token_ids_N + 1) % VOCAB, batch.token_ids_N
    )
    engine = engine_of(with_layers(), TOKENS)
    hidden = [
        x[: other.tokens]
        for x in (
            engine.forward(batch, "logprobs"),
            engine.forward(replace(batch, token_ids_N=changed), "logprobs"),
        )
    ]
    assert torch.equal(*hidden)
    weight = torch.where(batch.rollout_N == batch.rollouts - 1, 0.0, batch.weight_N)
    told = [
        learned_by(engine_of(with_layers(), TOKENS), each)
        for each in (replace(batch, weight_N=weight), replace(batch, weight_N=weight, token_ids_N=changed))
    ]
    assert_close(told[0], told[1], 1e-6)


# ---------------------------------------------------------------- the policy


@pytest.mark.parametrize("family", ["qwen3", "mimo", "qwen3_moe"])
def test_the_policy_is_the_same_to_the_bit(family: str) -> None:
    batch = weighted()
    plain, more = (engine_of(model, None) for model in (tiny_model(family), with_layers(family)))
    for want in ("logprobs", "entropy"):
        assert torch.equal(plain.forward(batch, want), more.forward(batch, want))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [ALONE, DISTILL], ids=["cross_entropy", "distill"])
def test_layers_that_learn_alone_leave_the_policys_gradient(loss: MtpLoss) -> None:
    """To the bit, but where a token more is computed of each sequence: then sums have another order."""
    batch = weighted()
    plain, more = (learned_by(engine_of(with_layers(), each), batch, pg_loss) for each in (None, loss))
    assert plain.keys() < more.keys()
    if loss.distill:
        assert_close({n: more[n] for n in plain}, plain, 1e-6)
    else:
        assert all(torch.equal(plain[n], more[n]) for n in plain)
    assert all(mtp.is_mtp(n, 2) for n in more.keys() - plain.keys())


def test_the_norm_of_distilled_layers_is_their_own() -> None:
    """So what is clipped of the policy's gradient does not depend on theirs."""
    batch = weighted()
    clipped = BIG.model_copy(update={"lr": 1.0, "max_grad_norm": 1e-3})
    told, steps = [], []
    for loss in (None, replace(DISTILL, coef=100.0), replace(ALONE, coef=100.0)):
        engine = TorchEngine(with_layers(), OPS, cut=replace(CUT, mtp=loss), optimizer=clipped)
        before = {n: p.detach().clone() for n, p in learned(engine.module)}
        told.append(engine.update(batch, pg_loss)["grad_norm"])
        steps.append({n: before[n] - p.detach() for n, p in learned(engine.module)})
    own = [n for n in steps[0] if not mtp.is_mtp(n, 2)]
    assert told[1] == pytest.approx(told[0], rel=1e-6)
    assert told[2] > 2 * told[0]
    assert_close({n: steps[1][n] for n in own}, {n: steps[0][n] for n in own}, 1e-5)
    assert any(not torch.equal(steps[0][n], steps[2][n]) for n in own)
    of_layers = torch.stack([x.square().sum() for n, x in steps[1].items() if mtp.is_mtp(n, 2)])
    assert float(of_layers.sum().sqrt()) == pytest.approx(1e-3, rel=1e-3)


def test_it_is_added_to_the_loss() -> None:
    batch = weighted()
    both, policy, term = (
        learned_by(engine_of(with_layers(), loss), batch, of)
        for loss, of in ((TOKENS, pg_loss), (None, pg_loss), (TOKENS, nothing))
    )
    assert_close(both, {n: policy.get(n, 0.0) + term.get(n, torch.zeros(())) for n in both}, 1e-4)


@pytest.mark.parametrize("loss", [TOKENS, DISTILL], ids=["cross_entropy", "distill"])
def test_layers_learn(loss: MtpLoss) -> None:
    engine = engine_of(with_layers(), loss)
    assert isinstance(engine.optimizer, Optimizer)
    engine.optimizer.cfg = BIG.model_copy(update={"lr": 0.3})
    told = [engine.update(weighted(), nothing)["mtp_loss"] for _ in range(12)]
    assert told[-1] < told[0] - (0.08 if loss.distill else 0.3)  # the policy's own entropy is left


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("share", [True, False])
def test_a_layer_stops_earlier_and_shares_less(share: bool, ahead: int) -> None:
    batch = weighted()
    plan = layout(batch, share_prompts=share, ahead=ahead)
    assert torch.equal(plan.token_ids_U, batch.token_ids_N[plan.at_U])
    assert plan.segments.tokens == len(plan.at_U)
    assert torch.equal(plan.segments.position_N, plan.position_U)
    for n in torch.nonzero(batch.mask_N).flatten().tolist():
        row = int(plan.predictor_N[n])
        if int(batch.position_N[n]) <= ahead:
            assert row == -1
            continue
        at = int(plan.at_U[row])
        start, own = int(batch.start_S[batch.segment_N[at]]), int(batch.start_S[batch.segment_N[n]])
        length = int(batch.position_N[n])  # the row has the same tokens before it and `ahead` after it
        assert int(batch.position_N[at]) == length - 1 - ahead
        assert torch.equal(batch.token_ids_N[start : start + length], batch.token_ids_N[own : own + length])


# ---------------------------------------------------------------- ranks


def test_ranks_have_the_same_term() -> None:
    ranks = started(2)
    batch = select(weighted(), torch.arange(3))
    cases: Sequence[tuple[Dims, MtpLoss, Any]] = (
        (Dims(dp_shard=2), TOKENS, with_layers),
        (Dims(dp_replicate=2), HEAD, with_layers),
        (Dims(dp_shard=2), DISTILL, with_layers),
        (Dims(dp_shard=2), ALONE, experts),
    )
    try:
        for dims, loss, make in cases:
            way = Way(replace(CUT, mtp=loss, max_rollouts=1))
            model = make()
            before = {n: p.detach().clone() for n, p in learned(model)}
            one, many = pair(ranks, Layout(dims), way, model=model, optimizer=BIG)
            assert torch.allclose(one.forward(batch, "logprobs"), many.forward(batch, "logprobs"), atol=1e-6)
            told = [engine.update(batch, pg_loss) for engine in (one, many)]
            assert told[1] == pytest.approx(told[0], rel=5e-6, abs=1e-8)
            assert_close(moved(many, before), moved(one, before), 1e-5)
    finally:
        ranks.close()


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_round_trips(family: str, tmp_path: Path) -> None:
    model = with_layers(family)
    export(model, None, tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    assert config["num_hidden_layers"] == 2
    names = load_file(tmp_path / "a/model.safetensors").keys()
    if family == "mimo":
        assert "model.mtp_layers.1.input_proj.weight" in names
        assert config["architectures"] == ["MiMoForCausalLM"]
    else:
        assert {f"model.layers.3.{n}.weight" for n in ("eh_proj", "shared_head.head", "embed_tokens")} < names
    assert equal(model, open_model(tmp_path / "a", mtp="cross_entropy"))
    plain = open_model(tmp_path / "a")
    assert equal(plain, tiny_model(family))
    assert plain.config.num_nextn_predict_layers == 0


def test_stacks_of_experts_round_trip(tmp_path: Path) -> None:
    model = experts()
    export(model, None, tmp_path / "a")
    names = load_file(tmp_path / "a/model.safetensors").keys()
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in names
    assert equal(model, open_model(tmp_path / "a", mtp="cross_entropy"))


@pytest.mark.parametrize("make", [with_layers, lambda: with_layers("mimo"), experts])
def test_exports_keep_layers_that_are_not_loaded(make: Any, tmp_path: Path) -> None:
    export(make(), None, tmp_path / "a")
    model = open_model(tmp_path / "a")
    with torch.no_grad():
        model.get_output_embeddings().weight += 1.0
    export(model, None, tmp_path / "b", origin=tmp_path / "a")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    layers = model.config.num_hidden_layers
    ahead = [n for n in a if mtp.is_mtp(n, layers)]
    assert ahead
    copies = [n for n in ahead if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
    assert all(torch.equal(a[n], b[n]) for n in set(ahead) - set(copies))
    for name in copies:
        assert torch.equal(
            b[name], b.get("lm_head.weight" if "head" in name else "", b["model.embed_tokens.weight"])
        )
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in "ab"]
    assert configs[0] == configs[1]
    assert model.config.num_nextn_predict_layers == 0


def test_transformers_opens_it_and_reads_its_layers(tmp_path: Path) -> None:
    model = with_layers("llama", 1)
    export(model, None, tmp_path / "a")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    ids = torch.arange(5)[None]
    assert torch.allclose(opened(ids).logits, tiny_model("llama")(ids).logits, atol=1e-5)


def test_new_layers_of_a_folder_without_them(tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "a")
    with pytest.raises(ConfigError, match="has no layers of multi-token prediction; give the number"):
        open_model(tmp_path / "a", mtp="distill")
    model = open_model(tmp_path / "a", mtp={"layers": 2})
    assert len(mtp.layers_of(model)) == 2
    assert equal(model, open_model(tmp_path / "a", mtp={"layers": 2}))


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    model = with_layers()
    export(model, None, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"model.mtp.layers=1: .* has 2"):
        open_model(tmp_path / "a", mtp={"layers": 1})
    mtp.layers_of(model)[0].module.eh_proj = torch.nn.Linear(32, 32, bias=False)
    export(model, None, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight has the shape"):
        open_model(tmp_path / "b", mtp="cross_entropy")


def test_layers_that_the_config_does_not_count_are_no_such_layers(tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1"):
        open_model(tmp_path / "a", overrides={"num_hidden_layers": 1, "layer_types": ["full_attention"]})


def test_new_models_have_layers_by_their_seed() -> None:
    def made(seed: int) -> PreTrainedModel:
        return build(
            ModelConfig(
                scratch={"name": "mimo", "hidden_size": 32, "num_hidden_layers": 1}, mtp={"layers": 2}
            ),
            vocab_size=VOCAB,
            eos_token_id=1,
            pad_token_id=0,
            seed=seed,
            device="cpu",
            dtype=torch.float32,
        )

    torch.manual_seed(1)
    first = made(5)
    torch.manual_seed(2)
    assert equal(first, made(5))
    assert not equal(first, made(6))
    assert len(mtp.layers_of(first)) == 2


def test_families_without_known_layers_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=VOCAB)
    )
    with pytest.raises(ConfigError, match="layers of gpt2 are not supported"):
        mtp.attach(model, 1, seed=0)


def test_layers_are_removed() -> None:
    for family in ("qwen3", "mimo"):
        model = with_layers(family)
        mtp.remove(model)
        assert equal(model, tiny_model(family))


def test_servers_get_the_layers_that_they_know(tmp_path: Path) -> None:
    for family, known in (("qwen3", False), ("mimo", True)):
        model = with_layers(family)
        (tmp_path / family).mkdir()
        write_weights(model, tmp_path / family)
        names = load_file(tmp_path / family / "model.safetensors").keys()
        assert names == {n for n in model.state_dict() if known or not mtp.is_mtp(n, 2)}


def test_an_engine_elsewhere_has_the_same_parameters() -> None:
    for model in (with_layers("mimo"), with_layers(), tiny_model()):
        made = empty(model.config.to_dict(), dtype=torch.float32, device="cpu", seed=3)
        assert [n for n, _ in made.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mimo", "qwen3_moe"])
def test_the_plan_counts_them(family: str) -> None:
    given = ModelConfig(
        scratch={"name": family, "hidden_size": 32, "num_hidden_layers": 2}, mtp={"layers": 3}
    )
    model = build(
        given, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0, seed=0, device="cpu", dtype=torch.float32
    )
    size = sum(p.numel() for p in model.parameters())
    assert new_shape(given, vocab_size=VOCAB).parameters == size


def test_the_plan_counts_those_of_a_folder(tmp_path: Path) -> None:
    model = with_layers("mimo")
    export(model, None, tmp_path / "a")
    both, plain = (
        folder_shape(tmp_path / "a", {}, model=ModelConfig(path=str(tmp_path / "a"), mtp=said)).parameters
        for said in ("distill", None)
    )
    assert both == sum(p.numel() for p in model.parameters())
    mtp.remove(model)
    assert plain == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("make", [with_layers, experts])
def test_half_precision(make: Any) -> None:
    """Layers computed in bfloat16, and a model in float16 whose loss is scaled: near float32."""
    batch = weighted()
    exact = engine_of(make(), TOKENS).update(batch, pg_loss)
    computed = engine_of(make(), TOKENS, precision=PrecisionConfig(compute="bfloat16")).update(batch, pg_loss)
    half = engine_of(make().half(), TOKENS, precision=PrecisionConfig(loss_scale=8.0)).update(batch, pg_loss)
    for told in (computed, half):
        for name in ("mtp_loss", "grad_norm"):
            assert told[name] == pytest.approx(exact[name], rel=0.05)


@pytest.mark.parametrize("family", ["qwen3", "mimo"])
def test_the_work_of_a_rollout_is_that_of_the_policy(family: str) -> None:
    assert work_of(with_layers(family), output=True) == work_of(tiny_model(family), output=True)


def test_transformers_reads_the_export_and_computes_the_same(tmp_path: Path) -> None:
    """Its own model of such layers, which drafts in its `generate`, from the names of GLM-4.5."""
    model = experts()
    export(model, None, tmp_path / "a")
    main = AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager").eval()
    main._keys_to_ignore_on_load_unexpected = [
        r"model\.layers\.2.*"
    ]  # by which it finds them; GLM's are 46 and 92
    theirs = MtpModel.from_pretrained(main).eval()
    ids, places = torch.arange(3, 11), torch.arange(7)[None]
    whole, part = (PackedAttention(Segments.of_lengths(torch.tensor([n])), OPS) for n in (8, 7))
    with torch.no_grad():
        hidden = main.model(ids[None]).last_hidden_state
        expected = theirs.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[None, 1:])
        own = decoder(model, OPS).hidden(ids, torch.arange(8), whole)
        (layer,) = hidden_of(model, mtp.layers_of(model), OPS)
        found = layer(embedding_of(model)(ids[1:]), own[:-1], places[0], part, checkpoint=False)
    assert torch.allclose(own, hidden[0], atol=1e-5)
    assert torch.allclose(found, expected[0], atol=1e-5)

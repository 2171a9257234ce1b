"""Adapters: gradients, what shares what, the same bits in sampling and training, folders, and whole runs."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

import whet
from grid import BIG, Layout, Way, error, learning, moved, pair, started
from swept import except_for
from test_train_torch import pg_loss, weighted
from tiny import FAMILIES, VOCAB, tiny_model
from whet.config.describe import facts
from whet.config.learns import learns
from whet.config.load import load
from whet.config.plan import plans
from whet.config.schema import LoraConfig, OptimizerConfig
from whet.models import kernels
from whet.models.dropout import Noise
from whet.models.forward import decoder
from whet.models.load import export
from whet.models.logprob_parity import self_test
from whet.models.lora import (
    adapted,
    adapted_weights,
    attach,
    dropping,
    export_adapter,
    learned,
    merged,
    refresh,
    twin,
)
from whet.models.lora_layers import Adapted
from whet.models.mesh import Dims
from whet.models.muon import Muon
from whet.models.products import Everywhere, chosen
from whet.models.trainable import choose
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, ConfigError

IDS = torch.arange(2, 14)[None]
ROOT = Path(__file__).parents[1]


def with_adapters(
    lora: LoraConfig | None = None, *, family: str = "qwen3", seed: int = 0, moved: bool = True
) -> PreTrainedModel:
    """A tiny model whose adapters do something."""
    model = tiny_model(family)
    attach(model, lora or LoraConfig(rank=4), seed=seed)
    if moved:
        gen = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in adapted(model).values():
                layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=gen) * 0.1)
        refresh(model)
    return model


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# ---------------------------------------------------------------- arithmetic


def test_gradients_are_finite_differences() -> None:
    gen = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64, requires_grad=True)

    weight, bias = draw(5, 4).detach(), draw(5).detach()

    def layer(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return Adapted.apply(x, (weight + 0.7 * b @ a).detach(), bias, a, b, 0.7)

    assert torch.autograd.gradcheck(layer, (draw(2, 3, 4), draw(2, 4), draw(5, 2)))


def noted(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """Gradients of the next update, by name, once it is done."""
    seen: dict[str, torch.Tensor] = {}

    def clip() -> float:
        seen.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})
        return 1.0

    assert engine.optimizer is not None
    engine.optimizer.clip = clip  # type: ignore[method-assign,assignment]
    return seen


def check_gradients(model: PreTrainedModel, family: str) -> None:
    """The packed engine with adapters against autograd through W + s B A put into transformers' model, rollout by
    rollout."""
    engine = TorchEngine(
        model, kernels.load("auto"), cut=MicroBatchPolicy(max_tokens=40), optimizer=OptimizerConfig(lr=0.0)
    )
    seen, batch = noted(engine), weighted()
    loss = engine.update(batch, pg_loss)["loss"]

    plain = tiny_model(family)
    own = {n: p.detach().clone().requires_grad_() for n, p in learned(model)}
    name_of = {id(p): n for n, p in learned(model)}
    weights: dict[str, torch.Tensor] = {}
    for name, layer in adapted_weights(model).items():
        a, b = (own[name_of[id(p)]] for p in (layer.lora_A, layer.lora_B))
        weights[name] = layer.weight.detach() + layer.scale * b @ a
    total = torch.zeros(())
    for row in range(batch.rollouts):
        at_N = batch.rollout_N == row
        ids = batch.token_ids_N[at_N]
        logp = functional_call(plain, weights, (), {"input_ids": ids[None]}).logits[0].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).detach()
        taken = logp[:-1].gather(1, ids[1:, None]).squeeze(1)
        assert batch.adv_N is not None
        assert batch.weight_N is not None
        lost = -taken * batch.adv_N[at_N][1:] - 0.1 * entropy[:-1]
        total = total + (lost * batch.weight_N[at_N][1:]).sum()
    total.backward()
    assert loss == pytest.approx(float(total.detach()), abs=1e-5)
    assert seen.keys() == own.keys(), "adapters have gradients, and nothing else has"
    for name, p in own.items():
        assert p.grad is not None
        torch.testing.assert_close(seen[name], p.grad, atol=2e-6, rtol=2e-4)
        assert float(p.grad.abs().max()) > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma", "qwen3_moe"])
def test_gradients_are_those_of_an_explicit_sum(family: str) -> None:
    check_gradients(with_adapters(family=family), family)


def test_sampling_stays_exact_with_adapters() -> None:
    """Where products keep their law: to the same bits, with adapters that do something. Elsewhere: as without them."""
    ops = kernels.load("auto")
    reports = [
        self_test(decoder(model, ops), ops, vocab_size=VOCAB, seed=0, groups=3, long_prompt=70)
        for model in (tiny_model(), with_adapters())
    ]
    assert reports[1].exact or not chosen().lawful
    assert reports[1].exact == reports[0].exact
    assert reports[1].mismatches <= reports[0].mismatches


def test_scales_by_hand() -> None:
    """alpha / rank, or alpha / sqrt(rank); a pattern gives some layers their own."""
    lora = LoraConfig(
        rank=4, alpha=8.0, rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.1\.mlp\.\w+": 1.0}
    )
    for rslora, wanted in ((False, (8 / 4, 8 / 2, 1 / 4)), (True, (8 / 2, 8 / 2**0.5, 1 / 2))):
        layers = adapted(with_adapters(lora.model_copy(update={"rslora": rslora})))
        names = ("layers.0.self_attn.k_proj", "layers.0.self_attn.q_proj", "layers.1.mlp.up_proj")
        got = [layers[f"model.{name}"].scale for name in names]
        assert got == pytest.approx(wanted)
    assert layers["model.layers.0.self_attn.q_proj"].lora_A.shape == (2, 32)


@pytest.mark.parametrize(
    ("targets", "count"),
    [("all-linear", 14), (("q_proj", "layers.1.mlp.up_proj"), 3), (r".*layers\.0.*\.(q|v)_proj", 2)],
)
def test_what_gets_adapters(targets: Any, count: int) -> None:
    model = with_adapters(LoraConfig(rank=2, targets=targets))
    assert len(adapted(model)) == count
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n, _ in learned(model)}
    assert len(list(learned(model))) == 2 * count


@pytest.mark.parametrize(
    ("exclude", "count"),
    [
        (("q_proj", "layers.1.mlp.up_proj"), 11),  # 2 layers of 7 matrices
        (r".*layers\.0.*", 7),
        (".*visual.*", 14),
        (("lm_head",), 14),
        ((), 14),
    ],
)
def test_what_is_excluded_gets_no_adapter(exclude: Any, count: int) -> None:
    lora = LoraConfig(rank=2, exclude_modules=exclude)
    model = with_adapters(lora)
    assert len(adapted(model)) == count
    counted = learns({n: tuple(p.shape) for n, p in tiny_model().named_parameters()}, lora, {})
    assert counted.adapters == sum(p.numel() for _, p in learned(model)), "a plan counts the same"
    both = with_adapters(LoraConfig(rank=2, targets=("q_proj", "k_proj"), exclude_modules=("q_proj",)))
    assert sorted(adapted(both)) == [f"model.layers.{n}.self_attn.k_proj" for n in (0, 1)]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (LoraConfig(exclude_modules=("q_pro",)), "exclude_modules: no linear layer's name ends with 'q_pro'"),
        (LoraConfig(exclude_modules=".*"), "excluded"),
        (LoraConfig(targets=("no_such",)), "no_such"),
        (LoraConfig(targets=("lm_head",)), "lm_head cannot have an adapter"),
        (LoraConfig(targets=("embed_tokens",)), "embed_tokens cannot have an adapter"),
        (LoraConfig(modules_to_save=("nothing",)), "modules_to_save.*'nothing'"),
        (LoraConfig(targets=("o_proj", "q_proj"), fused=True), "fused: no two layers with adapters"),
        (LoraConfig(rank_pattern={"q_proj": 2}, fused=True), "q_proj and .*k_proj have different ranks"),
        (LoraConfig(rank_pattern={"qq": 2}), "rank_pattern.*'qq'"),
        (LoraConfig(modules_to_save=("mlp",)), "'mlp' has adapters"),
    ],
)
def test_names_that_fit_nothing_are_refused(lora: LoraConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        attach(tiny_model(), lora, seed=0)


@pytest.mark.parametrize("init", ["default", "gaussian", "xavier", "orthogonal", "olora", "pissa"])
def test_beginnings_change_nothing(init: Any) -> None:
    """The model's own products are those of the adapters here: torch's may round otherwise."""
    with Everywhere():
        want = tiny_model()(input_ids=IDS).logits
        got = with_adapters(LoraConfig(rank=4, init=init), moved=False)(input_ids=IDS).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    if init in ("default", "gaussian", "xavier"):
        assert torch.equal(got, want)


def test_the_deviation_of_a_beginning() -> None:
    """At rank 64 over 32 inputs: Xavier's is sqrt(2 / 96), and Kaiming's uniform ends at 1 / sqrt(32)."""
    drawn = {}
    for init in ("default", "xavier"):
        model = with_adapters(LoraConfig(rank=64, init=init, targets=("q_proj",)), moved=False)  # type: ignore[arg-type]
        drawn[init] = torch.cat([layer.lora_A.detach().flatten() for layer in adapted(model).values()])
    assert float(drawn["xavier"].std()) == pytest.approx((2 / 96) ** 0.5, rel=0.05)
    assert float(drawn["xavier"].abs().max()) > 3 * (2 / 96) ** 0.5, "normal, not uniform"
    assert float(drawn["default"].abs().max()) == pytest.approx(32**-0.5, rel=0.01)


def test_pissa_takes_the_largest_directions() -> None:
    name = "model.layers.0.mlp.up_proj"
    layer = adapted(with_adapters(LoraConfig(rank=4, init="pissa"), moved=False))[name]
    weight = tiny_model().get_submodule(name).weight.detach()
    u, s, vh = torch.linalg.svd(weight)
    torch.testing.assert_close(
        layer.scale * layer.lora_B @ layer.lora_A, (u[:, :4] * s[:4]) @ vh[:4], atol=1e-4, rtol=1e-3
    )
    quick = adapted(with_adapters(LoraConfig(rank=4, init="pissa_niter_2"), moved=False))[name]
    assert not torch.equal(quick.lora_A, layer.lora_A)


def test_the_seed_alone_decides() -> None:
    state = torch.get_rng_state()
    a, b, c = (bits(with_adapters(LoraConfig(init="random"), seed=s, moved=False)) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a if "lora_" in n)


# ---------------------------------------------------------------- fused layers

FUSED = LoraConfig(rank=4, fused=True)
BLOCKS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


@pytest.mark.parametrize("ending", BLOCKS)
def test_fused_layers_are_one_layer_with_one_adapter(ending: str) -> None:
    """W stacked, B stacked, A once: what Megatron-LM computes for queries, keys and values, and for gate and up."""
    model = with_adapters(FUSED)
    block = model.model.layers[1].get_submodule(ending)
    layers = [block.get_submodule(name) for name in BLOCKS[ending]]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weight, b = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "lora_B"))
    a = layers[0].lora_A
    want = x @ weight.T + layers[0].scale * (x @ a.T) @ b.T
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], -1), want, atol=1e-5, rtol=1e-4)
    assert all(layer.lora_A is a for layer in layers)
    assert layers[0].scale == 32 / 4


def test_one_a_is_learned_once_and_counted_once() -> None:
    model = with_adapters(FUSED)
    names = [n.removeprefix("model.layers.0.") for n, _ in learned(model) if ".0." in n and "lora_A" in n]
    assert names == [
        f"{at}.lora_A" for at in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    counted = learns({n: tuple(p.shape) for n, p in tiny_model().named_parameters()}, FUSED, {})
    assert counted.adapters == sum(p.numel() for _, p in learned(model))
    other = twin(model)
    attention = other.model.layers[0].self_attn
    assert attention.q_proj.lora_A is attention.k_proj.lora_A is attention.v_proj.lora_A
    assert attention.q_proj.lora_A is not model.model.layers[0].self_attn.q_proj.lora_A


def gradients(lora: LoraConfig, values: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Of what learns, in an update of the packed engine; values: of A and B, by name."""
    model = with_adapters(lora)
    with torch.no_grad():
        for name, p in model.named_parameters(remove_duplicate=False):
            if values is not None and name in values:
                p.copy_(values[name])
    refresh(model)
    engine = TorchEngine(
        model, kernels.load("auto"), cut=MicroBatchPolicy(max_tokens=40), optimizer=OptimizerConfig(lr=0.0)
    )
    seen = noted(engine)
    engine.update(weighted(), pg_loss)
    return seen


def test_the_gradient_of_one_a_is_the_sum_of_its_layers() -> None:
    """Against layers with an A of their own, all of the same numbers."""
    model = with_adapters(FUSED)
    values = {
        n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False) if "lora_" in n
    }
    fused = gradients(FUSED)
    apart = gradients(FUSED.model_copy(update={"fused": False}), values)
    for at, endings in BLOCKS.items():
        name = f"model.layers.0.{at}.{{}}.lora_A"
        want = sum((apart[name.format(ending)] for ending in endings), torch.zeros(()))
        torch.testing.assert_close(fused[name.format(endings[0])], want, atol=1e-5, rtol=1e-4)
    for name in fused.keys() - {
        f"model.layers.{n}.{at}.{e[0]}.lora_A" for n in (0, 1) for at, e in BLOCKS.items()
    }:
        torch.testing.assert_close(fused[name], apart[name], atol=1e-6, rtol=1e-4)


def test_fused_layers_drop_the_same_features() -> None:
    model = with_adapters(FUSED.model_copy(update={"dropout": 0.4}))
    with dropping(model, Noise(torch.arange(6), key=3)):
        attention = model.model.layers[0].self_attn
        masks = [
            layer.noise.drop(torch.ones(6, 32), 0.4)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        ]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[3])


def test_a_folder_with_several_a_is_not_that_of_fused_layers(tmp_path: Path) -> None:
    apart = FUSED.model_copy(update={"fused": False})
    export_adapter(with_adapters(apart), tmp_path / "a", cfg=apart, base=None)
    with pytest.raises(
        CheckpointError, match=r"k_proj.lora_A.weight differs from .*q_proj.*set fused to false"
    ):
        attach(tiny_model(), FUSED.model_copy(update={"path": str(tmp_path / "a")}), seed=0)


def test_fused_layers_on_ranks_are_those_of_one_process() -> None:
    ranks = started(2)
    way = Way(MicroBatchPolicy(max_tokens=30))
    try:
        for dims in (Dims(dp_shard=2), Dims(dp_replicate=2), Dims(tp=2), Dims(pp=2), Dims(cp=2)):
            model = with_adapters(FUSED.model_copy(update={"dropout": 0.3}))
            before = bits(model)
            one, many = pair(ranks, Layout(dims), way, model=model, **learning(optimizer=BIG))
            told = [engine.update(weighted(), pg_loss) for engine in (one, many)]
            assert told[1] == pytest.approx(told[0], rel=1e-5, abs=1e-7)
            found, want = moved(many, before), moved(one, before)
            assert found.keys() == want.keys()
            assert "model.layers.0.self_attn.q_proj.lora_A" in want
            assert max(error(found[n], want[n]) for n in want) < 1e-4
            attention = many.module.model.layers[0].self_attn
            assert attention.q_proj.lora_A is attention.v_proj.lora_A
    finally:
        ranks.close()


# ---------------------------------------------------------------- dropout


def dropped_gradients(
    cut: MicroBatchPolicy, *, seed: int = 0, dropout: float = 0.4
) -> tuple[dict[str, torch.Tensor], float]:
    model = with_adapters(LoraConfig(rank=4, dropout=dropout))
    engine = TorchEngine(model, kernels.load("auto"), cut=cut, optimizer=OptimizerConfig(lr=0.0), seed=seed)
    seen = noted(engine)
    return seen, engine.update(weighted(), pg_loss)["loss"]


@pytest.mark.parametrize(
    "cut",
    [
        MicroBatchPolicy(max_tokens=1),
        MicroBatchPolicy(max_rollouts=2),
        MicroBatchPolicy(share_prompts=False),
        MicroBatchPolicy(checkpoint=True, max_tokens=30),
    ],
)
def test_what_is_dropped_does_not_depend_on_the_cut(cut: MicroBatchPolicy) -> None:
    want, loss = dropped_gradients(MicroBatchPolicy())
    got, same = dropped_gradients(cut)
    assert same == pytest.approx(loss, abs=1e-5)
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, atol=1e-5, rtol=1e-3)
    other, _ = dropped_gradients(cut, seed=1)
    none, _ = dropped_gradients(cut, dropout=0.0)
    assert all(float((other[n] - g).norm() / g.norm()) > 0.05 for n, g in want.items())
    assert all(float((none[n] - g).norm() / g.norm()) > 0.05 for n, g in want.items())


def test_the_share_that_is_dropped() -> None:
    """Independent between tokens, features and layers; what stays is scaled so that the mean stays."""
    noise = Noise(torch.arange(400), key=7)
    one, two = (noise.of(layer).drop(torch.ones(400, 300), 0.3) for layer in ("a", "b"))
    assert one.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    zero_one, zero_two = one == 0, two == 0
    n = zero_one.numel()
    for share, want in ((zero_one, 0.3), (zero_one & zero_two, 0.09), (zero_one[1:] & zero_one[:-1], 0.09)):
        assert float(share.double().mean()) == pytest.approx(want, abs=5 * (want / n) ** 0.5)
    across = zero_one[:, 1:] & zero_one[:, :-1]
    assert float(across.double().mean()) == pytest.approx(0.09, abs=5 * (0.09 / n) ** 0.5)


def test_nothing_is_dropped_where_nothing_learns() -> None:
    a, b = (
        TorchEngine(
            with_adapters(LoraConfig(rank=4, dropout=p)), kernels.load("auto"), cut=MicroBatchPolicy()
        )
        for p in (0.0, 0.9)
    )
    assert torch.equal(a.forward(weighted(), "logprobs"), b.forward(weighted(), "logprobs"))


# ---------------------------------------------------------------- copies and folders


def test_a_twin_shares_the_base_and_stays() -> None:
    model = with_adapters()
    other = twin(model)
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    own = {n for n, _ in learned(model)}
    assert all((mine[n] is theirs[n]) == (n not in own) for n in mine)
    before = other(input_ids=IDS).logits
    assert torch.equal(before, model(input_ids=IDS).logits)
    with torch.no_grad():
        mine["model.layers.0.mlp.up_proj.lora_A"].mul_(2)
    refresh(model)
    assert torch.equal(other(input_ids=IDS).logits, before)
    assert not torch.equal(model(input_ids=IDS).logits, before)


def test_effective_weights_stay_where_they_are() -> None:
    """Captured graphs hold addresses: new values have to come to the old ones."""
    model = with_adapters(moved=False)
    layer = adapted(model)["model.layers.0.mlp.up_proj"]
    assert layer.effective is None
    places = []
    for scale in (1.0, 2.0, 0.0):
        with torch.no_grad():
            layer.lora_B.fill_(scale)
        refresh(model)
        assert layer.effective is not None
        places.append(layer.effective.data_ptr())
        want = layer.weight + layer.scale * layer.lora_B @ layer.lora_A
        torch.testing.assert_close(layer.effective, want.detach())
    assert len(set(places)) == 1
    assert "effective" not in model.state_dict()


def test_without_adapters_a_twin_is_a_copy() -> None:
    model = tiny_model()
    mine, theirs = dict(model.named_parameters()), dict(twin(model).named_parameters())
    assert all(torch.equal(mine[n], theirs[n]) and mine[n] is not theirs[n] for n in mine)
    assert all(p.requires_grad for p in mine.values())


def test_engines_give_weights_by_their_names() -> None:
    model = with_adapters()
    ops = kernels.load("auto")
    plain = TorchEngine(tiny_model(), ops, cut=MicroBatchPolicy())
    plain.copy_from(TorchEngine(model, ops, cut=MicroBatchPolicy()))
    with Everywhere():
        assert torch.equal(plain.module(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_the_exported_model_is_the_trained_one(tmp_path: Path) -> None:
    model = with_adapters(LoraConfig(rank=4, modules_to_save=("norm",)))
    export(merged(model), None, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    with Everywhere():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert adapted(model), "the export leaves the model as it was"


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, rslora=True, rank_pattern={"q_proj": 2}),
        # the first fits; in the order of the alphabet, in which peft writes, the other would
        LoraConfig(rank=4, alpha_pattern={"q_proj": 3.0, r"layers\.0\.self_attn\.q_proj": 11.0}),
        LoraConfig(modules_to_save=("norm",)),
        LoraConfig(exclude_modules=("up_proj",)),
        FUSED,
    ],
)
def test_exported_adapters_open_in_peft_and_here(tmp_path: Path, lora: LoraConfig) -> None:
    model = with_adapters(lora)
    if lora.modules_to_save:
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)
    want = model(input_ids=IDS).logits
    export_adapter(model, tmp_path / "a", cfg=lora, base="somewhere")
    theirs = PeftModel.from_pretrained(tiny_model(), tmp_path / "a")
    torch.testing.assert_close(theirs(input_ids=IDS).logits, want, atol=1e-5, rtol=1e-4)
    ours = with_adapters(lora.model_copy(update={"path": str(tmp_path / "a")}), seed=5, moved=False)
    assert torch.equal(ours(input_ids=IDS).logits, want)
    for other, said in (
        (lora.model_copy(update={"alpha": 3.0}), "lora_alpha"),
        (replace_targets(lora), "differ in"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=said):
            attach(tiny_model(), other.model_copy(update={"path": str(tmp_path / "a")}), seed=0)


@pytest.mark.parametrize("ending", ["embed_tokens", "lm_head"])
def test_tied_weights_that_learn_in_full_open_in_peft_and_here(tmp_path: Path, ending: str) -> None:
    """peft gives each module of modules_to_save weights of its own, so the folder has both of the two."""
    lora = LoraConfig(rank=4, modules_to_save=(ending,))
    model = with_adapters(lora)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    want = model(input_ids=IDS).logits
    export_adapter(model, tmp_path / "a", cfg=lora, base=None)
    theirs = PeftModel.from_pretrained(tiny_model(), tmp_path / "a")
    torch.testing.assert_close(theirs(input_ids=IDS).logits, want, atol=1e-5, rtol=1e-4)
    reading = lora.model_copy(update={"path": str(tmp_path / "a")})
    assert torch.equal(with_adapters(reading, seed=5, moved=False)(input_ids=IDS).logits, want)
    file = tmp_path / "a/adapter_model.safetensors"
    untied = load_file(file)
    untied["base_model.model.lm_head.weight"].mul_(2.0)
    save_file(untied, file)
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight differs from .*embed_tokens.weight, but .* ties"
    ):
        attach(tiny_model(), reading, seed=0)


@pytest.mark.parametrize(
    ("began", "init", "said"),
    [
        ("pissa", "default", "the weights under them would be other ones; set model.lora.init to pissa"),
        ("olora", "pissa", "set model.lora.init to olora"),
        (True, "pissa", "set model.lora.init to default"),
        ("pissa_niter_4", "pissa_niter_4", "convert them with peft"),
        ("corda", "default", "convert them with peft"),
    ],
)
def test_adapters_over_another_base_are_refused(tmp_path: Path, began: Any, init: Any, said: str) -> None:
    """What takes a part of the weights to begin with is an adapter of what was left of them."""
    lora = LoraConfig(rank=4)
    export_adapter(with_adapters(lora), tmp_path / "a", cfg=lora, base=None)
    file = tmp_path / "a/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "init_lora_weights": began}))
    reading = LoraConfig(rank=4, init=init, path=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match=said):
        attach(tiny_model(), reading, seed=0)


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "pissa", "olora"])
def test_adapters_of_any_beginning_that_is_alike_every_time_are_read(tmp_path: Path, init: Any) -> None:
    lora = LoraConfig(rank=4, init=init)
    model = with_adapters(lora)
    export_adapter(model, tmp_path / "a", cfg=lora, base=None)
    again = with_adapters(lora.model_copy(update={"path": str(tmp_path / "a")}), seed=5, moved=False)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([], "adapter_config.json: expected a JSON object"),
        ({"r": "4"}, "its adapters use {'r': '4'}; set the same rank"),
        (
            {"alpha_pattern": {"q_proj": 99}},
            "its adapters use {'alpha_pattern': {'q_proj': 99}}; set the same rank",
        ),
        ({"use_dora": True}, "its adapters use {'use_dora': True}"),
        ({"layer_replication": [[1, 2], [0, 1]]}, "its adapters use {'layer_replication': "),
        ({"alora_invocation_tokens": [1, 2]}, "its adapters use {'alora_invocation_tokens': "),
        (
            {"peft_type": "IA3"},
            "its adapters use {'peft_type': 'IA3'}.*types other than plain LoRA cannot be read",
        ),
        ("[" * 100_000, "nest more than 50 levels"),
        ('{"r": 4, "r": 8}', "the key 'r' is given twice"),
    ],
)
def test_adapters_that_mean_something_else_are_refused(tmp_path: Path, told: Any, said: str) -> None:
    lora = LoraConfig(rank=4)
    export_adapter(with_adapters(lora), tmp_path / "a", cfg=lora, base=None)
    file = tmp_path / "a/adapter_config.json"
    if isinstance(told, dict):
        told = {**json.loads(file.read_text()), **told}
    file.write_text(told if isinstance(told, str) else json.dumps(told))
    with pytest.raises((ConfigError, CheckpointError), match=f"model.lora.path=.*{said}"):
        attach(tiny_model(), lora.model_copy(update={"path": str(tmp_path / "a")}), seed=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.to(torch.int8), "has dtype torch.int8, expected float16, bfloat16"),
        (lambda t: t.to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn, expected float16"),
        (lambda t: t / 0 * 0, "lora_A.weight has numbers that are not finite"),
        (lambda t: t.double() * 1e300, "lora_A.weight has numbers that are not finite in torch.float32"),
    ],
)
def test_adapters_of_numbers_that_are_none_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    lora = LoraConfig(rank=4)
    export_adapter(with_adapters(lora), tmp_path / "a", cfg=lora, base=None)
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({name: change(t) for name, t in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=said):
        attach(tiny_model(), lora.model_copy(update={"path": str(tmp_path / "a")}), seed=0)


def replace_targets(lora: LoraConfig) -> LoraConfig:
    return lora.model_copy(update={"targets": ("q_proj", "k_proj")})


# ---------------------------------------------------------------- runs


def share_of_a(response: str, task: whet.Task) -> float:
    return response.count("a") / max(len(response), 1)


SETUP: dict[str, Any] = {
    "model": {
        "scratch": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
        },
        "lora": {"rank": 8},
    },
    "tokenizer": {"build": "chars"},
    "machine": {"threads": 1},
    "track": {"trackers": ["jsonl"]},
    "data": {"max_prompt_tokens": 8, "train": [{"path": str(ROOT / "tests/data/words.jsonl")}]},
    "rollout": {"group_size": 4, "sampling": {"max_tokens": 5, "ignore_eos": True}},
    "train": {"steps": 6, "tasks_per_step": 4, "optimizer": {"lr": 3e-2}},
    "algorithm": {"name": "grpo", "kl": {"coef": 0.01}},
    "checkpoint": {"interval": 2, "keep": None},
}


def over(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return base | {k: over(base[k], v) if isinstance(v, dict) and k in base else v for k, v in more.items()}


def run(run_dir: Path, more: dict[str, Any]) -> Any:
    return whet.train(rewards=share_of_a, run_dir=str(run_dir), **over(SETUP, more))


def tensors(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as f:
        return set(f.keys())


def test_errors_name_the_section_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"critic\.lora\.path=.*cannot be read"):
        attach(tiny_model(), LoraConfig(path=str(tmp_path)), seed=0, key="critic.lora")
    with pytest.raises(ConfigError, match=r"critic\.lora\.modules_to_save: no module"):
        attach(tiny_model(), LoraConfig(modules_to_save=("qq",)), seed=0, key="critic.lora")


def test_a_run_learns_and_keeps_adapters_only(tmp_path: Path) -> None:
    train = {"steps": 40, "tasks_per_step": 8}
    result = run(tmp_path / "run", {"train": train, "checkpoint": {"interval": 0, "keep": 1}})
    lines = [m for m in result.metrics if "reward/mean" in m]
    rewards = [m["reward/mean"] for m in lines]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.8
    assert max(m["train/mismatch_max_nats"] for m in lines) == 0.0, "sampled is what is trained"
    assert lines[0]["train/kl_reference_nats"] == 0.0
    assert lines[-1]["train/kl_reference_nats"] > 0.01
    last = tmp_path / "run/checkpoints/0-main-000040"
    for engine in ("policy", "reference"):
        assert tensors(last / engine / "model.safetensors")
        assert all("lora_" in n for n in tensors(last / engine / "model.safetensors"))
    assert all("lora_" in n for n in tensors(last / "policy/optimizer.safetensors"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export/main")
    assert not any("lora_" in n for n, _ in whole.named_parameters())


RESUMED: dict[str, dict[str, Any]] = {
    "lora": {"model": {"lora": {"init": "pissa", "dropout": 0.1}}, "train": {"minibatches": 2}},
    "fused": {"model": {"lora": {"fused": True, "dropout": 0.1}}, "train": {"minibatches": 2}},
    "muon": {
        "model": {"lora": None},
        "train": {"optimizer": {"name": "muon", "lr": 1e-2}, "trainable": {"norm": False}},
    },
    "lora muon stale": {"train": {"optimizer": {"name": "muon"}}, "rollout": {"sync_interval": 3}},
    "critic": {
        "algorithm": {"name": "ppo"},
        "critic": {"lora": {"rank": 4}, "optimizer": {"lr": 1e-2, "name": "sgd", "momentum": 0.9}},
    },
}


@pytest.mark.parametrize("name", except_for(lambda name: name not in ("fused", "muon"), RESUMED))
def test_going_on_is_never_having_stopped(tmp_path: Path, name: str) -> None:
    run(tmp_path / "a", RESUMED[name])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for later in (4, 6):
        shutil.rmtree(tmp_path / f"b/checkpoints/0-main-{later:06d}")
    shutil.rmtree(tmp_path / "b/export")
    again = run(tmp_path / "b", RESUMED[name])
    assert again.finished
    parts = ("checkpoints", "rollouts", "export", "metrics.jsonl")
    found = [
        p
        for part in parts
        for p in [tmp_path / "a" / part, *(tmp_path / "a" / part).rglob("*")]
        if p.is_file()
    ]
    names = sorted(str(p.relative_to(tmp_path / "a")) for p in found)
    assert any("000006/policy" in n for n in names)
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False)[1:] == ([], [])


def test_the_reference_of_a_stage_is_the_policy_at_its_start(tmp_path: Path) -> None:
    """The second stage begins with adapters that do something; what it compares with is not the bare base."""
    more = {"stages": [{"name": "one"}, {"name": "two"}], "train": {"steps": 3}}
    lines = run(tmp_path / "run", more | {"checkpoint": {"interval": 0, "export": False, "keep": 1}}).metrics
    gaps = [m["train/kl_reference_nats"] for m in lines if "train/kl_reference_nats" in m]
    assert [gap == 0.0 for gap in gaps] == [True, False, False] * 2, gaps


def test_a_critic_with_adapters_keeps_its_base(tmp_path: Path) -> None:
    run(tmp_path / "run", over(RESUMED["critic"], {"model": {"lora": None}}))
    folder = tmp_path / "run/checkpoints"
    first, last = (bits_of(folder / f"0-main-{n:06d}/critic/model.safetensors") for n in (2, 6))
    moved = {n for n in first if not torch.equal(first[n], last[n])}
    assert moved == {n for n in first if "lora_" in n or "value_head" in n}
    assert len(moved) < len(first)


def bits_of(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as f:
        return {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118


# ---------------------------------------------------------------- which parameters learn


def test_routers_stay_and_the_rest_moves(tmp_path: Path) -> None:
    scratch = {"name": "qwen3_moe", "num_experts": 4}
    frozen = {r"mlp\.gate\.": False}
    run(
        tmp_path / "run",
        {"model": {"lora": None, "scratch": scratch}, "train": {"trainable": frozen, "steps": 4}},
    )
    folder = tmp_path / "run/checkpoints"
    first, last = (bits_of(folder / f"0-main-{n:06d}/policy/model.safetensors") for n in (2, 4))
    assert {n for n in first if torch.equal(first[n], last[n])} == {"model.layers.0.mlp.gate.weight"}


def test_the_first_pattern_that_fits_counts() -> None:
    model = tiny_model()
    choose(model, {"norm": False, r"layers\.1": True, ".*": False})
    on = {n for n, p in model.named_parameters() if p.requires_grad}
    assert on == {n for n, _ in model.named_parameters() if "layers.1." in n and "norm" not in n}
    choose(model, {})
    assert all(p.requires_grad for p in model.parameters())
    lora = with_adapters()
    choose(lora, {"lora_A": False})
    assert {n for n, p in lora.named_parameters() if p.requires_grad} == {
        n for n, _ in lora.named_parameters() if n.endswith("lora_B")
    }
    for rules, said in (({"nowhere": True}, "'nowhere'"), ({".": False}, "leaves no parameter trainable")):
        with pytest.raises(ConfigError, match=said):
            choose(model, rules)


# ---------------------------------------------------------------- plans and refusals


def planned(**more: Any) -> Any:
    return plans(load(None, values=over({k: v for k, v in SETUP.items() if k != "data"}, more) | DATA))


DATA: dict[str, Any] = {
    "data": {"max_prompt_tokens": 8, "train": [{"rows": [{"prompt": "a", "answer": "b"}]}]},
    "rewards": {"r": {"function": "exact"}},
}


def test_the_plan_counts_what_the_model_has() -> None:
    """By hand: 32 wide, one layer, rank 8: q, k, v, o 32 x 32 each, gate, up, down 32 x 64 each."""
    [p] = planned(tokenizer={"vocab_size": 50})
    adapters = 4 * 8 * (32 + 32) + 3 * 8 * (32 + 64)
    adapted = 4 * 32 * 32 + 3 * 32 * 64
    base = 50 * 32 + adapted + 2 * 16 + 3 * 32
    assert (p.learns.base, p.learns.own, p.learns.adapters, p.learns.adapted) == (base, 0, adapters, adapted)
    assert p.memory["policy with gradients and Adam"] == (base + adapted) * 4 + adapters * (4 + 4 + 8)
    assert p.memory["reference"] == adapters * 4
    assert p.checkpoint_bytes == adapters * (4 + 8) + adapters * 4
    assert "trained" in facts(p)["parameters"]
    [p] = planned(model={"lora": {"init": "pissa"}}, tokenizer={"vocab_size": 50})
    assert p.memory["reference"] == (adapters + adapted) * 4
    [p] = planned(model={"lora": None}, train={"optimizer": {"name": "muon"}}, tokenizer={"vocab_size": 50})
    assert p.memory["policy with gradients and Muon"] == base * 8 + adapted * 4 + (base - adapted) * 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=3),
        LoraConfig(rank=3, rank_pattern={"q_proj": 2}, modules_to_save=("norm",)),
        LoraConfig(targets=("k_proj", "layers.1.self_attn.o_proj")),
        LoraConfig(targets=r".*\.[qv]_proj"),
    ],
)
def test_the_plan_knows_what_gets_adapters(family: str, lora: LoraConfig) -> None:
    model = tiny_model(family)
    tensors = {n: tuple(p.shape) for n, p in model.named_parameters()}
    rules = {r"layers\.1.*lora_A": False}
    told = learns(tensors, lora, rules)
    attach(model, lora, seed=0)
    choose(model, rules)
    assert told.learned == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert told.adapted == sum(layer.weight.numel() for layer in adapted(model).values())
    engine = TorchEngine(
        model, kernels.load("auto"), cut=MicroBatchPolicy(), optimizer=OptimizerConfig(name="muon")
    )
    assert engine.optimizer is not None
    assert told.hidden == sum(p.numel() for p, o in engine.optimizer.owner.items() if isinstance(o, Muon))


ADAPTER_ONLY = {"export_as": "adapter"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"model": {"lora": {"init": "pissa"}}, "checkpoint": ADAPTER_ONLY},
            r"export_as: adapter: model\.lora\.init=pissa changes",
        ),
        (
            {"model": {"lora": None}, "checkpoint": ADAPTER_ONLY},
            "export_as: has no effect: model.lora is null",
        ),
        ({"model": {"lora": {"targets": "("}}}, r"model\.lora\.targets: '\(' is not a regular expression"),
        ({"model": {"lora": {"targets": []}}}, r"model\.lora\.targets: is empty"),
        ({"model": {"lora": {"path": "nowhere"}}}, "has no adapter_model.safetensors"),
        (
            {"model": {"lora": {"init": "pissa_niter_0"}}},
            "got \"pissa_niter_0\", expected 'default', .* or text such as 'pissa_niter_16'",
        ),
        (
            {"model": {"lora": {"init": "pissa_niter_2"}}, "checkpoint": ADAPTER_ONLY},
            r"export_as: adapter: model\.lora\.init=pissa_niter_2 changes",
        ),
        ({"train": {"trainable": {"[": True}}}, r"train\.trainable: '\[' is not a regular expression"),
        (
            {"train": {"optimizer": {"param_groups": {"*": {}}}}},
            r"train\.optimizer\.param_groups: '\*' is not a regular",
        ),
        ({"train": {"optimizer": {"momentum": 0.9}}}, "momentum: has no effect: name=adamw does not read it"),
        (
            {"train": {"optimizer": {"name": "sgd", "eps": 1e-6}}},
            "eps: has no effect: name=sgd does not read it",
        ),
        ({"critic": {"lora": {"rank": 2}}}, "critic.* has no effect"),
    ],
)
def test_what_cannot_work_or_has_no_effect_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**more)

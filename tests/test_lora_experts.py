"""Adapters of experts: what they are, their gradients, the same bits in sampling and training, folders, and whole runs.

On ranks: test_parallel_layouts.py, test_ranks_grid.py, test_checkpoint_parts.py; here what ranks publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grid import EVERYTHING
from test_forward import foreign
from test_lora import IDS, bits, check_gradients, noted, over, planned, run, tensors, with_adapters
from test_train_torch import CUT, pg_loss, weighted
from tiny import VOCAB, tiny_model
from whet.config.learns import learns
from whet.config.schema import LoraConfig, OptimizerConfig
from whet.models import kernels
from whet.models.forward import decoder
from whet.models.load import export
from whet.models.logprob_parity import self_test
from whet.models.lora import adapted, attach, export_adapter, learned, merged, refresh
from whet.models.mesh import Dims
from whet.models.products import Everywhere
from whet.models.published import weights_of
from whet.rollout.http.published import check_adapters
from whet.sync.exchange import Publisher, carried
from whet.sync.files import Files
from whet.sync.manifest import describe
from whet.training.ranks import RankGroup, Ranks
from whet.training.torch import TorchEngine
from whet.types import CheckpointError, ConfigError

STACKS = ("gate_up_proj", "down_proj")
APART = ("gate_proj", "up_proj", "down_proj")
EACH = LoraConfig(rank=4, targets=EVERYTHING)
SHARED = LoraConfig(rank=4, targets=EVERYTHING, experts="shared")


def mixture(lora: LoraConfig, **how: Any) -> PreTrainedModel:
    return with_adapters(lora, family="qwen3_moe", **how)


def logits(model: Any) -> torch.Tensor:
    with Everywhere():
        out: torch.Tensor = model(input_ids=IDS).logits
    return out


def partly_dense() -> PreTrainedModel:
    """A mixture whose first layer is dense."""
    values = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "vocab_size": VOCAB}
    values |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    config = Qwen3MoeConfig(**values, head_dim=16, num_experts_per_tok=2, mlp_only_layers=[0])
    config.initializer_range = 0.1
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


# ---------------------------------------------------------------- what they are


@pytest.mark.parametrize(
    ("lora", "count"),
    [
        (LoraConfig(rank=4), 11),
        (LoraConfig(rank=4, targets=("gate_proj", "up_proj"), rank_pattern={"mlp.gate_proj": 2}), 3),
        (LoraConfig(rank=4, dropout=0.1, alpha_pattern={"down_proj": 5.0}), 11),
        (LoraConfig(rank=4, targets=EVERYTHING, rank_pattern={"mlp.down_proj": 2}), 7),
    ],
)
def test_dense_layers_of_a_mixture_have_adapters(tmp_path: Path, lora: LoraConfig, count: int) -> None:
    """Their names are those that layers of experts have elsewhere."""
    model = partly_dense()
    attach(model, lora, seed=0)
    assert len(adapted(model)) == count
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=gen) * 0.1)
    refresh(model)
    want = logits(model)
    assert not torch.equal(want, logits(partly_dense()))
    export_adapter(model, tmp_path / "a", cfg=lora, base=None)
    theirs = PeftModel.from_pretrained(partly_dense(), tmp_path / "a")
    torch.testing.assert_close(theirs(input_ids=IDS).logits, want, atol=1e-5, rtol=1e-4)
    again = partly_dense()
    attach(again, lora.model_copy(update={"path": str(tmp_path / "a")}), seed=5)
    assert torch.equal(logits(again), want)


@pytest.mark.parametrize(
    ("lora", "shapes"),
    [
        (LoraConfig(rank=2, targets=STACKS), {"gate_up_proj": (4, 2, 32), "down_proj": (4, 2, 48)}),
        (LoraConfig(rank=2, targets=STACKS, fused=True), {"gate_up_proj": (2, 32), "down_proj": (2, 48)}),
        (
            LoraConfig(rank=2, targets=("experts.down_proj",), experts="shared"),
            {"down_proj": (2, 48)},
        ),
        (LoraConfig(rank=2, targets=APART), {"gate_up_proj": (4, 4, 32), "down_proj": (4, 2, 48)}),
        (
            LoraConfig(rank=2, targets=APART, fused=True, experts="each"),
            {"gate_up_proj": (4, 2, 32), "down_proj": (4, 2, 48)},
        ),
        (
            LoraConfig(rank=2, targets=APART, rank_pattern={"down_proj": 3}),
            {"gate_up_proj": (4, 4, 32), "down_proj": (4, 3, 48)},
        ),
        (LoraConfig(rank=2, targets=r".*\.down_proj"), {"down_proj": (4, 2, 48)}),
        (
            LoraConfig(rank=2, targets=(*STACKS, "all-linear"), exclude_modules=("up_proj",)),
            {
                "q_proj": (2, 32),
                "k_proj": (2, 32),
                "v_proj": (2, 32),
                "o_proj": (2, 64),
                "down_proj": (4, 2, 48),
            },
        ),
    ],
)
def test_what_gets_adapters_and_how_large_a_is(lora: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Four experts, 32 wide, 48 in each. The plan counts the same."""
    plain = {n: tuple(p.shape) for n, p in tiny_model("qwen3_moe").named_parameters()}
    model = mixture(lora)
    found = {n: tuple(layer.lora_A.shape) for n, layer in adapted(model).items() if ".layers.1." in n}
    assert {n.rpartition(".")[2]: shape for n, shape in found.items()} == shapes
    told = learns(plain, lora, {})
    assert told.learned == sum(p.numel() for _, p in learned(model))
    assert told.adapted == sum(layer.weight.numel() for layer in adapted(model).values())


def test_two_adapters_of_one_stack_have_the_scale_of_each() -> None:
    """Twice the rank, and alpha with it."""
    one, two = (
        adapted(mixture(LoraConfig(rank=2, alpha=6.0, targets=at)))["model.layers.0.mlp.experts.gate_up_proj"]
        for at in (STACKS, APART)
    )
    assert one.scale == two.scale == 3.0
    assert two.lora_A.shape[1] == 2 * one.lora_A.shape[1]


@pytest.mark.parametrize(("init", "deviation"), [("gaussian", 1 / 16), ("xavier", (2 / (16 + 48)) ** 0.5)])
def test_the_beginning_of_a_changes_nothing_and_has_its_deviation(init: Any, deviation: float) -> None:
    model = mixture(LoraConfig(rank=16, targets=("down_proj",), init=init), moved=False)
    a = adapted(model)["model.layers.0.mlp.experts.down_proj"].lora_A
    assert float(a.detach().std()) == pytest.approx(deviation, rel=0.05)
    assert torch.equal(logits(merged(model)), logits(tiny_model("qwen3_moe")))


def test_each_expert_begins_by_itself_and_the_seed_decides() -> None:
    a, b, c = (bits(mixture(LoraConfig(targets=STACKS), seed=s, moved=False)) for s in (3, 3, 4))
    assert all(torch.equal(a[n], b[n]) for n in a)
    names = [n for n in a if "lora_A" in n]
    assert len(names) == 4
    assert not any(torch.equal(a[n], c[n]) or torch.equal(a[n][0], a[n][1]) for n in names)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"targets": ("q_proj", "gate_proj")},
            "targets: .*gate_proj is named alone.*name both, or gate_up_proj",
        ),
        ({"targets": STACKS, "dropout": 0.1}, "dropout=0.1: adapters of experts .* have no dropout"),
        ({"targets": STACKS, "init": "pissa"}, "init=pissa: adapters of experts"),
        ({"experts": "each"}, "experts=each: no experts have adapters; leave it out"),
        (
            {"targets": STACKS, "modules_to_save": ("experts",)},
            "modules_to_save: 'experts' has adapters, but a layer either",
        ),
    ],
)
def test_what_experts_cannot_have_is_refused(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"critic\.lora\.{said}"):
        attach(tiny_model("qwen3_moe"), LoraConfig(**lora), seed=0, key="critic.lora")


def test_other_experts_cannot_have_adapters() -> None:
    model = tiny_model("qwen3_moe")
    model.model.layers[1].mlp.experts.bias = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts of .* cannot have adapters; experts need two"
    ):
        attach(model, EACH, seed=0)


def test_experts_keep_their_own_gate() -> None:
    """Those of MiniMax-M3 clamp, as gpt-oss's do. Adapters that begin with B = 0 change nothing."""
    model = foreign(
        "minimax_m3_vl_text", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48
    )
    experts = [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "down_proj")]
    for module in experts:
        for p in module.parameters():
            p.data.mul_(9.0)  # past the limit
    with torch.no_grad():
        plain = logits(model)
        attach(model, EACH, seed=0)
        assert any(name.endswith("experts.gate_up_proj") for name in adapted(model))
        torch.testing.assert_close(logits(model), plain, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("lora", [EACH, SHARED])
def test_gradients_are_those_of_an_explicit_sum(lora: LoraConfig) -> None:
    check_gradients(mixture(lora), "qwen3_moe")


def test_the_gradient_of_what_experts_share_is_the_sum_of_theirs() -> None:
    shared = mixture(SHARED)
    each = mixture(EACH)
    with torch.no_grad():
        for (_, mine), (_, p) in zip(learned(each), learned(shared), strict=True):
            mine.copy_(p)
    refresh(each)
    found = []
    for model in (shared, each):
        engine = TorchEngine(model, kernels.load("auto"), cut=CUT, optimizer=OptimizerConfig(lr=0.0))
        found.append(noted(engine))
        engine.update(weighted(), pg_loss)
    for name, gradient in found[1].items():
        want = gradient.sum(0) if gradient.ndim == 3 else gradient
        torch.testing.assert_close(found[0][name], want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lora", [EACH, SHARED])
def test_sampling_stays_exact(lora: LoraConfig) -> None:
    ops = kernels.load("auto")
    reports = [
        self_test(decoder(model, ops), ops, vocab_size=VOCAB, seed=0, groups=3, long_prompt=70)
        for model in (tiny_model("qwen3_moe"), mixture(lora))
    ]
    assert reports[1].exact == reports[0].exact


@pytest.mark.parametrize("lora", [EACH, SHARED])
def test_the_merged_model_is_the_adapted_one_bit_for_bit(lora: LoraConfig) -> None:
    model, ops = mixture(lora), kernels.load("auto")
    made = merged(model)
    assert type(made) is type(model)
    assert not adapted(made)
    assert type(made.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"
    found, want = (TorchEngine(each, ops, cut=CUT).forward(weighted(), "logprobs") for each in (made, model))
    assert torch.equal(found, want)
    assert adapted(model), "the model stays as it was"
    plain = TorchEngine(tiny_model("qwen3_moe"), ops, cut=CUT).forward(weighted(), "logprobs")
    assert not torch.equal(plain, want)
    fresh = TorchEngine(mixture(lora, moved=False), ops, cut=CUT).forward(weighted(), "logprobs")
    assert torch.equal(plain, fresh), "B is 0"


# ---------------------------------------------------------------- folders


def test_the_exported_model_is_the_trained_one(tmp_path: Path) -> None:
    model = mixture(EACH)
    export(merged(model), None, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    assert torch.equal(logits(again), logits(merged(model)))
    torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "lora",
    [
        EACH,
        LoraConfig(rank=2, targets=("q_proj", *APART), fused=True),
        LoraConfig(rank=2, rslora=True, targets=APART, alpha_pattern={"down_proj": 5.0}),
        LoraConfig(
            rank=3, targets=APART, rank_pattern={"gate_up_proj": 2}, alpha_pattern={"gate_up_proj": 5.0}
        ),
        LoraConfig(rank=3, targets=("down_proj",), rank_pattern={"layers.1.mlp.experts.down_proj": 2}),
        LoraConfig(rank=2, targets=("gate_up_proj",), experts="shared", modules_to_save=("norm",)),
    ],
)
def test_exported_adapters_open_in_peft_and_here(tmp_path: Path, lora: LoraConfig) -> None:
    model = mixture(lora)
    export_adapter(model, tmp_path / "a", cfg=lora, base="somewhere")
    theirs = PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path / "a")
    torch.testing.assert_close(theirs(input_ids=IDS).logits, logits(model), atol=1e-5, rtol=1e-4)
    assert float((logits(tiny_model("qwen3_moe")) - logits(model)).abs().max()) > 0.1
    ours = mixture(lora.model_copy(update={"path": str(tmp_path / "a")}), seed=5, moved=False)
    assert torch.equal(logits(ours), logits(model))
    for other in ({"targets": ("q_proj",), "fused": False, "experts": None}, {"alpha": 3.0}):
        changed = lora.model_copy(update={"path": str(tmp_path / "a"), **other})
        with pytest.raises((ConfigError, CheckpointError), match=r"differ in|lora_alpha|_pattern"):
            attach(tiny_model("qwen3_moe"), changed, seed=0)


def test_a_folder_with_an_adapter_for_each_is_not_that_of_all(tmp_path: Path) -> None:
    export_adapter(mixture(EACH), tmp_path / "a", cfg=EACH, base=None)
    shared = SHARED.model_copy(update={"path": str(tmp_path / "a")})
    with pytest.raises(CheckpointError, match=r"differs between experts.*set experts to each"):
        attach(tiny_model("qwen3_moe"), shared, seed=0)
    export_adapter(mixture(SHARED), tmp_path / "b", cfg=SHARED, base=None)
    each = mixture(EACH.model_copy(update={"path": str(tmp_path / "b")}), moved=False)
    assert torch.equal(logits(each), logits(mixture(SHARED))), "the other way round they are the same"


def test_a_folder_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    export_adapter(mixture(EACH), tmp_path / "a", cfg=EACH, base=None)
    file = tmp_path / "a/adapter_model.safetensors"
    held = load_file(file)
    name = next(n for n in held if "experts.lora_A" in n)
    save_file(held | {name: held[name][:8].clone()}, file)
    with pytest.raises(CheckpointError, match=r"belong to other layers; they differ in .*experts\.lora_A"):
        attach(tiny_model("qwen3_moe"), EACH.model_copy(update={"path": str(tmp_path / "a")}), seed=0)


def test_servers_get_them_merged_alone() -> None:
    with pytest.raises(ConfigError, match="adapters of experts are sent to vLLM merged alone; use merge"):
        check_adapters(mixture(EACH))


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("lora", [EACH, SHARED])
def test_ranks_with_spread_experts_publish_what_one_process_would(tmp_path: Path, lora: LoraConfig) -> None:
    """In full and with adapters apart, whose digest of the merged weights is that of the driver's model."""
    ranks = Ranks(Dims(dp_shard=2), timeout_s=60.0)
    how = {"cut": CUT, "optimizer": OptimizerConfig(name="sgd", lr=0.5), "total_steps": 8}
    try:
        policy = RankGroup(ranks, "policy", mixture(lora), dims=Dims(dp_shard=2, ep=2), **how)
        alone = TorchEngine(mixture(lora), kernels.load("auto"), **how)
        publishers = {
            adapters: Publisher(Files(tmp_path / str(adapters)), whole=not adapters, adapters=adapters)
            for adapters in (False, True)
        }
        for version in (1, 2):
            told = [engine.update(weighted(version), pg_loss) for engine in (policy, alone)]
            assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-5)
            policy.version = version
            sent = {adapters: publisher.publish(policy) for adapters, publisher in publishers.items()}
            for adapters, manifest in sent.items():
                mine = carried(weights_of(policy.module), adapters=adapters)
                assert manifest.digest == describe(0, mine).digest
        stack = "model.layers.0.mlp.experts.gate_up_proj"
        travelled = {adapters: {e.name for e in m.entries if e.sent} for adapters, m in sent.items()}
        assert stack in travelled[False]
        assert stack not in travelled[True]
        assert "model.layers.0.mlp.experts.lora.gate_up_proj.lora_A" in travelled[True]
        found = {entry.name: x for entry, x in publishers[False].transport.receive(2)}[stack]
        want = {w.name: w.merged for w in weights_of(alone.module)}[stack]
        assert want is not None
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    finally:
        ranks.close()


# ---------------------------------------------------------------- runs

MIXTURE: dict[str, Any] = {
    "model": {
        "scratch": {
            "name": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
        },
        "lora": {"rank": 4, "targets": list(EVERYTHING)},
    }
}


def test_a_run_samples_what_it_trains_and_exports_for_peft(tmp_path: Path) -> None:
    more = over(MIXTURE, {"checkpoint": {"interval": 0, "export_as": "adapter"}, "train": {"steps": 8}})
    result = run(tmp_path / "run", more)
    lines = [m for m in result.metrics if "reward/mean" in m]
    assert max(m["train/mismatch_max_nats"] for m in lines) == 0.0
    assert lines[0]["train/kl_reference_nats"] == 0.0
    assert lines[-1]["train/kl_reference_nats"] > 0
    held = tensors(tmp_path / "run/export/main/adapter_model.safetensors")
    assert "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight" in held
    told = json.loads((tmp_path / "run/export/main/adapter_config.json").read_text())
    assert "model.layers.0.mlp.experts.down_proj" in told["target_parameters"]


@pytest.mark.parametrize("experts", ["each", pytest.param("shared", marks=pytest.mark.sweep)])
def test_a_run_with_spread_experts_is_that_of_one_process_and_resumes(tmp_path: Path, experts: str) -> None:
    """Both sample the same tokens as long as rounding changes none."""
    base = over(MIXTURE, {"model": {"lora": {"experts": experts}}, "train": {"steps": 3}})
    spread = {
        "train": {"parallel": {"dp_shard": 2, "ep": 2}},
        "machine": {"logprob_parity": "off"},
        "checkpoint": {"interval": 1},
    }
    one = run(tmp_path / "one", base)
    many = run(tmp_path / "many", over(base, spread))
    found, want = ([m for m in r.metrics if "reward/mean" in m] for r in (many, one))
    assert len(found) == len(want) == 3
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert [m[name] for m in found] == pytest.approx([m[name] for m in want], rel=1e-3, abs=1e-5)
    again = run(tmp_path / "many", over(base, over(spread, {"train": {"steps": 4}})))
    assert len([m for m in again.metrics if "reward/mean" in m]) == 4


def test_the_plan_counts_adapters_of_experts() -> None:
    """By hand: one layer, 32 wide, four experts of 24, rank 4: v and o 32 x 32, each expert's 48 x 32 and 32 x 24."""
    [p] = planned(tokenizer={"vocab_size": 50}, **MIXTURE)
    attention = 2 * 4 * (32 + 32)
    each = 4 * (48 + 32) + 4 * (32 + 24)
    assert p.learns.adapters == attention + 4 * each
    assert p.learns.adapted == 2 * 32 * 32 + 4 * (48 * 32 + 32 * 24)
    shared = over(MIXTURE, {"model": {"lora": {"experts": "shared"}}})
    [p] = planned(tokenizer={"vocab_size": 50}, **shared)
    assert p.learns.adapters == attention + each

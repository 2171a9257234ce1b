"""Hidden states against transformers: six families through our forward, others through their own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from test_packing import batch_of
from tiny import FAMILIES, SPARSE, VOCAB, tiny_model
from whet.models import build, fused_forward, kernels
from whet.models.attention import CachedAttention, KvCache, PackedAttention
from whet.models.forward import Decoder, decoder
from whet.models.kernels import Ops
from whet.models.logprobs import logits, token_logprobs
from whet.models.packing import layout
from whet.models.segments import Segments
from whet.types import ConfigError

OPS = kernels.load("torch")
LENGTHS = (5, 1, 17, 30, 2)

OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 8, "final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}


def foreign(kind: str, **values: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 48, "initializer_range": 0.1, "vocab_size": VOCAB}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | ends | values))
    return AutoModelForCausalLM.from_config(config).eval()


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Norm weights and biases away from their 1 and 0, so that an error in them shows."""
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn(p.shape, generator=g))
    return model


def make(kind: str) -> PreTrainedModel:
    return shaken(tiny_model(kind) if kind in FAMILIES else foreign(kind, **OTHERS[kind]))


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))


def packed(made: Decoder, ids_U: Tensor, *, checkpoint: bool = False) -> Tensor:
    segments = Segments.of_lengths(torch.tensor(LENGTHS))
    attend = PackedAttention(segments, OPS)
    return made.hidden(ids_U, segments.position_N, attend, checkpoint=checkpoint)


def theirs(model: PreTrainedModel, ids_U: Tensor) -> Tensor:
    """Logits of each sequence alone, by the model's own forward with its eager attention."""
    model.set_attn_implementation("eager")
    parts = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids_U.split(LENGTHS)]
    return torch.cat(parts).float()


def gradients(model: PreTrainedModel, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    run().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(mine: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float) -> None:
    """Each tensor's largest difference is at most rtol times the largest gradient of the model."""
    assert mine.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = {n: float((mine[n] - expected[n]).abs().max()) / largest for n in mine}
    assert max(worst.values()) <= rtol, sorted(worst.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("kind", [*FAMILIES, *OTHERS])
def test_logits_and_gradients_equal_transformers(kind: str) -> None:
    model = make(kind)
    made = decoder(model, OPS)
    assert made.path == ("functional" if kind in FAMILIES else "modules")
    ids_U, targets_U, up_U = tokens(), tokens(4), torch.randn(sum(LENGTHS), generator=torch.manual_seed(1))

    def ours() -> Tensor:
        logp_U, _ = token_logprobs(packed(made, ids_U), targets_U, head=made.head, ops=OPS)
        return (logp_U * up_U).sum()

    def reference() -> Tensor:
        logp_UV = torch.log_softmax(theirs(model, ids_U), dim=-1)
        return (logp_UV.gather(1, targets_U[:, None]).squeeze(1) * up_U).sum()

    with torch.no_grad():
        z_UV = logits(made.head, packed(made, ids_U), 1.0)
    mine = gradients(model, ours)
    expected = gradients(model, reference)
    torch.testing.assert_close(z_UV, theirs(model, ids_U).detach(), atol=1e-5, rtol=0)
    assert_close_gradients(mine, expected, rtol=2e-6)


@pytest.mark.parametrize("kind", [*FAMILIES, "gemma2"])
def test_checkpointing_changes_no_bit(kind: str) -> None:
    model = make(kind)
    made = decoder(model, OPS)
    ids_U = tokens()
    plain = gradients(model, lambda: packed(made, ids_U).square().sum())
    again = gradients(model, lambda: packed(made, ids_U, checkpoint=True).square().sum())
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[n], again[n]) for n in plain)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_checkpointing_keeps_one_tensor_a_layer(kind: str) -> None:
    def saved_bytes(checkpoint: bool) -> int:
        seen: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            seen[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = packed(made, tokens(), checkpoint=checkpoint)
        del out
        return sum(seen.values())

    model = make(kind)
    made = decoder(model, OPS)
    assert saved_bytes(True) < 0.5 * saved_bytes(False)
    assert all("forward" not in vars(m) for m in model.modules())  # the modules are as they were


@pytest.mark.parametrize("kind", [*FAMILIES, "gemma2", "gemma3_text"])
def test_shared_prompts_change_neither_logprobs_nor_gradients(kind: str) -> None:
    g = torch.Generator().manual_seed(2)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=g).tolist()

    groups = []
    for prompt_tokens, responses in ((11, (1, 5, 9)), (1, (4, 12)), (6, (3, 3, 3, 2))):
        prompt = draw(prompt_tokens)
        masks = [[0] * prompt_tokens + [1] * n for n in responses]
        groups.append([(prompt + draw(n), mask) for n, mask in zip(responses, masks)])
    groups[0][2][1][-3:-1] = [0, 0]  # two tokens of the environment between sampled ones
    batch = batch_of(groups)
    model = make(kind)
    made = decoder(model, OPS)
    up_A = torch.randn(int(batch.mask_N.sum()), generator=g)
    found: dict[bool, Tensor] = {}
    computed: dict[bool, int] = {}

    def run(share: bool) -> Tensor:
        plan = layout(batch, share_prompts=share)
        hidden_UD = made.hidden(plan.token_ids_U, plan.position_U, PackedAttention(plan.segments, OPS))
        hidden_AD = hidden_UD[plan.predictor_N[batch.mask_N]]
        targets_A = batch.token_ids_N[batch.mask_N]
        found[share], _ = token_logprobs(hidden_AD, targets_A, head=made.head, ops=OPS)
        computed[share] = len(plan.token_ids_U)
        return (found[share] * up_A).sum()

    separate, shared = gradients(model, lambda: run(False)), gradients(model, lambda: run(True))
    assert computed[True] == computed[False] - 2 * 11 - 1 - 3 * 6
    torch.testing.assert_close(found[True], found[False], atol=3e-6, rtol=0)
    assert_close_gradients(shared, separate, rtol=2e-6)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_packing_order_changes_nothing(kind: str) -> None:
    """Each sequence computed alone gives the hidden states it has in the pack."""
    made = decoder(make(kind), OPS)
    ids_U = tokens()
    with torch.no_grad():
        together = packed(made, ids_U).split(LENGTHS)
        for part, expected in zip(ids_U.split(LENGTHS), together):
            segments = Segments.of_lengths(torch.tensor([len(part)]))
            alone = made.hidden(part, segments.position_N, PackedAttention(segments, OPS))
            torch.testing.assert_close(alone, expected, atol=5e-6, rtol=0)


def over_cache(kind: str, ops: Ops) -> list[Tensor]:
    """Hidden states of three prompts, computed in parts, and of decode steps after them."""
    model = make(kind)
    made = decoder(model, ops)
    sizes: dict[str, Any] = {"layers": made.layers, "kv_heads": made.kv_heads, "head_dim": made.head_dim}
    cache, table_BP, ids_U = KvCache.allocate(pages=9, ops=ops, **sizes), torch.arange(9).view(3, 3), tokens()
    found, length_B = [], torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        for queries in ([17, 1, 5], [3, 16, 12], None, None):
            queries_B = None if queries is None else torch.tensor(queries)
            attend = CachedAttention(cache, table_BP, length_B, ops, queries_B=queries_B)
            part_U = ids_U[: 3 if queries is None else sum(queries)]
            found.append(made.hidden(part_U, attend.position_N, attend))
            length_B = attend.keys_B
    return found


@pytest.mark.skipif(build.if_built() is None, reason="no compiler")
@pytest.mark.parametrize("kind", FAMILIES)
def test_whole_layers_over_the_cache_have_the_bits_of_single_operations(kind: str) -> None:
    ops, calls = kernels.load("compiled"), []
    assert ops.cached_layers is not None

    def counted(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor] | None:
        calls.append(ops.cached_layers(*args, **kwargs))  # type: ignore[misc]
        return calls[-1]

    whole, single = (
        over_cache(kind, replace(ops, cached_layers=counted)),
        over_cache(kind, replace(ops, cached_layers=None)),
    )
    assert len(calls) == (0 if kind in SPARSE else len(whole))
    assert None not in calls
    assert all(map(torch.equal, whole, single))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_no_tokens(kind: str) -> None:
    """A batch in which nothing was sampled."""
    made = decoder(make(kind), OPS)
    plan = layout(batch_of([[([5, 6], [0, 0])]]), share_prompts=True)
    out = made.hidden(plan.token_ids_U, plan.position_U, PackedAttention(plan.segments, OPS))
    assert out.shape == (0, 32)


def test_parameters_are_read_on_every_call() -> None:
    model, other = make("qwen3"), shaken(tiny_model("qwen3", seed=1))
    made = decoder(model, OPS)
    ids_U = tokens()
    with torch.no_grad():
        before = packed(made, ids_U)
        for p, q in zip(model.parameters(), other.parameters()):  # in place
            p.copy_(q)
        expected = packed(decoder(other, OPS), ids_U)
        assert torch.equal(packed(made, ids_U), expected)
        assert not torch.equal(before, expected)
        q_proj = model.model.layers[0].self_attn.q_proj
        q_proj.weight = nn.Parameter(-q_proj.weight)  # replaced
        assert not torch.equal(packed(made, ids_U), expected)


# ---------------------------------------------------------------- rotary embeddings

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_equals_transformers_bitwise(kind: str) -> None:
    model = foreign("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]})
    assert decoder(model, OPS).path == "functional"
    position_U = torch.tensor([0, 1, 2, 63, 64, 1000, 100_000])
    cos, sin = fused_forward.rope(model.model.rotary_emb, position_U)
    their_cos, their_sin = model.model.rotary_emb(torch.zeros(1), position_U[None])
    assert torch.equal(cos, their_cos[0])
    assert torch.equal(sin, their_sin[0])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(kind: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=f"rope_type '{kind}' depends on the longest sequence"):
        decoder(foreign("llama", rope_parameters=rope | factors), OPS)
    # where each type of layer has its own, one is enough
    apart = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": rope | factors,
    }
    with pytest.raises(ConfigError, match=f"rope_type '{kind}' depends on the longest sequence"):
        decoder(foreign("gemma3_text", rope_parameters=apart), OPS)


# ---------------------------------------------------------------- never wrong silently


class Doubled(nn.Linear):
    """Stands for an adapter: a linear layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def adapt(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    doubled = Doubled(*reversed(attention.o_proj.weight.shape), bias=False)
    doubled.weight = attention.o_proj.weight
    attention.o_proj = doubled


def hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 2 * out)


def patch(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


@pytest.mark.parametrize("alter", [adapt, hook, patch])
def test_an_altered_model_goes_through_its_own_modules(alter: Callable[[PreTrainedModel], None]) -> None:
    model = make("qwen3")
    ids_U = tokens()
    with torch.no_grad():
        unaltered = theirs(model, ids_U)
        alter(model)
        made = decoder(model, OPS)
        assert made.path == "modules"
        z_UV = logits(made.head, packed(made, ids_U), 1.0)
        torch.testing.assert_close(z_UV, theirs(model, ids_U), atol=1e-5, rtol=0)
        assert not torch.allclose(z_UV, unaltered, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mamba", {}),  # state space: no attention at all
        ("bloom", {"n_head": 4, "n_layer": 2}),  # position biases
        ("stablelm", {}),  # its layers do not pass on what attention is given
    ],
)
def test_a_model_that_cannot_be_packed_is_refused(kind: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be packed"):
        decoder(foreign(kind, **values), OPS)


def test_a_model_whose_own_forward_fails_is_refused_by_name() -> None:
    model = make("llama")

    def forward(*given: object, **how: object) -> None:
        raise RuntimeError("shape '[1, 9]' is invalid for input of size 8")

    model.lm_head.forward = forward
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM cannot compute.*RuntimeError: shape .*config.json"
    ):
        decoder(model, OPS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_setting_that_transformers_does_not_read_changes_nothing(kind: str) -> None:
    """config.json may have keys of other families: transformers keeps them, and no code of this family reads them."""
    model, ids_U = make(kind), tokens()
    made = decoder(model, OPS)
    with torch.no_grad():
        z_UV = logits(made.head, packed(made, ids_U), 1.0)
        strays = {"logits_scaling": 4.0, "logit_scale": 0.3, "final_logit_softcapping": 3.0}
        model.config.update(strays | ({} if kind == "gpt_oss" else {"swiglu_alpha": 2.0}))
        made = decoder(model, OPS)
        assert made.path == "functional"
        assert torch.equal(z_UV, logits(made.head, packed(made, ids_U), 1.0))


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_to_later_tokens_is_refused(kind: str) -> None:
    model = make(kind)
    model.config.is_causal = False
    with pytest.raises(ConfigError, match="cannot be packed"):
        decoder(model, OPS)


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe"])
def test_a_window_in_masks_alone_is_refused(kind: str) -> None:
    """The two sequences of the probe are too short to show it."""
    window = {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 2}
    model = foreign(kind, max_position_embeddings=64, **EXPERTS, **window)
    with pytest.raises(ConfigError, match="sliding_window=40 tokens alone; override"):
        decoder(model, OPS)
    whole = foreign(kind, max_position_embeddings=64, **EXPERTS, **window | {"sliding_window": 64})
    assert decoder(whole, OPS).path == "modules"


@pytest.mark.parametrize("seed", range(1, 5))
def test_routers_of_half_precision_may_choose_otherwise_at_a_tie(seed: int) -> None:
    """The logits of such a token differ by half a standard deviation and more."""
    model = foreign("mixtral", num_hidden_layers=4, num_local_experts=8, initializer_range=0.05)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    assert decoder(model.bfloat16(), OPS).path == "modules"


def test_a_layer_that_attends_twice_is_refused() -> None:
    """A token of the cache would have the keys of the second time alone."""
    with pytest.raises(ConfigError, match="layer 0 attends more than once"):
        decoder(foreign("diffllama"), OPS)


def test_unknown_scaling_of_logits_is_noticed() -> None:
    model = make("gemma3_text")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: 1.01 * plain(x)
    with pytest.raises(ConfigError, match="cannot be packed"):
        decoder(model, OPS)


def test_cache_shape_is_what_the_layers_use() -> None:
    ours, gpt2 = decoder(make("qwen3"), OPS), decoder(make("gpt2"), OPS)
    assert (ours.layers, ours.kv_heads, ours.head_dim) == (2, 2, 16)
    assert (gpt2.layers, gpt2.kv_heads, gpt2.head_dim) == (2, 4, 16)

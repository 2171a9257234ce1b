"""The memory plan: its formulas against what autograd keeps, its cuts against the trainer's, its refusals."""

from __future__ import annotations

import copy
import ctypes
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from test_timeline import TINY
from tiny import FAMILIES, FEW, VOCAB, tiny_model
from whet.api import run_training
from whet.batch import Batch, pack
from whet.config import hardware, memory, memory_estimate
from whet.config.load import load
from whet.config.memory import Lengths, PeakBatch, Setting, largest
from whet.config.plan import Plan, plans
from whet.config.rank_share import held_size
from whet.config.schema import ParallelConfig, TrainConfig
from whet.config.sizes import Shape, config_sizes, folder_shape, with_tensors
from whet.models import expert_parallel, fused_forward, kernels, logprobs, tensor_parallel
from whet.models.attention import PackedAttention
from whet.models.collectives import Peers
from whet.models.forward import decoder
from whet.models.packing import layout
from whet.models.segments import Segments
from whet.rollout.native.engine import NativeEngine
from whet.training.balance import deal
from whet.training.micro_batches import MicroBatchLimits
from whet.types import ConfigError, Group, Rollout, Task

# ---------------------------------------------------------------- what one layer keeps


class Flash(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps: queries, keys, values, the result, a number a head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = q * 1, torch.zeros(q.shape[:2])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return dout, None, None


def per_layer(family: str, kind: str, dtype: torch.dtype, *, checkpoint: bool = False) -> float:
    """Bytes that one layer keeps of one token, by what autograd is given to keep."""

    def slope(layers: int) -> int:
        more, less = (
            kept_bytes(family, kind, dtype, layers=layers, tokens=tokens, checkpoint=checkpoint)
            for tokens in (128, 64)
        )
        return more - less

    return (slope(3) - slope(1)) / 2 / 64


def kept_bytes(
    family: str, kind: str, dtype: torch.dtype, *, layers: int, tokens: int, checkpoint: bool
) -> int:
    """Bytes that a forward keeps for the backward pass, parameters left out."""
    if kind == "compiled" and kernels.load("auto").name != kind:
        pytest.skip("no compiler")
    ops = kernels.load(kind)
    model = tiny_model(family, layers=layers).to(dtype)
    hidden = decoder(model, ops).hidden
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    segments = Segments.of_lengths(torch.tensor([16] * (tokens // 16)))
    attend: Any = PackedAttention(segments, ops)
    if kind == "torch":
        attend = lambda layer, q, k, v, **_: Flash.apply(q, k, v)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden(torch.arange(tokens) % VOCAB, segments.position_N, attend, checkpoint=checkpoint)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def shape_of(family: str) -> Shape:
    return with_tensors(**config_sizes(tiny_model(family).config.to_dict()))


KINDS = list(itertools.product(("compiled", "torch"), (torch.float32, torch.bfloat16)))


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=lambda x: str(x).removeprefix("torch."))
def test_what_a_layer_keeps_is_what_autograd_keeps(family, kind, dtype):
    name = str(dtype).removeprefix("torch.")
    setting = Setting(shape=shape_of(family), dtype=name, compiled=kind == "compiled")
    seen = per_layer(family, kind, dtype)
    assert memory.layer_bytes(setting) == pytest.approx(seen, rel=0.02 if setting.shape.experts else 1e-9)


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=lambda x: str(x).removeprefix("torch."))
def test_a_checkpointed_layer_keeps_its_two_inputs(kind, dtype):
    assert per_layer("qwen3", kind, dtype, checkpoint=True) == 2 * dtype.itemsize * shape_of("qwen3").hidden


# ---------------------------------------------------------------- how batches are cut


def full_batch(lengths: Lengths, groups: int) -> Batch:
    """Groups of rollouts, all of these lengths."""
    prompt, reply = lengths.prompt, lengths.reply

    def rollout(uid: int, index: int) -> Rollout:
        task = Task(uid=uid, source="s", prompt="", answer="")
        return Rollout.one_strand(
            task=task, index=index, token_ids=[uid] * (prompt + reply), mask=[0] * prompt + [1] * reply,
            logprobs=[0.0] * (prompt + reply), sample_logprobs=[0.0] * (prompt + reply),
            versions=[0] * (prompt + reply), finish_reason="stop", text="", reward=0.0,
        )  # fmt: skip

    made = [[rollout(g, i) for i in range(lengths.group)] for g in range(groups)]
    return pack([Group(m[0].task, tuple(m)) for m in made])


@pytest.mark.parametrize(
    ("given", "share", "whole"),
    [
        *itertools.product(
            [{"micro_batch_tokens": n} for n in (5, 20, 33, 47, 60, 100, 1000)]
            + [{"micro_batch_rollouts": 3}],
            [True, False],
            [False],
        ),
        ({"micro_batch_tokens": 60}, True, True),
    ],
)
def test_the_largest_micro_batch_is_the_trainers(given, share, whole):
    lengths, groups = Lengths(prompt=6, reply=5, group=4), 5
    rollouts = groups * lengths.group
    train = TrainConfig(share_prompts=share, **given)
    told = memory.cut(train, lengths, rollouts=rollouts, default_tokens=9, whole_groups=whole)
    limits = MicroBatchLimits(
        train.micro_batch_tokens, train.micro_batch_rollouts, shared=share, whole_groups=whole
    )
    micros = deal(full_batch(lengths, groups), 1, limits)[0].micros
    computed = [len(layout(m, share_prompts=share).token_ids_U) for m in micros]
    if share and told.tokens != max(computed):  # groups were torn: pieces of several may come together
        assert abs(told.tokens - max(computed)) <= lengths.prompt
    else:
        assert (told.tokens, told.sampled) == (computed[0], int(micros[0].mask_N.sum()))
    assert bool(told.second) == (len(micros) > 1)


def test_forwards_have_their_own_cut_or_the_updates():
    lengths, learning = Lengths(prompt=6, reply=5, group=4), PeakBatch(7, 7)
    assert memory.forward_cut(TrainConfig(), learning, lengths, rollouts=8) is learning
    own = memory.forward_cut(TrainConfig(forward_micro_batch_rollouts=8), learning, lengths, rollouts=8)
    assert own == PeakBatch(2 * 6 + 8 * 4, 8 * 5)


def test_the_numbers_of_the_code_are_the_codes():
    assert memory.KEPT_LOGITS == logprobs.KEEP
    for size in (61, 151936, 1 << 28):
        with torch.device("meta"):
            head = logprobs.OutputHead(torch.nn.Linear(8, size))
        shape = Shape(
            family="llama",
            **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn"), 8),
            tied=False,
            max_positions=None,
            vocab_size=size,
        )
        batch = PeakBatch(10**9, 10**9)
        for device in ("cpu", "cuda"):
            setting = Setting(shape=shape, dtype="float32", compiled=True, cpu=device == "cpu")
            assert memory.rows_of_logits(setting, batch) == head.rows_at_once(torch.device(device))
    assert inspect.signature(NativeEngine).parameters["prefill_tokens"].default == memory.PREFILL_TOKENS


# ---------------------------------------------------------------- a model's tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_the_modules(family, tmp_path):
    model = tiny_model(family)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shape_of(family).tensors == expected
    model.config.save_pretrained(tmp_path)
    assert folder_shape(tmp_path, {}).tensors == expected, "config.json alone"
    model.save_pretrained(tmp_path)
    count = sum(p.numel() for p in model.parameters())
    assert folder_shape(tmp_path, {}).parameters == count, "the files"


def test_sizes_by_the_names_of_gpt2(tmp_path):
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_inner": None, "n_positions": 48}
    AutoConfig.for_model("gpt2", **sizes).save_pretrained(tmp_path)
    found = folder_shape(tmp_path, {})
    assert (found.hidden, found.layers, found.heads, found.kv_heads, found.head_dim) == (32, 3, 2, 2, 16)
    assert (found.ffn, found.max_positions) == (128, 48)


def test_an_unknown_family_without_files_has_no_tensors(tmp_path):
    config = {"model_type": "other", "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
    found = folder_shape(tmp_path, {})
    assert (found.tensors, found.parameters, found.ffn) == ({}, None, 32)


# ---------------------------------------------------------------- the plan

BASE = {**TINY, "rewards": {"r": {"function": "exact"}}, "algorithm": {"name": "grpo"}}


def planned(*overrides: str) -> Plan:
    return plans(load(None, overrides, BASE))[0]


def peaks(plan: Plan) -> dict[str, dict[str, int]]:
    """The largest moment of each phase."""
    out: dict[str, memory.Phase] = {}
    for phase in memory_estimate.phases(plan):
        out[phase.name] = max(out.get(phase.name, phase), phase, key=lambda p: p.total)
    return {name: phase.parts for name, phase in out.items()}


def test_experts_of_tokens_are_counted():
    """8 rollouts of 36 tokens: a byte for each of 1 layer and 2 experts, in the rollout and in the batch, or there
    alone."""
    moe = ("tokenizer.vocab_size=50", "model.scratch={name: qwen3_moe, num_experts: 4}")
    held = [
        peaks(planned(*moe, f"train.router_replay={mode}"))["sampling"]["rollouts"]
        for mode in ("none", "sampled", "old")
    ]
    plain = 8 * 36 * memory.ROLLOUT_BYTES
    assert held == [plain, plain + 8 * 36 * 2 * 2, plain + 8 * 36 * 2]


def test_phases_by_hand():
    plan = planned("tokenizer.vocab_size=50", "train.micro_batch_rollouts=null", "machine.kernels=compiled")
    # embedding 50*16; a layer: q, k, v, o 4*16*16, two head norms 8, feed-forward 3*16*48, two norms 16; last norm 16
    count = 50 * 16 + 4 * 16 * 16 + 2 * 8 + 3 * 16 * 48 + 2 * 16 + 16
    found = peaks(plan)
    assert list(found) == [
        "sampling", "forward of the policy", "update of the policy", "optimizer step of the policy",
    ]  # fmt: skip
    held = {"policy": 4 * count, "optimizer of the policy": 8 * count}
    assert all(held.items() <= parts.items() for parts in found.values())
    # 8 rollouts in groups of 2: two pages of the prompt are shared, one page each holds reply tokens 33..35
    page = 2 * 16 * 1 * 2 * 8 * 4
    assert found["sampling"]["KV cache"] == (4 * 2 + 8 * 1) * page
    half = planned("tokenizer.vocab_size=50", "model.dtype=bfloat16")
    assert peaks(half)["sampling"]["KV cache"] == (4 * 2 + 8 * 1) * page, "float32 on a CPU"
    assert found["sampling"]["rollouts"] == 8 * 36 * memory.ROLLOUT_BYTES
    assert found["optimizer step of the policy"]["gradients of the policy"] == 4 * count
    # one micro-batch: 4 prompts of 32 and 8 replies of 4, less the last tokens
    tokens, sampled = 4 * 32 + 8 * 3, 8 * 4
    layer = 4 * (4 * 16 + 2 * 16 + 2 * 16 + 32 + 2 + 3 * 48)
    update = found["update of the policy"]
    # largest in the backward pass of the only layer: what it keeps, its input and gradient, gate and up's gradients
    behind = 2 * 16 + 2 * 48
    assert update["activations"] == tokens * (layer + 4 * (2 * 16 + behind))
    assert update["gradients of the policy"] == 4 * count
    moments = [p.parts for p in memory_estimate.phases(plan) if p.name == "update of the policy"]
    assert moments[0]["activations"] == tokens * layer + 4 * 16 * (2 * tokens + sampled)
    assert moments[0]["output layer"] == 50 * 16 * 4 + sampled * 50 * 4 + sampled * 16 * 4


@pytest.mark.parametrize(
    ("overrides", "larger"),
    [
        (["train.micro_batch_rollouts=2"], ["train.micro_batch_rollouts=8"]),
        (
            ["train.gradient_checkpointing=true", "model.scratch.num_hidden_layers=6"],
            ["model.scratch.num_hidden_layers=6"],
        ),
        (["model.lora.rank=2", "train.micro_batch_rollouts=1"], ["train.micro_batch_rollouts=1"]),
        ([], ["algorithm.kl.coef=0.1"]),
        ([], ["rollout.sync_interval=2"]),
        ([], ["algorithm.name=ppo"]),
        ([], ["train.share_prompts=false", "train.micro_batch_rollouts=8"]),
        (["train.optimizer.name=sgd"], []),
        ([], ["rollout.max_num_seqs=512", "data.eval=[{path: x}]", "rewards.r.function=exact"]),
    ],
)
def test_what_makes_it_larger(overrides, larger):
    small, large = (
        sum(sum(fixed(parts).values()) for parts in peaks(planned(*given)).values())
        for given in (overrides, larger)
    )
    assert small < large


def fixed(parts):
    """Without what is kept only where memory is left."""
    return {name: count for name, count in parts.items() if name != "activations of sampling"}


def test_bfloat16_has_masters_and_casts():
    parts = peaks(planned("model.dtype=bfloat16", "tokenizer.vocab_size=50"))["optimizer step of the policy"]
    count = parts["policy"] // 2
    assert parts["optimizer of the policy"] == 12 * count
    assert parts["gradients of the policy"] == 4 * count, "of the masters"


def test_state_of_8_bits_and_without_masters():
    half = ("model.dtype=bfloat16", "tokenizer.vocab_size=50")
    plain, small, narrow, bare, wide = (
        peaks(planned(*half, *more))
        for more in ((), ("train.optimizer.state_dtype=int8",),
                     ("train.optimizer.state_dtype=bfloat16",), ("train.precision.master_weights=false",),
                     ("train.precision.reduce=float32",))
    )  # fmt: skip
    count = plain["sampling"]["policy"] // 2
    assert small["sampling"]["optimizer of the policy"] == 4 * count + int(count * (2 + 8 / 256))
    assert narrow["sampling"]["optimizer of the policy"] == 4 * count + 4 * count
    assert bare["sampling"]["optimizer of the policy"] == 4 * count, "two moments in bfloat16"
    assert bare["optimizer step of the policy"]["gradients of the policy"] == 2 * count
    assert wide["update of the policy"]["gradients of the policy"] == 4 * count


def test_on_cuda_the_whole_cache_is_taken():
    small, large = (
        peaks(planned(f"machine.device={device}"))["sampling"]["KV cache"] for device in ("cpu", "cuda")
    )
    assert large == planned("machine.device=cuda").kv_cache_bytes
    assert small < large / 2


# ---------------------------------------------------------------- what cannot fit


def test_what_cannot_fit_is_refused_with_its_largest_parts_and_what_to_change():
    wide = (
        "model.scratch={hidden_size: 512, num_attention_heads: 8, num_hidden_layers: 12, "
        "max_position_embeddings: 64}"
    )
    with pytest.raises(ConfigError) as caught:
        memory_estimate.check_memory([planned(wide, "machine.memory_mb=100")])
    said = str(caught.value)
    assert said.startswith("stage 'main' takes up to ")
    assert "update of the policy), but machine.memory_mb has 100 MiB: " in said
    assert said.index("optimizer of the policy") < said.index("policy 1")
    assert "model.lora" in said
    memory_estimate.check_memory([planned(wide, "machine.memory_mb=2000")])


def test_the_machine_is_the_limit(monkeypatch):
    plan = planned()
    need = max(sum(fixed(phase.parts).values()) for phase in memory_estimate.phases(plan))
    monkeypatch.setattr(memory_estimate, "ram_bytes", lambda: memory.LIBRARIES + need)
    memory_estimate.check_memory([plan])
    monkeypatch.setattr(memory_estimate, "ram_bytes", lambda: memory.LIBRARIES + need - 1)
    with pytest.raises(ConfigError, match="but this machine has"):
        memory_estimate.check_memory([plan])
    monkeypatch.setattr(memory_estimate, "cuda_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="but the GPU has 1 MiB"):
        memory_estimate.check_memory([planned("machine.device=cuda", "model.scratch.hidden_size=128")])


def test_a_run_that_cannot_fit_is_not_begun(tmp_path):
    run, wide = tmp_path / "run", "model.scratch.hidden_size=128"
    with pytest.raises(ConfigError, match=r"machine\.memory_mb has 1 MiB"):
        run_training(load(None, [f"run_dir={run}", "machine.memory_mb=1", wide], BASE))
    assert not run.exists()


def test_a_model_that_is_not_there_is_not_refused():
    loaded = load(None, ["machine.memory_mb=1"], {**BASE, "model": {"path": "no/such"}, "tokenizer": {}})
    memory_estimate.check_memory(plans(loaded))


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("text", "limited"), [("1048576\n", True), ("max\n", False), (f"{1 << 62}\n", False)]
)
def test_a_container_has_what_it_is_allowed(text, limited, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CGROUP", (tmp_path / "none",))
    whole = hardware.ram_bytes()
    assert whole > 1 << 28
    file = tmp_path / "memory.max"
    file.write_text(text)
    monkeypatch.setattr(hardware, "CGROUP", (file, tmp_path / "none"))
    assert hardware.ram_bytes() == (1 << 20 if limited else whole)


class Nvml:
    """NVIDIA's library of a machine with GPUs of 1, 2, ... GiB."""

    def __init__(self, start: int = 0, memory: int = 0) -> None:
        self.start, self.failed = start, memory

    def nvmlInit_v2(self) -> int:
        return self.start

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
        device._obj.value = 9
        return 0 if name == b"GPU-9" else 6

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = device.value << 30
        return self.failed


@pytest.mark.parametrize(
    ("library", "visible", "gib"),
    [
        (Nvml(), None, 1),
        (Nvml(), "2,0", 3),
        (Nvml(), "GPU-9", 9),
        (Nvml(), "GPU-7", None),
        (Nvml(), "", None),
        (Nvml(start=9), None, None),
        (Nvml(memory=3), None, None),
        (None, None, None),
    ],
)
def test_memory_of_the_gpu(library, visible, gib, monkeypatch):
    def cdll(name: str) -> Nvml:
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(hardware, "version", lambda name: "2.13.0+cu126")
    monkeypatch.setattr(ctypes, "CDLL", cdll)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.cuda_bytes_here.__wrapped__() == (None if gib is None else gib << 30)


def test_a_torch_without_cuda_has_no_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "version", lambda name: "2.13.0+cpu")
    assert hardware.cuda_bytes_here.__wrapped__() is None


def test_the_first_example_is_small(monkeypatch):
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    for plan in plans(load(root / "examples/first_run.yaml")):
        assert largest(memory_estimate.phases(plan)).total < 1 << 30


# ---------------------------------------------------------------- ranks


def rank_held(*overrides: str) -> dict[str, int]:
    """What a rank keeps, and the most that is gathered."""
    (phase,) = [
        p for p in memory_estimate.rank_phases(planned(*overrides)) if p.name == "forward of the policy"
    ]
    return phase.parts


LAYER = 4 * 16 * 16 + 2 * 8 + 3 * 16 * 48 + 2 * 16
"""Parameters of a layer of the tiny model."""


def test_a_rank_by_hand():
    few = ["tokenizer.vocab_size=50", "model.scratch.num_hidden_layers=4"]
    ends = 50 * 16 + 16
    whole = 4 * (4 * LAYER + ends)
    assert rank_held(*few, "train.parallel.dp_replicate=2")["policy"] == whole
    cut = rank_held(*few, "train.parallel.dp_shard=2")
    assert (cut["policy"], cut["optimizer of the policy"]) == (whole // 2, whole)
    assert cut["gathered layers"] == 4 * (ends + 3 * LAYER)  # at work, ahead, and arriving
    kept = rank_held(*few, "train.parallel.dp_shard=2", "train.parallel.reshard_after_forward=false")
    assert kept["gathered layers"] == 4 * (ends + 5 * LAYER)
    matrices = 4 * (4 * 16 * 16 + 3 * 16 * 48) + 50 * 16
    by_tp = rank_held(*few, "train.parallel.tp=2")
    assert by_tp["policy"] == 4 * (4 * LAYER + ends - matrices // 2)
    stages = rank_held(*few, "train.parallel.pp=2", "train.micro_batch_rollouts=8")
    assert stages["policy"] == 4 * (2 * LAYER + ends)  # the last has the embedding, too: it is tied
    uneven = (
        few[0],
        "model.scratch.num_hidden_layers=10",
        "train.parallel.pp=4",
        "train.parallel.pipeline_chunks=2",
    )
    dealt = rank_held(*uneven, "train.micro_batch_rollouts=8")  # 1 1 1 2, 1 1 1 2
    assert dealt["policy"] == 4 * (4 * LAYER + ends)
    further = (*few, "model.mtp={layers: 2, coef: 0.5}")
    copies = rank_held(*further, "train.parallel.dp_replicate=2")["policy"]
    assert copies > whole + 2 * 4 * LAYER
    assert rank_held(*further, "train.parallel.dp_shard=2")["policy"] == copies // 2


def test_the_tensors_of_a_rank_are_those_of_its_module():
    """What `tensor_parallel` and `expert_parallel` leave on the second of two ranks, parameter by parameter."""
    model = tiny_model("qwen3_moe")
    shape = shape_of("qwen3_moe")
    for dims in ({"tp": 2}, {"dp_shard": 2, "ep": 2}):
        layout = ParallelConfig(**dims)
        one = Peers(1, 2)  # of 61 tokens it has 31
        made = copy.deepcopy(model)
        cuts = tensor_parallel.apply(made, one) if "tp" in dims else None
        if cuts is None:
            expert_parallel.apply(made, one)
        found = {n: tuple(p.shape) for n, p in made.named_parameters()}
        assert {n: held_size(n, s, layout) for n, s in shape.tensors.items()} == found, dims


def test_what_is_together_has_to_fit():
    wide = ["model.scratch.hidden_size=256", "model.scratch.num_hidden_layers=8", "train.parallel.dp_shard=2"]
    plan = planned(*wide)
    (_, shared), *_ = memory_estimate.together(plan)
    assert [(p.name, p.count) for p in shared] == [("this process", 1), ("each rank", 2)]
    need = sum(p.count * p.most.total for p in shared)
    memory_estimate.check_memory([planned(*wide, f"machine.memory_mb={(need >> 20) + 1}")])
    with pytest.raises(
        ConfigError, match=r"this process .*, each rank .* x 2; each rank when saving the policy"
    ):
        memory_estimate.check_memory([planned(*wide, f"machine.memory_mb={(need >> 20) - 1}")])


def test_replicas_have_the_cache_and_a_copy_each():
    plan = planned("rollout.replicas=2")
    own, replica = memory_estimate.places(plan)
    assert (replica.name, replica.count) == ("each replica", 2)
    assert replica.most.parts["KV cache"] > 0
    assert not any("KV cache" in phase.parts for phase in own.phases)
    assert replica.most.parts["policy"] == peaks(planned())["sampling"]["policy"]


def test_who_saves_whole_files_gathers_them():
    few = ["tokenizer.vocab_size=50", "train.parallel.tp=2"]
    saving = [p for p in memory_estimate.rank_phases(planned(*few)) if p.name == "saving the policy"]
    layers = planned(*few).shape.layers
    moments = 2 * 4 * (layers * LAYER + 50 * 16 + 16)
    assert [p.parts["whole tensors of one file"] for p in saving] == [moments]
    for other in (["checkpoint.sharded=true"], ["train.parallel.tp=1", "train.parallel.dp_replicate=2"]):
        assert not [
            p for p in memory_estimate.rank_phases(planned(*few, *other)) if p.name == "saving the policy"
        ]


def rank_update(*overrides: str) -> list[dict[str, int]]:
    return [
        p.parts for p in memory_estimate.rank_phases(planned(*overrides)) if p.name == "update of the policy"
    ]


def test_the_first_of_a_pipeline_keeps_as_many_micro_batches_as_there_are_ranks():
    few = ["tokenizer.vocab_size=50", "model.scratch.num_hidden_layers=4", "machine.kernels=compiled"]
    assert "policy" in rank_held(*few, "train.parallel.pp=2", "train.micro_batch_rollouts=2")
    alone, several = (
        rank_update(*few, "train.parallel.pp=2", f"train.micro_batch_rollouts={n}") for n in (8, 2)
    )
    # one micro-batch of everything: the last rank has most, with norm and output layer
    assert alone[0]["policy"] == 4 * (2 * LAYER + 50 * 16 + 16)
    assert alone[0]["output layer"] > 0
    # four of two rollouts, a prompt of 32 and twice 3: the first has most, without the last norm
    tokens, sampled = 32 + 2 * 3, 2 * 4
    kept = 2 * tokens * 4 * (4 * 16 + 2 * 16 + 2 * 16 + 32 + 2 + 3 * 48)
    assert several[0]["policy"] == 4 * (2 * LAYER + 50 * 16)
    assert several[0]["activations"] == 2 * kept + tokens * 4 * 16 + 4 * 16 * (2 * tokens + sampled)
    assert several[0]["output layer"] == 0


def test_adapters_alone_have_gradients_to_cut():
    few = ["tokenizer.vocab_size=50", "train.parallel.dp_shard=2"]
    plain, lora = (rank_update(*few, *more)[1] for more in ((), ("model.lora.rank=2",)))
    assert plain["gradients before they are sharded"] == 4 * (2 * LAYER + 50 * 16 + 16)
    pairs = 2 * (4 * (16 + 16) + 3 * (16 + 48))  # q, k, v, o; gate, up, down
    assert lora["gradients before they are sharded"] == 4 * 2 * pairs
    assert lora["gathered layers"] == plain["gathered layers"]


def test_products_in_half_precision_are_counted_where_a_cpu_multiplies_it(monkeypatch):
    monkeypatch.setattr(memory_estimate, "multiplies_half", lambda dtype: dtype == "bfloat16")
    monkeypatch.setattr(memory_estimate, "has_tiles", lambda dtype: False)
    few = ["tokenizer.vocab_size=50", "train.micro_batch_rollouts=null"]
    name = "products in half precision"
    half = peaks(planned(*few, "model.dtype=bfloat16"))["update of the policy"][name]
    # q, k, v, o; gate, up; down; the output layer; one micro-batch
    count = (17 + 2) * 4 + 3 * 4
    assert half == count * memory.PRODUCT_BYTES
    assert name not in peaks(planned(*few))["update of the policy"]
    cuda = planned(*few, "model.dtype=bfloat16", "machine.device=cuda")
    assert name not in peaks(cuda)["update of the policy"]
    with monkeypatch.context() as other:
        other.setattr(memory_estimate, "has_tiles", lambda dtype: True)
        parts = peaks(planned(*few, "model.dtype=bfloat16"))["update of the policy"]
    assert name not in parts, "no library multiplies, which would keep it"
    float16 = planned(*few, "model.dtype=float16")
    assert name not in peaks(float16)["update of the policy"], "it is widened, as it is on any other CPU"
    shape = planned(*few).shape
    many = [PeakBatch(n, n) for n in range(200)]
    most = memory.products_bytes(Setting(shape=shape, dtype="float16", compiled=False), cuts=many)
    assert most == memory.PRODUCTS * memory.PRODUCT_BYTES


@pytest.mark.parametrize("positions", [1, 1024, 1025])
def test_a_table_of_rotary_angles_is_as_large_as_the_plan_counts(positions):
    model, shape = tiny_model("qwen3"), shape_of("qwen3")
    table = fused_forward.RopeTable(model.model.rotary_emb).until(positions)
    assert sum(x.untyped_storage().nbytes() for x in table) == shape.rope_bytes(positions)


def test_tables_of_rotary_angles_are_counted_on_a_cpu():
    """2 x 4 bytes of each of a head's 8 numbers, of 2048 positions: a table of each model that trains or scores, one of
    the engine, and one that grows."""
    name = "rotary angles"
    long = (
        "tokenizer.vocab_size=50",
        "model.scratch.max_position_embeddings=1600",
        "rollout.sampling.max_tokens=1500",
    )
    table = 2 * 4 * 8 * 2048
    assert all(parts[name] == 3 * table for parts in peaks(planned(*long)).values())
    more = peaks(planned(*long, "algorithm.kl.coef=0.1", "rollout.sync_interval=2"))["sampling"]
    assert "sampler" in more
    assert more[name] == 4 * table
    own, replica = memory_estimate.places(planned(*long, "rollout.replicas=2"))
    assert (own.most.parts[name], replica.most.parts[name]) == (2 * table, 2 * table)
    assert name not in peaks(planned(*long, "machine.device=cuda"))["sampling"]
    assert rank_held(*long, "train.parallel.dp_replicate=2")[name] == 2 * table
    assert peaks(planned(*long, "train.parallel.dp_replicate=2"))["sampling"][name] == 2 * table
    assert name not in rank_held(*long, "train.parallel.tp=2")


def test_advice_leaves_out_what_is_done():
    parts = {"optimizer of the policy": 3, "policy": 2, "gathered layers": 1}
    assert memory.advice(parts) == [
        "model.lora, whose adapters need little optimizer state or train.optimizer.name=sgd",
        "a smaller model or model.dtype=bfloat16",
        "train.parallel.reshard_after_forward=true or a larger train.parallel.tp",
    ]
    done = ("model.lora", "model.dtype=bfloat16", "train.optimizer.name=sgd")
    assert memory.advice(parts, done)[0] == "a smaller model"
    wide = (
        "model.scratch={hidden_size: 512, num_attention_heads: 8, num_hidden_layers: 12, "
        "max_position_embeddings: 64}"
    )
    with pytest.raises(ConfigError) as caught:
        memory_estimate.check_memory(
            [planned(wide, "machine.memory_mb=50", "model.dtype=bfloat16", "model.lora.rank=2")]
        )
    assert "model.lora" not in str(caught.value)
    assert "bfloat16" not in str(caught.value)

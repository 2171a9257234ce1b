"""Models in and out: scratch weights follow the seed, folders round-trip, bad folders say what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tiny import FAMILIES, VOCAB, tiny_model
from whet.config import sizes
from whet.config.schema import ModelConfig
from whet.config.sizes import folder_shape
from whet.inputs import parse_json
from whet.models import load, mtp
from whet.models.load import build, export, value_head
from whet.models.quantised import MicroScaled
from whet.types import CheckpointError, ConfigError, WhetError


def open_model(path: Path, *, vocab_size: int = VOCAB, **values: Any) -> PreTrainedModel:
    return build(
        ModelConfig(path=str(path), **values),
        vocab_size=vocab_size,
        eos_token_id=None,
        pad_token_id=None,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )


def scratch(overrides: dict[str, Any] | None = None, **values: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1}
    return build(
        ModelConfig(scratch=sizes | values, overrides=overrides or {}),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.float32,
    )


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.state_dict())


def equal(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    x, y = tensors(a), tensors(b)
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")


# ---------------------------------------------------------------- scratch


@pytest.mark.parametrize("family", FAMILIES)
def test_scratch_weights_are_a_function_of_the_seed(family: str) -> None:
    torch.manual_seed(1)
    first = tiny_model(family, seed=5)
    torch.manual_seed(2)
    assert equal(first, tiny_model(family, seed=5))
    assert not equal(first, tiny_model(family, seed=6))


def test_scratch_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    tiny_model()
    value_head(8, seed=0)
    assert torch.equal(torch.randn(3), expected)


def test_scratch_sizes_are_those_asked_for() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
    }
    model = scratch(
        name="qwen3",
        num_hidden_layers=2,
        rope_theta=500.0,
        initializer_range=0.3,
        max_position_embeddings=99,
        **sizes,
    )
    layer = model.model.layers[1]
    assert layer.self_attn.q_proj.weight.shape == (32, 64)
    assert layer.self_attn.k_proj.weight.shape == (16, 64)
    assert layer.mlp.gate_proj.weight.shape == (40, 64)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert layer.mlp.gate_proj.weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]) == (99, 500.0)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    # embedding + 2 x (q, o, k, v, q/k norms, gate/up/down, two norms) + last norm
    layer_size = 2 * 32 * 64 + 2 * 16 * 64 + 2 * 8 + 3 * 40 * 64 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == VOCAB * 64 + 2 * layer_size + 64


def test_defaults_of_unset_sizes() -> None:
    layer = scratch(num_attention_heads=4).model.layers[0]
    assert layer.self_attn.k_proj.weight.shape == (32, 32)
    assert layer.mlp.up_proj.weight.shape == (96, 32)


def test_mixture_sizes() -> None:
    model = scratch(name="qwen3_moe", num_experts=6, num_experts_per_tok=3, intermediate_size=24)
    block = model.model.layers[0].mlp
    assert block.experts.gate_up_proj.shape == (6, 48, 32)
    assert (block.gate.top_k, block.gate.norm_topk_prob) == (3, True)


def test_the_pad_token_learns_like_any_other() -> None:
    model = tiny_model()
    model(input_ids=torch.tensor([[0, 3]])).logits[0, 1, 5].backward()
    embedding = model.get_input_embeddings()
    assert float(embedding.weight[0].detach().abs().sum()) > 0
    assert float(embedding.weight.grad[0].abs().sum()) > 0


def test_models_are_in_evaluation_mode_and_stay_deterministic() -> None:
    assert not any(module.training for module in tiny_model().modules())


def test_bfloat16_keeps_rotary_frequencies_in_float32() -> None:
    model = build(
        ModelConfig(scratch={"hidden_size": 32, "num_hidden_layers": 1}),
        vocab_size=VOCAB,
        eos_token_id=1,
        pad_token_id=0,
        seed=0,
        device="cpu",
        dtype=torch.bfloat16,
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.config.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "3 does not divide num_attention_heads=4",
        ),
        ({"hidden_size": 30, "num_attention_heads": 4}, "give head_dim"),
        ({"head_dim": 7}, "7 is odd"),
        ({"hiden_size": 8}, "did you mean 'hidden_size'"),
        ({"hidden_size": 8.5}, "got 8.5, expected a whole number"),
        ({"name": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3}, "3 is more than num_experts=2"),
        (
            {"name": "llama", "hidden_size": 30, "num_attention_heads": 4, "head_dim": 8},
            "rejects these sizes",
        ),
    ],
)
def test_impossible_sizes_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scratch(**values)


@pytest.mark.parametrize("values", [{}, {"path": "x", "scratch": {}}])
def test_path_or_scratch(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either `path`"):
        build(
            ModelConfig(**values), vocab_size=3, eos_token_id=1, pad_token_id=0, seed=0, device="cpu",
            dtype=torch.float32,
        )  # fmt: skip


def test_value_head() -> None:
    head = value_head(64, seed=3)
    assert head.weight.shape == (1, 64)
    assert torch.equal(head.weight, value_head(64, seed=3).weight)
    assert not torch.equal(head.weight, value_head(64, seed=4).weight)
    assert head.bias.item() == 0
    assert value_head(4095, seed=0).weight.std().item() == pytest.approx(1 / 4096, rel=0.1)


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize("family", FAMILIES)
def test_export_round_trip(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(family)
    export(model, tokenizer(), tmp_path / "out")
    ids = torch.arange(2, 12)[None]
    expected = model(input_ids=ids).logits
    again = open_model(tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert equal(model, again)
    assert torch.equal(again(input_ids=ids).logits, expected)
    assert torch.equal(stock(input_ids=ids).logits, expected)
    opened = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    if family == "qwen2":  # transformers opens every tokenizer of this family as Qwen2Tokenizer
        assert "opens" in caplog.text
        assert "Qwen2Tokenizer, which encodes differently" in caplog.text
        opened = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out", local_files_only=True)
    else:
        assert "encodes differently" not in caplog.text
    assert opened("w7 w3").input_ids == [7, 3]
    assert not any(m.training for m in again.modules())
    assert again.get_input_embeddings().padding_idx is None


def test_experts_in_mxfp4_are_read_as_the_numbers_they_stand_for(tmp_path: Path) -> None:
    """gpt-oss as it is published: codes and scales by outputs. Exports are plain, and open again."""
    model = scratch(name="gpt_oss", hidden_size=64, intermediate_size=32, num_experts=4, num_hidden_layers=1)
    export(model, None, tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    packed, expected = {}, {}
    for name, weight in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = expected[name] = weight
            continue
        four = MicroScaled.like(weight, "mxfp4", turned=True)
        packed[f"{name}_blocks"] = four.numbers.unflatten(-1, (-1, 16))
        packed[f"{name}_scales"] = four.scale
        expected[name] = four.whole(torch.float32).mT
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = open_model(tmp_path)
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters() if name in expected)
    assert folder_shape(tmp_path, {}).parameters == sum(p.numel() for p in model.parameters())
    export(loaded, None, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    for (name, one), other in zip(loaded.named_parameters(), open_model(tmp_path / "again").parameters()):
        assert torch.equal(one, other), name


def test_export_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.txt").write_text("old")
    export(tiny_model(), None, tmp_path / "out")
    export(tiny_model(seed=1), None, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "stale.txt").exists()
    assert equal(open_model(tmp_path / "out"), tiny_model(seed=1))


def test_failed_export_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tiny_model(), None, tmp_path / "out")
    model = tiny_model(seed=1)

    def full(path: Path) -> None:
        (Path(path) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        export(model, None, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert equal(open_model(tmp_path / "out"), tiny_model())


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "m")
    assert open_model(tmp_path / "m", overrides={"rms_norm_eps": 0.5}).config.rms_norm_eps == 0.5


WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("there", "overrides", "read"),
    [
        ({**WINDOWED, "use_sliding_window": False}, {"use_sliding_window": True}, {"sliding_window": 4}),
        (WINDOWED, {"use_sliding_window": False}, {"layer_types": ["full_attention"] * 2}),
        (WINDOWED, {"max_window_layers": 0}, {"layer_types": ["sliding_attention"] * 2}),
        ({"rope_theta": 3e4}, {"rope_theta": 5e4}, {"rope_theta": 5e4}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
            {"rope_theta": 5e4},
            {"rope_theta": 5e4},
        ),
        *(
            (
                old,
                {name: {"rope_type": "linear", "factor": 2.0}},
                {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
            )
            for old in (
                {"rope_theta": 3e4, "rope_scaling": None},
                {"rope_theta": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
                {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
            )
            for name in ("rope_parameters", "rope_scaling")
        ),
    ],
)
def test_overrides_stand_over_the_file(
    there: dict[str, Any], overrides: dict[str, Any], read: dict[str, Any], tmp_path: Path
) -> None:
    """What transformers makes of the file when it reads it is made of them, too."""
    export(tiny_model("qwen2"), None, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    kept = json.loads(file.read_text())
    for name in ("layer_types", "rope_parameters", *WINDOWED):
        kept.pop(name, None)
    file.write_text(json.dumps(kept | there))
    found = open_model(tmp_path / "m", overrides=overrides).config.to_dict()
    found |= found["rope_parameters"]
    assert {name: found[name] for name in read} == read


def test_dropout_of_a_folder_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.25
    export(model, None, tmp_path / "m")
    with caplog.at_level("INFO", "whet"):
        open_model(tmp_path / "m", overrides={"rms_norm_eps": 1e-5})
        assert "own dropout is not applied (attention_dropout=0.25)" in caplog.text
        caplog.clear()
        open_model(tmp_path / "m", overrides={"attention_dropout": 0.0})
        assert "dropout" not in caplog.text


def test_overrides_of_a_new_model_stand_over_its_sizes() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    model = scratch({"rope_parameters": linear}, rope_theta=3e4)
    assert model.config.rope_parameters == {**linear, "rope_theta": 3e4}


def test_a_new_model_has_the_vocabulary_of_its_tokenizer_or_a_padded_one() -> None:
    assert scratch().config.vocab_size == len(scratch().get_input_embeddings().weight) == VOCAB
    padded = scratch({"vocab_size": VOCAB + 5})
    assert padded.config.vocab_size == len(padded.get_input_embeddings().weight) == VOCAB + 5
    with pytest.raises(ConfigError, match=f"vocab_size={VOCAB - 1}, but the tokenizer has {VOCAB} tokens"):
        scratch({"vocab_size": VOCAB - 1})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        with pytest.raises(ConfigError, match=f"model.overrides: {name} of a new model is its tokenizer's"):
            scratch({name: 2})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rms_norm_epz": 1.0}, "rms_norm_epz is not a key of a qwen3 config.json"),
        ({"revision": "main"}, "revision is not a key"),
        ({"torch_dtype": "float16"}, "torch_dtype is decided by model.dtype"),
        ({"model_type": "llama"}, "model_type is decided by"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: no dropout of a model's own is applied"),
    ],
)
def test_overrides_without_effect_are_refused(overrides: dict[str, Any], said: str, tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "m")
    with pytest.raises(ConfigError, match=said):
        open_model(tmp_path / "m", overrides=overrides)
    with pytest.raises(ConfigError, match=said):
        scratch(overrides)


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "m")
    with pytest.raises(ConfigError, match=f"the tokenizer has 99 tokens, the embedding {VOCAB} rows"):
        open_model(tmp_path / "m", vocab_size=99)


def test_the_tensors_of_each_file_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of the checks before transformers reads them: with 400,000 names a listing takes seconds."""
    export(tiny_model(), None, tmp_path)
    sharded(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    listed: list[str] = []

    class Listing:
        def __init__(self, path: Path, **given: Any) -> None:
            self.path, self.opened = path, safe_open(path, **given)

        def __enter__(self) -> Listing:
            self.opened.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.opened.__exit__(*error)

        def keys(self) -> list[str]:
            listed.append(self.path.name)
            return self.opened.keys()  # type: ignore[no-any-return]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.opened, name)

    def parsed(data: bytes, where: str, *error: Any) -> Any:
        if where.endswith(".safetensors"):  # its head
            listed.append(Path(where).name)
        return parse_json(data, where, *error)

    monkeypatch.setattr(sizes, "parse_json", parsed)
    monkeypatch.setattr(safetensors, "safe_open", Listing)
    for module in (load, mtp):
        monkeypatch.setattr(module, "safe_open", Listing)
    open_model(tmp_path)
    assert sorted(listed) == files


def no_folder(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def distributed(folder: Path) -> None:
    """As Megatron-LM and torch write one: an index, and parts."""
    no_config(folder)
    (folder / ".metadata").write_bytes(b"\x80\x04.")
    (folder / "__0_0.distcp").write_bytes(b"")


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def unknown_family(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "nosuch"}')


def remote_code(path: Path) -> None:
    """A folder that brings its own code: it must not be run."""
    (path / "evil.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (path / "config.json").write_text(json.dumps({"model_type": "nosuch", "auto_map": auto}))


def only_pickle(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def truncated(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def rewrite(path: Path, change: Any) -> None:
    held = load_file(path / "model.safetensors")
    change(held)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


def missing(path: Path) -> None:
    rewrite(path, lambda held: held.pop("model.layers.0.mlp.up_proj.weight"))


def unexpected(path: Path) -> None:
    rewrite(path, lambda held: held.update({"model.layers.0.mlp.extra.weight": torch.zeros(2)}))


def misshaped(path: Path) -> None:
    rewrite(path, lambda held: held.update({"model.norm.weight": torch.zeros(5)}))


class Ran:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran").absolute(),)


def sharded(path: Path, **changed: Any) -> None:
    """Cut into files with an index, of which some entries are then changed."""
    open_model(path).save_pretrained(path, max_shard_size="20kB")
    (path / "model.safetensors").unlink()
    index = path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"] |= {"model.norm.weight": changed["norm"]} if "norm" in changed else {}
    index.write_text(json.dumps(changed.get("index", said)))


def pickled(path: Path) -> None:
    torch.save(Ran(), path)


def index_leads_out(path: Path) -> None:
    pickled(path.parent / "outside.bin")
    sharded(path, norm="../outside.bin")


def index_leads_out_to_tensors(path: Path) -> None:
    sharded(path, norm="../outside.safetensors")


def index_names_a_pickle(path: Path) -> None:
    pickled(path / "inside.bin")
    sharded(path, norm="inside.bin")


def index_is_absolute(path: Path) -> None:
    sharded(path, norm="/etc/passwd.safetensors")


def index_of_nothing(path: Path) -> None:
    sharded(path, index=[])


def index_lacks_a_file(path: Path) -> None:
    sharded(path, norm="other.safetensors")


def config_names_a_pickle(path: Path) -> None:
    pickled(path / "adapter_model.bin")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))


def adapters(path: Path) -> None:
    (path / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (
            index_leads_out,
            CheckpointError,
            r"names '../outside.bin'; only \*.safetensors files of the folder",
        ),
        (index_leads_out_to_tensors, CheckpointError, "names '../outside.safetensors'; only"),
        (index_names_a_pickle, CheckpointError, "names 'inside.bin'; only"),
        (index_is_absolute, CheckpointError, "names '/etc/passwd.safetensors'; only"),
        (index_of_nothing, CheckpointError, "index.json: expected a JSON object"),
        (index_lacks_a_file, CheckpointError, "names other.safetensors, which is missing"),
        (config_names_a_pickle, CheckpointError, "names 'adapter_model.bin' as transformers_weights; only"),
        (adapters, CheckpointError, "adapters as model.lora.path"),
        (no_folder, ConfigError, "no such folder"),
        (no_config, ConfigError, "no config.json"),
        (
            distributed,
            ConfigError,
            "checkpoint of torch or Megatron.* a Python pickle.* export it with the system",
        ),
        (broken_config, ConfigError, "config.json: not JSON"),
        (unknown_family, ConfigError, "nosuch"),
        (remote_code, ConfigError, "trust_remote_code"),
        (only_pickle, CheckpointError, "only pytorch_model.bin, which is pickle and never opened"),
        (no_weights, CheckpointError, "needs .*safetensors files, found none"),
        (truncated, CheckpointError, "model.safetensors is damaged or incomplete"),
        (missing, CheckpointError, "missing: model.layers.0.mlp.up_proj.weight"),
        (unexpected, CheckpointError, "unexpected: model.layers.0.mlp.extra.weight"),
        (misshaped, CheckpointError, "model.norm.weight"),
    ],
)
def test_bad_folders_say_what_is_wrong(
    damage: Any, error: type[WhetError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export(tiny_model(), None, tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(error, match=words):
        open_model(tmp_path / "m")
    assert not (tmp_path / "ran").exists()


def retype(file: Path, name: str, dtype: str, bits: int) -> None:
    """Zeros of another dtype in the place of a tensor, as many as it has; its file stays whole."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    head, parts, end = json.loads(data[8:begin]), [], 0
    for key, about in head.items():
        if key == "__metadata__":
            continue
        start, stop = about["data_offsets"]
        part = data[begin + start : begin + stop]
        if key == name:
            about["dtype"], part = dtype, bytes(prod(about["shape"]) * bits // 8)
        about["data_offsets"], end = [end, end + len(part)], end + len(part)
        parts.append(part)
    said = json.dumps(head).encode()
    file.write_bytes(b"".join([len(said).to_bytes(8, "little"), said, *parts]))


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("X9", 32), ("F4", 4), ("F6_E2M3", 6), ("U64", 64), ("I8", 8), ("U8", 8), ("BOOL", 8), ("C64", 64)],
)
def test_weights_of_a_dtype_that_no_weight_has_are_refused(dtype: str, bits: int, tmp_path: Path) -> None:
    """By tensor and dtype; a dtype that safetensors does not know, by the dtype."""
    export(tiny_model(), None, tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    retype(tmp_path / "m/model.safetensors", name, dtype, bits)
    with pytest.raises(CheckpointError, match=rf"\b{dtype}\b") as caught:
        open_model(tmp_path / "m")
    assert name in str(caught.value) or dtype == "X9"


@pytest.mark.parametrize(("dtype", "bits"), [("F64", 64), ("BF16", 16), ("F16", 16)])
def test_weights_of_any_usual_dtype_are_read(dtype: str, bits: int, tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "m")
    retype(tmp_path / "m/model.safetensors", "model.norm.weight", dtype, bits)
    weights = dict(open_model(tmp_path / "m").named_parameters())
    assert not weights.pop("model.norm.weight").any()
    for name, p in tiny_model().named_parameters():
        assert name not in weights or torch.equal(weights[name], p), name


def test_a_folder_of_links_into_a_cache_and_one_in_parts_are_opened(tmp_path: Path) -> None:
    export(tiny_model(), None, tmp_path / "m")
    sharded(tmp_path / "m")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "m").iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(list(snapshot.glob("*.safetensors"))) > 1
    for (name, a), b in zip(tiny_model().named_parameters(), open_model(snapshot).parameters()):
        assert torch.equal(a, b), name


# ---------------------------------------------------------------- environment

ASK = """
import os, sys
from whet import environment
environment.prepare({threads}, {exact})
assert "torch" not in sys.modules
print(*[f"{{name}}={{os.environ.get(name)}}" for name in
        ("MKL_CBWR", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")])
"""


@pytest.mark.parametrize(
    ("threads", "exact", "given", "expected"),
    [
        (3, True, {}, "MKL_CBWR=AUTO,STRICT HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false "
                      "OMP_NUM_THREADS=3 OMP_WAIT_POLICY=PASSIVE"),
        (None, False, {}, "MKL_CBWR=None HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false "
                          "OMP_NUM_THREADS=None OMP_WAIT_POLICY=PASSIVE"),
        (3, True, {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AVX2,STRICT"},
         "MKL_CBWR=AVX2,STRICT HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false "
         "OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE"),
    ],
)  # fmt: skip
def test_environment(threads: int | None, exact: bool, given: dict[str, str], expected: str) -> None:
    own = ("MKL_CBWR", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    environment = {k: v for k, v in os.environ.items() if k not in own} | given
    code = ASK.format(threads=threads, exact=exact)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr

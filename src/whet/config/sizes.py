"""How large a model is, from its config alone: its tensors, and what a KV cache and a checkpoint of it take.

Reads config.json and the heads of safetensors files; no weights, no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from whet.config import mtp
from whet.config.functions import ARCHITECTURES
from whet.config.schema import ModelConfig, TokenizerConfig
from whet.config.scratch import config_json
from whet.inputs import MOST_JSON_BYTES, check_regular, parse_json, read_json_object
from whet.types import ConfigError, Json

PAGE_TOKENS = 16
"""Tokens of one page of the KV cache."""
VECTOR = 16
"""Numbers of a vector in C: attention of heads that have no whole vectors is not computed there."""
ROPE_POSITIONS = 1024
"""Positions that are added at a time to a table of rotary angles (`models.fused_forward.RopeTable`)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MOST_SIZE = 2**31 - 1
"""Of any dimension of a model."""
MOST_LAYERS = 10_000

_GPT2 = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
"""What the config.json of GPT-2 and its kin calls sizes, and what all others do."""
_HEAD_NORMS = ("qwen3", "qwen3_moe")
_BIASED = ("qwen2", "mimo", "gpt_oss")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What memory and arithmetic depend on. None: not to be known before the tokenizer is built."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward layer, of one expert in a mixture."""
    experts: int = 0
    """0: no mixture."""
    experts_per_token: int = 0
    mtp: int = 0
    """Layers of multi-token prediction."""
    tied: bool
    """The output layer is the embedding."""
    max_positions: int | None
    vocab_size: int | None
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Every parameter by its Hugging Face name; empty if not known."""

    @property
    def parameters(self) -> int | None:
        return sum(map(prod, self.tensors.values())) if self.tensors else None

    @property
    def head_norms(self) -> bool:
        """Queries and keys are normed head by head."""
        return self.family in _HEAD_NORMS

    def kv_bytes(self, *, rows: int, tokens: int, dtype: str) -> int:
        """KV cache of so many rows of so many tokens, in whole pages. dtype: of the cache."""
        return rows * -(-tokens // PAGE_TOKENS) * self.page_bytes(dtype)

    @property
    def layer_outputs(self) -> tuple[int, ...]:
        """Numbers that the products, the attention and the log-sum-exps of a dense layer give for a token: see
        `whet.models.activations.LayerOutput`."""
        own, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return own, shared, shared, own, self.heads, self.hidden, self.ffn, self.ffn, self.hidden

    def rope_bytes(self, positions: int) -> int:
        """A table of rotary angles: cosine and sine, float32, of every number of a head."""
        return rope_positions(positions) * 2 * self.head_dim * DTYPE_BYTES["float32"]

    def page_bytes(self, dtype: str) -> int:
        """One page of the KV cache, all layers."""
        return PAGE_TOKENS * 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def rope_positions(positions: int) -> int:
    """Positions of a table of rotary angles that has to have this number."""
    return -(-positions // ROPE_POSITIONS) * ROPE_POSITIONS


def cache_dtype(device: str, dtype: str) -> str:
    """Of the KV cache of a model of this dtype: on a CPU attention is computed in float32."""
    return "float32" if device == "cpu" else dtype


def shape(model: ModelConfig, tokenizer: TokenizerConfig) -> Shape | None:
    """The policy's shape; None if its folder is not on this machine. ConfigError if it holds no model."""
    if model.scratch is not None:
        return new_shape(model, vocab_size=_vocab_size(tokenizer))
    folder = Path(model.path or "").expanduser()
    if model.path is None or not folder.is_dir():
        return None
    return folder_shape(folder, model.overrides, model=model)


def new_shape(model: ModelConfig, *, vocab_size: int | None) -> Shape:
    """The shape of a new model; a tied embedding counts once. vocab_size: rows of the embedding."""
    try:
        config = config_json(model)
        sizes = {**config_sizes(config), "mtp": mtp.wanted(model, config)}
    except (ValueError, KeyError) as e:
        raise ConfigError(f"model.overrides: {e}") from e
    return with_tensors(**{**sizes, "vocab_size": vocab_size})


def with_tensors(**sizes: Json) -> Shape:
    """A shape of these sizes with the tensors that its family has."""
    bare = Shape(**sizes)
    known = bare.family in ARCHITECTURES and bare.vocab_size is not None
    return Shape(**sizes, tensors=dict(_tensors(bare))) if known else bare


def _tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    vocab_size = s.vocab_size or 0
    yield "model.embed_tokens.weight", (vocab_size, s.hidden)
    for n in range(s.layers):
        for name, size in (*_attention(s), *_feed_forward(s)):
            yield f"model.layers.{n}.{name}", size
    yield from _mtp(s)
    yield "model.norm.weight", (s.hidden,)
    if not s.tied:
        yield "lm_head.weight", (vocab_size, s.hidden)


def _mtp(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of layers of multi-token prediction, by DeepSeek's names."""
    own = {
        "enorm": (s.hidden,),
        "hnorm": (s.hidden,),
        "eh_proj": (s.hidden, 2 * s.hidden),
        "shared_head.norm": (s.hidden,),
    }
    for n in range(s.layers, s.layers + s.mtp):
        for name, size in (*_attention(s), *_feed_forward(s)):
            yield f"model.layers.{n}.{name}", size
        for name, size in own.items():
            yield f"model.layers.{n}.{name}.weight", size


def _attention(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
        yield f"self_attn.{name}_proj.weight", (heads * s.head_dim, s.hidden)
        if s.family in _BIASED:
            yield f"self_attn.{name}_proj.bias", (heads * s.head_dim,)
    yield "self_attn.o_proj.weight", (s.hidden, s.heads * s.head_dim)
    if s.family == "gpt_oss":
        yield "self_attn.o_proj.bias", (s.hidden,)
        yield "self_attn.sinks", (s.heads,)
    if s.head_norms:
        yield "self_attn.q_norm.weight", (s.head_dim,)
        yield "self_attn.k_norm.weight", (s.head_dim,)
    yield "input_layernorm.weight", (s.hidden,)
    yield "post_attention_layernorm.weight", (s.hidden,)


def _feed_forward(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    if s.family == "gpt_oss":
        yield "mlp.router.weight", (s.experts, s.hidden)
        yield "mlp.router.bias", (s.experts,)
        for name, inputs, outputs in (("gate_up_proj", s.hidden, 2 * s.ffn), ("down_proj", s.ffn, s.hidden)):
            yield f"mlp.experts.{name}", (s.experts, inputs, outputs)
            yield f"mlp.experts.{name}_bias", (s.experts, outputs)
        return
    if s.experts:
        yield "mlp.gate.weight", (s.experts, s.hidden)
        yield "mlp.experts.gate_up_proj", (s.experts, 2 * s.ffn, s.hidden)
        yield "mlp.experts.down_proj", (s.experts, s.hidden, s.ffn)
        return
    yield "mlp.gate_proj.weight", (s.ffn, s.hidden)
    yield "mlp.up_proj.weight", (s.ffn, s.hidden)
    yield "mlp.down_proj.weight", (s.hidden, s.ffn)


def micro_batch_tokens(device: str, hidden_size: int) -> int:
    """Default of train.micro_batch_tokens: where larger micro-batches only take more memory.

    On a CPU 2^19 / width (4096 tokens at width 128, 1024 at 512), on CUDA 16384.
    """
    return 16_384 if device == "cuda" else max(512, 2**19 // hidden_size)


def in_words(count: int) -> str:
    """Bytes as people say them: '1.5 GiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


# ---------------------------------------------------------------- folders


def _vocab_size(tokenizer: TokenizerConfig) -> int | None:
    """Upper bound for a tokenizer that will be built, the size of one that is there, or None."""
    if tokenizer.build is not None:
        return tokenizer.vocab_size
    file = Path(tokenizer.path or "").expanduser() / "tokenizer.json"
    if tokenizer.path is None or not file.is_file():
        return None
    found = read_json_object(file, ConfigError)
    try:
        ids = {int(token["id"]) for token in found.get("added_tokens", ())}
        vocab = found.get("model", {}).get("vocab", ())
        known = map(int, vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
        return max([*ids, *known], default=-1) + 1
    except (TypeError, KeyError, ValueError, AttributeError) as e:
        raise ConfigError(f"{file} is not a tokenizer: {type(e).__name__}: {e}") from e


def exported(folder: Path) -> str:
    """What to do first where the folder has adapters alone, or a checkpoint that only its own system reads; else ''."""
    if (folder / "adapter_config.json").is_file():
        return "it has adapters alone: merge them, or name them in model.lora.path beside the policy's base model; "
    if not (folder / ".metadata").is_file():
        return ""
    return (
        "it is a distributed checkpoint of torch or Megatron, whose index (.metadata) is a Python pickle, which whet "
        "does not read: export it with the system that wrote it, and "
    )


def folder_shape(folder: Path, overrides: Mapping[str, Json], *, model: ModelConfig | None = None) -> Shape:
    """The shape of a Hugging Face folder: by its files where they are there, else by config.json alone. model: what
    the run says of it; without one it has no layers of multi-token prediction."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} holds no config.json; {exported(folder)}give the folder of a Hugging Face model"
        )
    config = read_json_object(folder / "config.json", ConfigError) | dict(overrides)
    try:
        ahead = 0 if model is None else mtp.wanted(model, config)
        sizes = {**config_sizes(config), "mtp": ahead}
    except ValueError as e:
        raise ConfigError(f"model.path: {folder}/config.json: {e}") from e
    except KeyError as e:
        raise ConfigError(
            f"model.path: {folder}/config.json has no {e}: not a text decoder of a known kind"
        ) from e
    found = {name: size for head in heads(folder) for name, (_, size) in head.tensors.items()}
    if not found or any(
        name.endswith("_blocks") for name in found
    ):  # of mxfp4, which is loaded as whole numbers
        return with_tensors(**sizes)
    inside = mtp.names_of(found, sizes["layers"])
    tensors = {n: size for n, size in found.items() if n not in inside}
    if ahead:
        own = {n: found[n] for n in inside if not n.removesuffix(".weight").endswith(mtp.COPIES)}
        tensors |= own or dict(_mtp(Shape(**sizes)))
    return Shape(**sizes, tensors=tensors)


def config_sizes(config: Mapping[str, Json]) -> dict[str, Json]:
    """The sizes of a Hugging Face text config, by the names of `Shape`. KeyError for one of no decoder."""
    config = {**{usual: config[own] for own, usual in _GPT2.items() if own in config}, **config}
    heads = _size(config, "num_attention_heads")
    kv_heads = _size_or(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    family = config.get("model_type", "")
    if not isinstance(family, str):
        raise ValueError(f"model_type is {family!r}, expected a name")
    hidden = _size_or(config, "hidden_size", None) or heads * _size(config, "head_dim")
    experts = _size_or(config, "num_experts", 0) or _size_or(config, "num_local_experts", 0)
    ffn = _size_or(config, "intermediate_size", 4 * hidden)
    return {
        "family": family,
        "hidden": hidden,
        "layers": _size(config, "num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": _size_or(config, "head_dim", max(1, hidden // heads)),
        "ffn": _size_or(config, "moe_intermediate_size", ffn) if experts else ffn,
        "experts": experts,
        "experts_per_token": _size_or(config, "num_experts_per_tok", 0),
        "tied": bool(config.get("tie_word_embeddings", family == "gemma")),
        "max_positions": _size_or(config, "max_position_embeddings", None),
        "vocab_size": _size_or(config, "vocab_size", None),
    }


def _size(config: Mapping[str, Json], key: str, *, most: int = MOST_SIZE) -> int:
    """A size that must be there. KeyError where it is not, ValueError where it is no size."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{key} is {repr(value)[:40]}, expected a whole number from 1 to {most}")
    return value


def _size_or(config: Mapping[str, Json], key: str, default: Any) -> Any:
    """A size that may be absent, null or what it is by default."""
    return default if config.get(key) in (None, default) else _size(config, key)


def check_files(
    folder: Path,
    overrides: Mapping[str, Json],
    files: Sequence[Head],
    *,
    key: str = "model.path",
    over: str = "model.overrides",
) -> None:
    """ConfigError where config.json asks for a model several times as large as the files: to make it would fill the
    memory before anything could be compared. Families that are not known are reckoned as if they were of a known one.
    files: the heads of the folder's files. key, over: the keys that gave the folder and the overrides.
    """
    config = read_json_object(folder / "config.json", ConfigError) | dict(overrides)
    try:
        wanted = sum(prod(size) for _, size in _tensors(Shape(**config_sizes(config))))
    except ValueError as e:
        raise ConfigError(f"{key}: {folder}/config.json: {e}") from e
    except KeyError:  # of no decoder: who reads it says so
        return
    held = _numbers(files)
    if held and wanted > 4 * held + 2**20:
        raise ConfigError(
            f"{key}={folder}: config.json (with {over}) asks for about {wanted:.3g} parameters, the "
            f"files hold {held:.3g}; they are not of one model"
        )


def parameters_in(folder: Path) -> int:
    """Numbers in the safetensors files of a folder."""
    return _numbers(heads(folder))


def _numbers(files: Sequence[Head]) -> int:
    sizes = {name: size for head in files for name, (_, size) in head.tensors.items()}
    return sum(map(prod, sizes.values()))


class Head(NamedTuple):
    """What a safetensors file says of its tensors."""

    file: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """(dtype, shape) by name."""


def heads(folder: Path) -> list[Head]:
    """The heads of a folder's safetensors files (8 bytes of length, then JSON). A model may have 100,000 tensors and
    more, so who asks several things of its files reads their heads once."""
    return [Head(file, _head(file)) for file in sorted(folder.glob("*.safetensors"))]


def _head(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """ConfigError for a file that does not begin as a safetensors file does."""
    check_regular(file, ConfigError)
    damaged = f"{file} is damaged or incomplete; copy it again"
    with file.open("rb") as f:
        size = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))[0]
        if size > min(file.stat().st_size, MOST_JSON_BYTES):
            raise ConfigError(damaged)
        head = parse_json(f.read(size) or b"{}", str(file), ConfigError)
    try:
        return {
            name: (str(tensor["dtype"]), tuple(map(index, tensor["shape"])))
            for name, tensor in head.items()
            if name != "__metadata__"
        }
    except (AttributeError, TypeError, KeyError) as e:
        raise ConfigError(damaged) from e

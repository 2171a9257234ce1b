"""How large a model is, from its config alone: parameters, and what training, caching and saving it take.

Reads config.json and the heads of safetensors files; no weights, no torch.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from whet.config.schema import Model, Scratch, Tokenizer
from whet.types import ConfigError, Json

PAGE_TOKENS = 16
"""Tokens of one page of the KV cache."""
MOMENT_BYTES = 8
"""Adam's two moments of one parameter, float32."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """What memory depends on. None: not to be known before the tokenizer is built or the folder is there."""

    parameters: int | None
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    vocab_size: int | None

    def kv_bytes(self, *, rows: int, tokens: int, dtype: str) -> int:
        """KV cache of so many rows of so many tokens, in whole pages."""
        pages = rows * -(-tokens // PAGE_TOKENS)
        return pages * PAGE_TOKENS * 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def shape(model: Model, tokenizer: Tokenizer) -> Shape | None:
    """The policy's shape; None if its folder is not on this machine. ConfigError if it holds no model."""
    if model.scratch is not None:
        return scratch_shape(model.scratch, vocab_size=_vocab_size(tokenizer))
    folder = Path(model.path or "").expanduser()
    if model.path is None or not folder.is_dir():
        return None
    return _folder_shape(folder, model.overrides)


def scratch_shape(cfg: Scratch, *, vocab_size: int | None) -> Shape:
    """The shape of a model from scratch; a tied embedding counts once. vocab_size: rows of the embedding."""
    head_dim = cfg.head_dim or cfg.hidden_size // cfg.heads
    kv_heads = cfg.kv_heads or cfg.heads
    count = None
    if vocab_size is not None:
        embedding = vocab_size * cfg.hidden_size * (1 if cfg.tie_embeddings else 2)
        layer = _attention(cfg, head_dim, kv_heads) + _feed_forward(cfg) + 2 * cfg.hidden_size
        count = embedding + cfg.layers * layer + cfg.hidden_size
    return Shape(count, cfg.layers, kv_heads, head_dim, cfg.max_positions, vocab_size)


def _attention(cfg: Scratch, head_dim: int, kv_heads: int) -> int:
    width, kv_width = cfg.heads * head_dim, kv_heads * head_dim
    weights = 2 * cfg.hidden_size * (width + kv_width)
    biases = width + 2 * kv_width if cfg.architecture == "qwen2" else 0
    norms = 2 * head_dim if cfg.architecture.startswith("qwen3") else 0
    return weights + biases + norms


def _feed_forward(cfg: Scratch) -> int:
    dense = 3 * cfg.hidden_size * (cfg.ffn_size or 3 * cfg.hidden_size)
    if cfg.architecture == "qwen3_moe":
        return cfg.experts * dense + cfg.hidden_size * cfg.experts
    return dense


def train_bytes(parameters: int, dtype: str) -> int:
    """Weights, gradients and Adam's moments; parameters that are not float32 have a float32 master copy."""
    return parameters * (2 * DTYPE_BYTES[dtype] + MOMENT_BYTES + _master(dtype))


def checkpoint_bytes(parameters: int, dtype: str) -> int:
    """The same without gradients, as it lies on disk."""
    return parameters * (DTYPE_BYTES[dtype] + MOMENT_BYTES + _master(dtype))


def _master(dtype: str) -> int:
    return 0 if dtype == "float32" else 4


# ---------------------------------------------------------------- folders


def _vocab_size(tokenizer: Tokenizer) -> int | None:
    """Upper bound for a tokenizer that will be built, the size of one that is there, or None."""
    if tokenizer.build is not None:
        return tokenizer.vocab_size
    file = Path(tokenizer.path or "").expanduser() / "tokenizer.json"
    if tokenizer.path is None or not file.is_file():
        return None
    found = _json(file)
    ids = {token["id"] for token in found.get("added_tokens", ())}
    vocab = found.get("model", {}).get("vocab", ())
    return max([*ids, *(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))], default=-1) + 1


def _folder_shape(folder: Path, overrides: dict[str, Json]) -> Shape:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} holds no config.json; give the folder of a Hugging Face model"
        )
    config = _json(folder / "config.json") | overrides
    try:
        heads = config["num_attention_heads"]
        return Shape(
            parameters=_count(folder),
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_positions=config.get("max_position_embeddings"),
            vocab_size=config.get("vocab_size"),
        )
    except KeyError as e:
        raise ConfigError(
            f"model.path: {folder}/config.json has no {e}: not a text decoder of a known kind"
        ) from e


def _json(file: Path) -> dict[str, Json]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read as JSON: {e}") from e
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return found


def _count(folder: Path) -> int | None:
    """Parameters in the safetensors files, by their heads (8 bytes of length, then JSON)."""
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        with file.open("rb") as f:
            size = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))[0]
            if size > file.stat().st_size:
                raise ConfigError(f"model.path: {file} is damaged or incomplete; copy it again")
            head = json.loads(f.read(size) or b"{}")
        total += sum(prod(tensor["shape"]) for name, tensor in head.items() if name != "__metadata__")
    return total if files else None

"""Cosmos-RL: rows of one kind, and reasons that several keys share."""

from __future__ import annotations

from whet.config.dialects.cosmos_run import engine_options, nothing, uploads
from whet.config.dialects.key import Key, coming, derived, translated
from whet.types import Json

EITHER = (True, False)
SIZES = tuple(range(257))
"""Numbers of devices, processes or pieces: no result depends on them."""

LOADING = (
    "loading rows in other processes (data services); rows here are read once and kept as tokens, in any case"
)
HUB = "models and data sets from a hub"
WHOLE = "splitting a model over several devices; a model here is whole, which changes no number"
SHARDED = "sharding over several devices (FSDP); one process shards nothing"
BATCH = (
    "Responses of a replica x replicas / n_generation = prompts of a step. Losses are means over the whole optimizer "
    "step, however it is spread or cut; Cosmos weighs mini-batches by their number of responses."
)
ROWS = "A local file, or folder (parquet, jsonl, saved by `datasets`) with subsets and splits; or 'file.py:function'."


def section(name: str) -> Key:
    """A section; what it holds is judged by its own rows."""
    return derived(name, nothing, default=None, reason="A section; its keys count, each for itself.")


def size(name: str, feature: str, *, default: int) -> Key:
    """A number of devices or pieces that no result depends on."""
    return coming(name, feature, default=default, harmless=SIZES)


def upload(name: str, *, default: Json, reason: str) -> Key:
    """A part of what is uploaded where."""
    natives = tuple(f"checkpoint.{native}" for native in ("upload_to", "upload_exports_to", "upload"))
    return translated(name, uploads, *natives, default=default, reason=reason)


def machinery(name: str, reason: str) -> Key:
    """Wiring of several processes: any value is accepted, there is nothing to wire."""
    return Key(name=name, status="inert", default=None, reason=reason, translate=nothing)


def vllm(name: str, *, default: Json, reason: str = "how vLLM uses a GPU") -> Key:
    """An option of vLLM that changes no number beyond rounding: handed over once vLLM is there."""
    text = f"{reason}; the embedded engine, which stands in, does not read it."
    return Key(
        name=name, status="engine", native=("vllm",), default=default, reason=text, translate=engine_options
    )

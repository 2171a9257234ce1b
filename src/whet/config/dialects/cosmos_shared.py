"""Cosmos-RL: rows of one kind, and reasons that several keys share."""

from __future__ import annotations

from whet.config.dialects.cosmos_run import engine_options, nothing, uploads
from whet.config.dialects.cosmos_steps import any_size, any_switch, layout
from whet.config.dialects.key import Key, derived, translated
from whet.config.dialects.layout import FITTED, native
from whet.types import Json

EITHER = (True, False)
SIZES = tuple(range(257))
"""Numbers of devices, processes or pieces: no result depends on them."""

LOADING = "Rows are read once, by one process, and kept as tokens; no result depends on it."
HUB = "Of ORG/NAME on the hub, from where it is then fetched (hf://ORG/NAME@REVISION); null and main: no other one."
ENGINES = "How one of Cosmos's engines lies on its devices; here each lies whole on one. No number changes."
NO_FP4 = "torch has no training products in 4 bits; train.fp8 has them in 8."
BATCH = (
    "Responses of a replica x replicas / n_generation = prompts of a step. Losses are means over the whole optimizer "
    "step, however it is spread or cut; Cosmos weighs mini-batches by their number of responses."
)
ROWS = "A local file, or folder (parquet, jsonl, saved by `datasets`) with subsets and splits; or 'file.py:function'."


def section(name: str) -> Key:
    """A section; what it holds is judged by its own rows."""
    return derived(name, nothing, default=None, reason="A section; its keys count, each for itself.")


def size(name: str, reason: str, *, default: Json, least: int = 1, nullable: bool = False) -> Key:
    """A number of devices, processes or pieces that no result depends on."""
    return derived(name, any_size(name, least=least, nullable=nullable), default=default, reason=reason)


def switch(name: str, reason: str, *, default: bool) -> Key:
    """A choice that no result depends on."""
    return derived(name, any_switch(name), default=default, reason=reason)


def sized(name: str, *dims: str, default: int, reason: str = "") -> Key:
    """A size of the policy's mesh."""
    return translated(name, layout, *map(native, dims), default=default, reason=f"{reason} {FITTED}".strip())


def upload(name: str, *, default: Json, reason: str) -> Key:
    """A part of what is uploaded where."""
    natives = tuple(f"checkpoint.{key}" for key in ("upload_to", "upload_exports_to", "upload"))
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

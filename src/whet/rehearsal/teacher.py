"""A model of random weights in the place of a teacher, in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from whet.config.load import stage_configs
from whet.data.tasks import texts
from whet.data.tokenizer import load_tokenizer
from whet.models.load import build, export
from whet.rehearsal.shrink import TEACHER, check
from whet.types import Json


def write_teacher(tree: dict[str, Json], folder: Path) -> None:
    """The teacher that the small config names below its folder; nothing if it names none. It has the policy's shape and
    other weights."""
    cfg, path = check(tree), folder / TEACHER
    stages = stage_configs(cfg)
    if not any(stage.reference.path == str(path) for stage in stages):
        return
    sources = [s for c in stages for s in (*c.data.train, *c.data.demonstrations, *c.data.eval)]
    tokenizer = load_tokenizer(cfg.tokenizer, model_path=None, texts=texts(sources))
    model = build(
        cfg.model,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=cfg.seed + 1,
        device="cpu",
        dtype=torch.float32,
    )
    export(model, tokenizer, path)

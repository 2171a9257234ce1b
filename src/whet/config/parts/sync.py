"""The section about how weights get from a trainer to explorers of their own."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, Positive, Section


class Sync(Section):
    """How new weights get from the trainer (mode=train) to explorers in processes of their own: a folder for each
    version in run_dir/weights, with a digest of every tensor."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the numbers are cast to before they travel. auto: as they are, so nothing is lost. A narrower one is faster,
    and the explorers then sample from other weights than are trained."""
    timeout_s: Above0 = 600.0
    """Longest wait of an explorer for a sign of its trainer, and of a bench for the next checkpoint."""
    keep: Positive = 2
    """Versions that stay on disk. A reader that is slower than so many takes a newer one."""

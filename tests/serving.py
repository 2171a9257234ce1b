"""vLLM engines as a run makes them, on a server that is there."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from transformers import PreTrainedModel

from whet.models import kernels
from whet.rollout.http.calls import Calls, Limits
from whet.rollout.http.canary import Canary
from whet.rollout.http.published import Folder
from whet.rollout.http.vllm import VllmEngine

LIMITS = Limits(answer=20.0, load=60.0, reply=60.0)


def vllm_engine(
    url: str,
    model: PreTrainedModel,
    *,
    max_context: int,
    end_token_ids: Collection[int],
    limits: Limits = LIMITS,
    bound: float = 1e-3,
) -> VllmEngine:
    """The engine; `open` asks the server what it is."""
    folder = Folder(
        Path(tempfile.mkdtemp(prefix="whet-test-weights-")),
        model=model,
        ops=kernels.load("auto"),
        canary=Canary(bound, max_context),
    )
    return VllmEngine(
        Calls(url, limits=limits),
        folder=folder,
        vocab=model.get_output_embeddings().out_features,
        max_context=max_context,
        end_token_ids=end_token_ids,
    )

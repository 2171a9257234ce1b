"""Weights into an engine's module, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from whet.types import WhetError


@torch.no_grad()
def copy_weights(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every parameter in, in place. Each has to come exactly once, in its shape; tied ones by their
    first name.

    Raises WhetError otherwise; the module is then a mix of old and new weights and must not be sampled from.
    """
    wanted = dict(module.named_parameters())
    copied: set[str] = set()
    for name, tensor in tensors:
        if name in copied:
            raise WhetError(f"weight sync: {name!r} came twice")
        if name not in wanted:
            raise WhetError(f"weight sync: {name!r} is not a parameter of {type(module).__name__}")
        if tensor.shape != wanted[name].shape:
            raise WhetError(
                f"weight sync: {name!r} came as {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            )
        wanted[name].copy_(tensor)
        copied.add(name)
    missing = sorted(wanted.keys() - copied)
    if missing:
        raise WhetError(
            f"weight sync: {len(missing)} of {len(wanted)} parameters did not come: {', '.join(missing[:3])}"
        )

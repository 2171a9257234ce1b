"""Offloads the activations that a forward keeps for the backward pass to the host's memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from whet.models.sharded import local

SMALLEST = 1 << 16
"""Bytes below which a tensor is not worth the way."""


def kept_on_host(model: nn.Module, *, smallest: int = SMALLEST) -> AbstractContextManager[object]:
    """Inside it, tensors that autograd keeps are copied to the host and back when the backward pass needs them.

    Parameters and small tensors stay where they are. Gradients are equal to the bit: a copy is a copy.
    """
    if not torch.is_grad_enabled():
        return nullcontext()
    own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}

    def is_own(x: Tensor) -> bool:
        # parts of a cut parameter are gathered while a layer is at work, into a parameter of another storage
        base = x if x._base is None else x._base
        return isinstance(base, nn.Parameter) or x.untyped_storage().data_ptr() in own

    def away(x: Tensor) -> tuple[torch.device, Tensor]:
        return x.device, x if x.nbytes < smallest or is_own(x) else x.to("cpu", copy=True)

    def back(kept: tuple[torch.device, Tensor]) -> Tensor:
        device, x = kept
        return x.to(device)

    return torch.autograd.graph.saved_tensors_hooks(away, back)

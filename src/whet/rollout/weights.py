"""Loads weights into an engine's module, tensor by tensor; gives one version to several engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from whet.models.lora import refresh
from whet.models.quantised import Quantised, held
from whet.rollout.engine import WeightUpdate
from whet.types import WhetError


@torch.no_grad()
def copy_weights(module: nn.Module, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    """Copy all parameters in place. Each must be given exactly once, in its shape; tied parameters by their first name;
    they are converted to 8 bits where the module's are. None: this parameter stays unchanged.

    Raises WhetError otherwise; the module is then a mix of old and new weights and must not be sampled from.
    """
    wanted: dict[str, Tensor | Quantised] = {**dict(module.named_parameters()), **held(module)}
    came: set[str] = set()
    for name, tensor in tensors:
        if name in came:
            raise WhetError(f"weight sync: {name!r} was received twice")
        if name not in wanted:
            raise WhetError(f"weight sync: {name!r} is not a parameter of {type(module).__name__}")
        came.add(name)
        if tensor is None:
            continue
        if tensor.shape != wanted[name].shape:
            raise WhetError(
                f"weight sync: {name!r} has shape {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            )
        wanted[name].copy_(tensor)
    missing = sorted(wanted.keys() - came)
    if missing:
        raise WhetError(
            f"weight sync: {len(missing)} of {len(wanted)} parameters were not received: {', '.join(missing[:3])}"
        )
    refresh(module)


Shipment = Callable[[], WeightUpdate]
"""One version's weights, to be given to as many replicas as there are, now and later."""


def by_copy(update: WeightUpdate) -> Shipment:
    """A module by reference; tensors are kept, as they can be gone through only once."""
    if update.tensors is None:
        return lambda: update
    kept = [(name, tensor.clone()) for name, tensor in update.tensors]
    return lambda: WeightUpdate(version=update.version, tensors=iter(kept))

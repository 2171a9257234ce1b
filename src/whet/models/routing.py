"""Which experts compute a token: those that a layer's router chooses, or others that were chosen before.

A model's forward takes a `Route`, as it takes an `Attend`, and asks it in each layer with a router. What a router makes
of its scores (softmax, norm, scale) stays its own: only the numbers of the experts are another's, and the weights are
those of the current scores at these numbers, with gradient. Where a model computes by transformers' modules, the
router's `topk` is answered so; a router that calls it in several rounds (groups of experts first) is refused.

Rollout routing replay (R3, arXiv:2510.11370) trains each token with the experts of the engine that sampled it.

Shape letters: U tokens computed, L layers, E experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from whet.config.sizes import config_sizes
from whet.types import ConfigError, expert_type


class Route(Protocol):
    def __call__(self, layer: int, own_UE: Tensor) -> Tensor:
        """[U, E] int64: the experts of each token. own_UE: those that the router of this layer chooses."""


@dataclass(frozen=True)
class Routes:
    """The sizes of what is recorded of a model."""

    layers: int
    experts: int
    """Of a token."""
    among: int
    """Experts of a layer."""
    dtype: torch.dtype

    @staticmethod
    def of(model: PreTrainedModel) -> Routes:
        """ConfigError for a model without routers."""
        sizes = config_sizes(model.config.get_text_config().to_dict())
        if not sizes["experts"]:
            raise ConfigError(
                f"train.router_replay: {type(model).__name__} has no routers over num_experts or num_local_experts of "
                "its config, whose choices could be recorded; set it to none"
            )
        dtype = torch.uint8 if expert_type(sizes["experts"]) is np.uint8 else torch.int16
        return Routes(sizes["layers"], sizes["experts_per_token"], sizes["experts"], dtype)


@dataclass(frozen=True)
class RouteRecorder:
    """Lets routers choose, and notes their choices."""

    routes: Routes
    seen: dict[int, Tensor] = field(default_factory=dict)
    """[U, E] by layer."""

    def __call__(self, layer: int, own_UE: Tensor) -> Tensor:
        if layer in self.seen or own_UE.ndim != 2 or own_UE.shape[1] != self.routes.experts:
            raise _in_rounds()
        self.seen[layer] = own_UE.to(self.routes.dtype)
        return own_UE

    def recorded(self, tokens: int | None = None, device: torch.device | None = None) -> Tensor:
        """[U, L, E]; 0 in layers without a router. tokens, device: U and where, of a part of the layers, which may have
        none at all."""
        some = next(iter(self.seen.values()), None)
        if some is None and tokens is not None:
            some = torch.zeros(tokens, self.routes.experts, dtype=self.routes.dtype, device=device)
        if some is None:
            raise _in_rounds()
        nothing = torch.zeros_like(some)
        return torch.stack([self.seen.get(layer, nothing) for layer in range(self.routes.layers)], 1)


@dataclass(frozen=True, eq=False)
class GivenRoute:
    """The experts that were recorded."""

    routed_ULE: Tensor

    def __call__(self, layer: int, own_UE: Tensor) -> Tensor:
        if own_UE.shape != self.routed_ULE[:, 0].shape:
            raise _in_rounds()
        return self.routed_ULE[:, layer].long()


def _in_rounds() -> ConfigError:
    return ConfigError(
        "train.router_replay: the routers of this model choose a token's experts in several rounds, or in another way "
        "than one topk over all experts, so their choices cannot be recorded; set it to none"
    )


class _Asking(TorchFunctionMode):
    """Inside it, `topk` is answered by a route."""

    def __init__(self, route: Route, layer: int) -> None:
        super().__init__()
        self.route, self.layer = route, layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        expert_UE = self.route(self.layer, out.indices)
        return torch.return_types.topk((args[0].gather(-1, expert_UE), expert_UE))


def asking(forward: Callable[..., Any], route: Route, layer: int) -> Callable[..., Any]:
    """The forward of a layer that is not ours, whose router is answered by a route."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Asking(route, layer):
            return forward(*args, **kwargs)

    return run


def layer_number(block: nn.Module) -> int:
    """Of a decoder layer of transformers, from 0."""
    return next(int(m.layer_idx) for m in block.modules() if hasattr(m, "layer_idx"))  # type: ignore[arg-type]

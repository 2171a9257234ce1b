"""Expert parallelism: the experts of each layer are spread over ranks, and tokens travel to their experts.

Each rank routes its own tokens with its own copy of the router. What goes to an expert of another rank travels there
by an all-to-all of exactly as many rows as were chosen, is computed, and travels back: no capacity, nothing is
dropped, nothing is padded. All ranks have to make the same number of forward passes (a rank without tokens makes an
empty one).

The load-balancing term (Switch Transformer, arXiv:2101.03961, eq. 4-6) is X * sum_x f_x P_x: f the share of choices
that fell on expert x, P its mean probability, over all layers and tokens together, as transformers computes it. A
product of means cannot be summed over micro-batches. But f has no gradient, so with the f of the whole minibatch
given, the term is a sum over tokens, and any cut into micro-batches and ranks gives the same gradient. So the choices
are counted first, in a forward pass without gradient (`loads`, summed over micro-batches and ranks), then each micro-
batch adds its `balance`. A shared prompt counts as often as rollouts use it (`uses`), so that sharing changes nothing
either.

Shape letters: U tokens, X experts, E experts of a token, T = U x E, W rows received, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.models.collectives import Cut, Peers, exchanged
from whet.models.packing import Layout
from whet.types import ConfigError


class SpreadExperts(nn.Module):
    """This rank's experts of a layer; computes for all ranks' tokens what they chose."""

    def __init__(self, experts: Any, peers: Peers) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn, self.peers = experts.act_fn, peers

    def forward(self, hidden_UD: Tensor, expert_UE: Tensor, weight_UE: Tensor) -> Tensor:
        """[U, D] weighted sum of what the chosen experts make of each token."""
        ranks, here = self.peers.size, len(self.gate_up_proj)
        chosen_T = expert_UE.flatten()
        order_T = chosen_T.argsort(stable=True)
        count_CX = torch.bincount(chosen_T, minlength=ranks * here).view(ranks, here)
        told_CX = exchanged(count_CX, self.peers, send=[1] * ranks, receive=[1] * ranks)
        send, receive = count_CX.sum(1).tolist(), told_CX.sum(1).tolist()
        sent_TD = F.embedding(order_T // expert_UE.shape[1], hidden_UD)
        found_WD = exchanged(sent_TD, self.peers, send=send, receive=receive)
        made_WD = self._compute(found_WD, told_CX)
        home_TD = exchanged(made_WD, self.peers, send=receive, receive=send)
        out_UED = F.embedding(_inverse(order_T), home_TD).view(*expert_UE.shape, hidden_UD.shape[1])
        return (out_UED * weight_UE.to(out_UED.dtype)[..., None]).sum(1)

    def _compute(self, found_WD: Tensor, told_CX: Tensor) -> Tensor:
        """Rows as they were received: by rank, then by expert. An expert without rows computes none, and has gradient
        0: every rank's graph is the same."""
        here = torch.arange(told_CX.shape[1], device=found_WD.device)
        order_W = here.repeat(len(told_CX)).repeat_interleave(told_CX.flatten()).argsort(stable=True)
        parts = F.embedding(order_W, found_WD).split(told_CX.sum(0).tolist())
        made = [
            F.linear(_glu(self.act_fn, F.linear(part, gate_up)), down)
            for part, gate_up, down in zip(parts, self.gate_up_proj.unbind(), self.down_proj.unbind())
        ]
        return F.embedding(_inverse(order_W), torch.cat(made))


def _glu(act: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    made: Tensor = act(gate) * up
    return made


def _inverse(order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def apply(model: PreTrainedModel, peers: Peers) -> dict[str, Cut]:
    """Keep this rank's experts of every layer, in place; returns how parameters were cut, by name.

    Errors: ConfigError where there are no experts, or not equally many for each rank.
    """
    if peers.size == 1:
        return {}
    cuts: dict[str, Cut] = {}
    for name, module in [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] == "experts"]:
        own = dict(module.named_parameters())
        if own.keys() != {"gate_up_proj", "down_proj"}:
            raise ConfigError(
                f"expert parallelism does not know {name} ({', '.join(own)}); set train.parallel.ep=1"
            )
        if len(own["down_proj"]) % peers.size:
            raise ConfigError(
                f"train.parallel.ep={peers.size} does not divide the {len(own['down_proj'])} experts of a layer"
            )
        for p, weight in own.items():
            cuts[f"{name}.{p}"] = Cut(0, peers)
            weight.data = cuts[f"{name}.{p}"].part(weight.data)
        model.set_submodule(name, SpreadExperts(module, peers))
    if not cuts:
        raise ConfigError(
            f"train.parallel.ep={peers.size}: {type(model).__name__} has no experts; set it to 1"
        )
    return cuts


# ---------------------------------------------------------------- balance of the router


@dataclass(frozen=True)
class Routed:
    """What a layer's router decided about the tokens of a forward pass."""

    probability_UX: Tensor
    """float32, with gradient."""
    expert_UE: Tensor


class Routing:
    """Watches the routers of a model, by hooks: make it before the decoder, which then runs through the model's own
    modules."""

    def __init__(self, model: nn.Module) -> None:
        """Errors: ConfigError where there are no routers."""
        self.seen: list[Routed] | None = None
        blocks = [
            module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")
        ]
        if not blocks:
            raise ConfigError(f"{type(model).__name__} has no routers to balance: leave the coefficient 0")
        for block in blocks:
            block.gate.register_forward_hook(self._note)  # type: ignore[union-attr]

    def _note(self, router: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        if self.seen is not None:
            self.seen.append(Routed(torch.softmax(out[0].float(), -1), out[2]))

    @contextmanager
    def noting(self) -> Iterator[list[Routed]]:
        """Inside it, a forward pass fills the list, a layer each. (Where backward recomputes, it grows again.)"""
        seen: list[Routed] = []
        self.seen = seen
        try:
            yield seen
        finally:
            self.seen = None


def uses(packed: Layout) -> Tensor:
    """[U] how many of the batch's tokens each computed token stands for: 1, or the rollouts that share it."""
    predictor_N = packed.predictor_N
    return torch.bincount(predictor_N[predictor_N >= 0], minlength=len(packed.token_ids_U))


@torch.no_grad()
def loads(seen: Sequence[Routed], uses_U: Tensor) -> Tensor:
    """[X] float64: how often each expert was chosen, over all layers. To be summed over micro-batches and ranks."""
    experts = seen[0].probability_UX.shape[1]
    total_X = torch.zeros(experts, dtype=torch.float64, device=uses_U.device)
    for layer in seen:
        weight_UE = uses_U.double()[:, None].expand_as(layer.expert_UE)
        total_X.index_add_(0, layer.expert_UE.flatten(), weight_UE.flatten())
    return total_X


def balance(seen: Sequence[Routed], uses_U: Tensor, load_X: Tensor, *, alike: int = 1) -> Tensor:
    """This micro-batch's part of the term of the whole minibatch, whose `loads` are given; about 1 in all if balanced.

    alike: ranks that have the same tokens (tp); each adds its share, for their gradients are summed.
    """
    tokens = load_X.sum() / seen[0].expert_UE.shape[1]
    price_X = (len(load_X) * load_X / tokens**2 / alike).float()
    return torch.stack([(uses_U.float() @ layer.probability_UX) @ price_X for layer in seen]).sum()

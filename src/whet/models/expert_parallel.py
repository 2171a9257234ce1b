"""Expert parallelism: the experts of each layer are spread over ranks, and tokens are sent to their experts.

Each rank routes its own tokens with its own copy of the router. Tokens for an expert of another rank are sent there by
an all-to-all of exactly as many rows as were chosen, are computed, and are sent back: no capacity limit, no dropped
tokens, no padding. All ranks must make the same number of forward passes (a rank without tokens makes an empty one).

Shape letters: U tokens, X experts, E experts of a token, T = U x E, W rows received, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from whet.models.collectives import Peers, SplitDim, exchanged
from whet.models.products import linear
from whet.types import ConfigError


class SpreadExperts(nn.Module):
    """This rank's experts of a layer; computes them for the tokens of all ranks."""

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
            linear(_glu(self.act_fn, linear(part, gate_up)), down)
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


def apply(model: PreTrainedModel, peers: Peers) -> dict[str, SplitDim]:
    """Keep this rank's experts of every layer, in place; returns how parameters were partitioned, by name.

    Errors: ConfigError where there are no experts, or their number does not divide by the ranks.
    """
    if peers.size == 1:
        return {}
    cuts: dict[str, SplitDim] = {}
    for name, module in [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] == "experts"]:
        own = dict(module.named_parameters())
        if own.keys() != {"gate_up_proj", "down_proj"}:
            raise ConfigError(
                f"expert parallelism does not support {name} ({', '.join(own)}); set train.parallel.ep=1"
            )
        if len(own["down_proj"]) % peers.size:
            raise ConfigError(
                f"train.parallel.ep={peers.size} does not divide the {len(own['down_proj'])} experts of a layer"
            )
        for p, weight in own.items():
            cuts[f"{name}.{p}"] = SplitDim(0, peers)
            weight.data = cuts[f"{name}.{p}"].part(weight.data)
        model.set_submodule(name, SpreadExperts(module, peers))
    if not cuts:
        raise ConfigError(
            f"train.parallel.ep={peers.size}: {type(model).__name__} has no experts; set it to 1"
        )
    return cuts

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
from whet.models.experts import by_expert, computed, inverse, is_turned, weighed
from whet.types import ConfigError


class SpreadExperts(nn.Module):
    """This rank's experts of a layer; computes them for the tokens of all ranks."""

    def __init__(self, experts: Any, peers: Peers) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        for name, more in experts.named_parameters(recurse=False):
            setattr(self, name, more)  # biases, if there are any
        self.is_concatenated = getattr(experts, "is_concatenated", True)
        self.is_transposed = is_turned(experts)
        self.glu, self.peers = experts._apply_gate, peers
        self.lora: nn.ModuleDict = getattr(experts, "lora", nn.ModuleDict())
        for stack in self.lora.values():
            stack.owner = (self,)  # type: ignore[assignment]

    def forward(self, hidden_UD: Tensor, expert_UE: Tensor, weight_UE: Tensor) -> Tensor:
        """[U, D] weighted sum of what the chosen experts make of each token."""
        ranks, here = self.peers.size, len(self.gate_up_proj)
        order_T, count_X = by_expert(expert_UE, ranks * here)
        count_CX = count_X.view(ranks, here)
        told_CX = exchanged(count_CX, self.peers, send=[1] * ranks, receive=[1] * ranks)
        send, receive = count_CX.sum(1).tolist(), told_CX.sum(1).tolist()
        sent_TD = F.embedding(order_T // expert_UE.shape[1], hidden_UD)
        found_WD = exchanged(sent_TD, self.peers, send=send, receive=receive)
        made_WD = self._compute(found_WD, told_CX)
        home_TD = exchanged(made_WD, self.peers, send=receive, receive=send)
        return weighed(home_TD, order_T, weight_UE)

    def _compute(self, found_WD: Tensor, told_CX: Tensor) -> Tensor:
        """Rows as they were received: by rank, then by expert. An expert without rows computes none: every rank's
        graph is the same."""
        here = torch.arange(told_CX.shape[1], device=found_WD.device)
        order_W = here.repeat(len(told_CX)).repeat_interleave(told_CX.flatten()).argsort(stable=True)
        sorted_WD = F.embedding(order_W, found_WD)
        made_WD = computed(self, sorted_WD, told_CX.sum(0).tolist(), glu=self.glu, idle=True)
        return F.embedding(inverse(order_W), made_WD)


def apply(model: PreTrainedModel, peers: Peers) -> dict[str, SplitDim]:
    """Keep this rank's experts of every layer, in place; returns how parameters were partitioned, by name.

    Errors: ConfigError where there are no experts, or their number does not divide by the ranks.
    """
    if peers.size == 1:
        return {}
    cuts: dict[str, SplitDim] = {}
    for name, module in [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] == "experts"]:
        own = dict(module.named_parameters(recurse=False))
        if {n.removesuffix("_bias") for n in own} != {"gate_up_proj", "down_proj"}:
            raise ConfigError(
                f"expert parallelism does not support {name} ({', '.join(own)}); set train.parallel.ep=1"
            )
        if len(own["down_proj"]) % peers.size:
            raise ConfigError(
                f"train.parallel.ep={peers.size} does not divide the {len(own['down_proj'])} experts of a layer"
            )
        # adapters that all experts share are whole on every rank, as what is no expert's
        for p, weight in module.named_parameters():
            if weight.ndim < 3 and not p.endswith("_bias"):
                continue
            cuts[f"{name}.{p}"] = SplitDim(0, peers)
            weight.data = cuts[f"{name}.{p}"].part(weight.data)
        spread = SpreadExperts(module, peers)
        model.set_submodule(name, spread)
        for stack in spread.lora.values():
            stack.effective = None  # type: ignore[assignment]
            stack.refresh()  # type: ignore[operator]
    if not cuts:
        raise ConfigError(
            f"train.parallel.ep={peers.size}: {type(model).__name__} has no experts; set it to 1"
        )
    return cuts

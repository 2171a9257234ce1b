"""Experts of a mixture: stacks of matrices, which may have adapters, and rows that are sorted by expert.

Shape letters: U tokens, X experts, E experts of a token, T = U x E, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.models.products import linear

Glu = Callable[[Tensor], Tensor]
"""What an expert makes of its gate and up, which come in one tensor."""


class Experts(nn.Module):
    """The experts of a layer with adapters, in place of transformers' own module."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.lora = nn.ModuleDict()
        """A `LoraStack` for each stack that has adapters, by the stack's name."""
        experts._parameters = {}
        self.hollow = (experts,)
        """transformers' module without its parameters; in a tuple, so that it is none of this one's."""

    def forward(self, hidden_UD: Tensor, expert_UE: Tensor, weight_UE: Tensor) -> Tensor:
        return mixed(self, hidden_UD, expert_UE, weight_UE)

    def _apply_gate(self, wide: Tensor) -> Tensor:
        """By transformers' name, and the model's own: some clamp."""
        made: Tensor = self.hollow[0]._apply_gate(wide)
        return made

    def plain(self, stacks: Mapping[str, Tensor]) -> nn.Module:
        """transformers' module with these stacks."""
        out = copy.copy(self.hollow[0])
        out._parameters = {n: nn.Parameter(stack, requires_grad=False) for n, stack in stacks.items()}
        return out  # type: ignore[no-any-return]


def mixed(experts: Any, hidden_UD: Tensor, expert_UE: Tensor, weight_UE: Tensor) -> Tensor:
    """[U, D] weighted sum of what the chosen experts make of each token: `Experts`, or transformers' own module as its
    `ExpertsInterface` calls it. Rows of transformers' own grouped products do not agree."""
    order_T, count_X = by_expert(expert_UE, len(experts.down_proj))
    sorted_TD = F.embedding(order_T // expert_UE.shape[1], hidden_UD)
    glu = experts._apply_gate if getattr(experts, "has_gate", True) else experts.act_fn
    made_TD = computed(experts, sorted_TD, count_X.tolist(), glu=glu)
    if getattr(experts, "has_post_expert_norm", False):
        made_TD = experts.post_expert_norm(made_TD)
    return weighed(made_TD, order_T, weight_UE)


def by_expert(expert_UE: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """([T] numbers of the rows in the order of their experts, [X] how many each has)."""
    chosen_T = expert_UE.flatten()
    none_X = chosen_T.new_zeros(experts)
    count_X = none_X.scatter_add(0, chosen_T, torch.ones_like(chosen_T))  # bincount waits for a GPU
    return chosen_T.argsort(stable=True), count_X


def computed(
    experts: Any, sorted_TD: Tensor, count_X: Sequence[int], *, glu: Glu, idle: bool = False
) -> Tensor:
    """[T, D] what the experts make of rows that are sorted by expert. idle: experts without rows compute none, and have
    gradient 0; else they have no gradient."""
    part_X = {x: part for x, part in enumerate(sorted_TD.split(list(count_X))) if idle or len(part)}
    wide_X = multiplied(experts, "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", part_X)
    narrow_X = {x: glu(wide) for x, wide in wide_X.items()}
    made_X = multiplied(experts, "down_proj", narrow_X)
    return torch.cat(list(made_X.values()) or [sorted_TD])


def gate_and_up(experts: Any, wide: Tensor) -> tuple[Tensor, Tensor]:
    """What a stack gives together: one behind the other, or column by column in turns."""
    if getattr(experts, "is_concatenated", True):
        gate, up = wide.chunk(2, dim=-1)
        return gate, up
    return wide[..., ::2], wide[..., 1::2]


def is_turned(experts: Any) -> bool:
    """Whether its stacks are [X, inputs, outputs], in place of [X, outputs, inputs]."""
    return getattr(experts, "is_transposed", False)


def multiplied(experts: Any, name: str, part_X: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Rows of some experts times each one's matrix of a stack, with the effect of its adapter if it has one, and its
    bias."""
    stack, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    if is_turned(experts) and isinstance(stack, Tensor):  # quantised ones never are
        stack = stack.mT
    weight_X = stack.unbind()
    adapters = getattr(experts, "lora", {})
    if name in adapters:
        return adapters[name](part_X, weight_X)  # type: ignore[no-any-return]
    bias_X = [None] * len(weight_X) if bias is None else bias.unbind()
    return {x: linear(part, weight_X[x], bias_X[x]) for x, part in part_X.items()}


def weighed(made_TD: Tensor, order_T: Tensor, weight_UE: Tensor) -> Tensor:
    """[U, D] sums of each token's rows, in the order in which its experts were chosen."""
    out_UED = F.embedding(inverse(order_T), made_TD).view(*weight_UE.shape, made_TD.shape[1])
    return (out_UED * weight_UE.to(out_UED.dtype)[..., None]).sum(1)


def inverse(order: Tensor) -> Tensor:
    """Where each number stands in an order."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back

"""Adam and AdamW with moments of fewer bits than 32: half the memory in bfloat16, a quarter in 8 bits (Dettmers et al.
2022, arXiv:2110.02861).

In bfloat16 a step is computed in float32 from what is stored, and its moments are then rounded to the nearest, as
TransformerEngine's FusedAdam does (`exp_avg_dtype`, of Megatron-LM and of NeMo Automodel). A second moment that changes
by less than its 512th in a step then stays as it is.

8-bit moments are kept in blocks of 256 entries, each a byte that indexes a table, times the block's largest magnitude.
The table is the paper's dynamic one: it is dense near 0, so that entries a million times smaller than the block's
largest are distinguished. Unlike in the paper, rounding is stochastic, up or down so that the mean is right: a second
moment changes by a thousandth of itself in a step, and rounding to the nearest entry would always lose this change.
Parameters of one dimension (norms, biases) keep float32 moments.

Where ranks have parts of a tensor, each keeps the bytes of its part and all scales (a 256th); a step is computed on the
gathered tensor, one at a time, and each rank applies its part. So blocks, random numbers and, of equal gradients, steps
equal those of one process. Gradients that another layout sums in another order may round a byte the other way, which
moves a small entry by a large part of its step: 6e-4 was seen between layouts where float32 moments give 1e-6.

whet does not use torchao's version of 8 bits, which compiles its step (16 s), rounds to the nearest, and adds a package
for one function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from whet import seeds
from whet.models.sharded import Wholes, local

BLOCK = 256
MEAN, SQUARE = "exp_avg", "exp_avg_sq"

State = dict[str, Tensor]


class NarrowAdam(ABC):
    """The part of torch's optimizer interface that `optim` uses: parameter groups, state by parameter, a step."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,
        wholes: Wholes,
    ) -> None:
        """A group: `params`, `lr` and `weight_decay`, set before a step. decoupled: AdamW's decay, else Adam's."""
        self.param_groups, self.betas, self.eps, self.decoupled = list(groups), betas, eps, decoupled
        self.wholes = wholes
        self.state: defaultdict[nn.Parameter, State] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)

    def _step(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        grad, (b1, b2) = p.grad.float(), self.betas  # without master weights it may be of half precision
        if self.decoupled:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        grad, state = self._read(p, grad)
        count = int(state["step"]) + 1
        mean = state[MEAN].lerp_(grad, 1 - b1)
        square = state[SQUARE].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        below = square.div(1 - b2**count).sqrt_().add_(self.eps)
        self._move(p, mean / below, -group["lr"] / (1 - b1**count))
        self._keep(p, mean, square, count)

    @abstractmethod
    def blank(self, p: nn.Parameter) -> State:
        """What is kept of a parameter before its first step."""

    @abstractmethod
    def _read(self, p: nn.Parameter, grad: Tensor) -> tuple[Tensor, State]:
        """(gradient, state with moments that a step may overwrite), all of one shape and in float32."""

    @abstractmethod
    def _move(self, p: nn.Parameter, x: Tensor, by: float) -> None:
        """Add so many times x, which is shaped as what `_read` returns."""

    @abstractmethod
    def _keep(self, p: nn.Parameter, mean: Tensor, square: Tensor, count: int) -> None:
        """Store the moments after so many steps."""


class Adam16(NarrowAdam):
    """Moments in bfloat16, of parameters of any dimension. Each rank steps its own part."""

    def blank(self, p: nn.Parameter) -> State:
        zero = torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False)
        return {"step": torch.zeros(()), MEAN: zero, SQUARE: zero.clone()}

    def _read(self, p: nn.Parameter, grad: Tensor) -> tuple[Tensor, State]:
        state = self.state[p] = self.state[p] or self.blank(p)
        moments = {key: local(state[key]).to(torch.float32, copy=True) for key in (MEAN, SQUARE)}
        return local(grad), {"step": state["step"], **moments}

    def _move(self, p: nn.Parameter, x: Tensor, by: float) -> None:
        local(p).add_(x, alpha=by)

    def _keep(self, p: nn.Parameter, mean: Tensor, square: Tensor, count: int) -> None:
        state = self.state[p]
        local(state[MEAN]).copy_(mean)
        local(state[SQUARE]).copy_(square)
        state["step"] = torch.tensor(float(count))


class Adam8(NarrowAdam):
    """Moments in 8 bits, of whole tensors."""

    def _read(self, p: nn.Parameter, grad: Tensor) -> tuple[Tensor, State]:
        whole = self.wholes.of(p, grad)
        state = {key: self._whole(p, key, x) for key, x in self.state[p].items()} or blank(whole)
        return whole, {"step": state["step"], MEAN: unpacked(state, MEAN), SQUARE: unpacked(state, SQUARE)}

    def _move(self, p: nn.Parameter, x: Tensor, by: float) -> None:
        p.add_(self.wholes.part(p, x), alpha=by)

    def _keep(self, p: nn.Parameter, mean: Tensor, square: Tensor, count: int) -> None:
        noise = torch.Generator(mean.device).manual_seed(seeds.key("adam8", self.wholes.names[p], count))
        after, part = packed(MEAN, mean, noise) | packed(SQUARE, square, noise), self.wholes.part
        self.state[p] = {key: part(p, x) if key in (MEAN, SQUARE) else x for key, x in after.items()}
        self.state[p]["step"] = torch.tensor(float(count))

    def blank(self, p: nn.Parameter) -> State:
        whole = blank(self.wholes.of(p, p.detach()))
        return {key: self.wholes.part(p, x) if key in (MEAN, SQUARE) else x for key, x in whole.items()}

    def _whole(self, p: nn.Parameter, key: str, x: Tensor) -> Tensor:
        """Scales and the count of steps every rank has whole."""
        return self.wholes.of(p, x) if key in (MEAN, SQUARE) else x


def blank(p: Tensor) -> State:
    """The state of a parameter before its first step."""
    zero, none = torch.zeros_like(p, dtype=torch.float32), torch.Generator(p.device)
    return {"step": torch.zeros(())} | packed(MEAN, zero, none) | packed(SQUARE, zero.clone(), none)


def packed(name: str, x: Tensor, noise: torch.Generator) -> State:
    """{name: a byte an entry, NAME_scale: [blocks]}; of one dimension: {name: x} as it is."""
    if x.dim() < 2:
        return {name: x}
    flat = x.flatten()
    blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    blocks = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    table = _table(name).to(x.device)
    above = torch.bucketize(blocks, table, out_int32=True).clamp_(max=len(table) - 1)
    low, high = table[(above - 1).clamp_(min=0)], table[above]
    down = torch.rand(blocks.shape, generator=noise, device=x.device) * (high - low) >= blocks - low
    # a second moment of 0 would make the next step up to 1 / sqrt(1 - beta2) times too large
    if name == SQUARE:
        down &= low > 0
    codes = (above - (down & (above > 0)).int()).to(torch.uint8)
    return {name: codes.flatten()[: len(flat)].view(x.shape), f"{name}_scale": scale}


def unpacked(state: State, name: str) -> Tensor:
    """The float32 moment; one of one dimension is the state's own."""
    codes = state[name]
    if codes.dim() < 2:
        return codes
    values = _table(name).to(codes.device)[codes.flatten().int()]
    return values.mul_(state[f"{name}_scale"].repeat_interleave(BLOCK)[: len(values)]).view(codes.shape)


@cache
def _table(name: str) -> Tensor:
    """At most 256 numbers, ascending, of [-1, 1] for the mean and [0, 1] for the square: seven or eight decades, each
    with twice the entries of the one below, evenly spread; 0 and 1 (section 1.3, "dynamic tree quantization")."""
    decades = 7 if name == MEAN else 8
    found = []
    for decade in range(decades):
        parts = 2**decade
        middles = (0.1 + 0.9 * (i + 0.5) / parts for i in range(parts))
        found += [x * 10.0 ** (decade - decades + 1) for x in middles]
    found = [-1.0, *(-x for x in found[1:]), *found] if name == MEAN else found[1:]
    return torch.tensor(sorted([0.0, *found, 1.0]), dtype=torch.float32)

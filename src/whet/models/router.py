"""Terms of the loss for routers of mixtures of experts: a load-balancing term, which routers that spread their choices
evenly pay least, and a z term, which large logits pay.

Switch Transformer, arXiv:2101.03961, eq. 4-6, as transformers computes it (`load_balancing_loss_func`): over all
layers and tokens together, aux = X * sum_x f_x P_x, with f_x the choices of expert x and P_x the sum of its
probabilities, both divided by the tokens. Even routers pay E, the experts of a token. With scope=layer the term is that
of Megatron-LM: each layer has its own, f_x is divided by E too, and the layers' terms are added up. Even routers pay L.

A product of means cannot be summed over micro-batches. But f has no gradient, so with the f of the whole minibatch
given, the term is a sum over tokens, and any cut into micro-batches and ranks gives the same gradient. So choices are
counted first, in a pass without gradient (`RouterTerms.counting`), summed over ranks; then each micro-batch adds its
part. The z term (ST-MoE, arXiv:2202.08906, eq. 5) is the mean over tokens of the squared logsumexp of a router's
logits, added up over layers; it needs the number of tokens alone (`RouterTerms.begin`). A part is given to the hidden
states (`attached`): going backward from them goes backward from it, too, wherever in a pipeline the router stands.

A token is a position that predicts one; it counts as often as its rollout counts in the loss, and a shared prompt as
often as rollouts use it (`uses`), so sharing and resampling change nothing either.

Shape letters: U tokens computed, T those of this rank, X experts, E experts of a token, L layers with a router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.config.sizes import config_sizes
from whet.models.packing import PackedLayout
from whet.types import ConfigError, Metrics


@dataclass(frozen=True)
class Routed:
    """What a layer's router decided about the tokens of a forward pass."""

    router: nn.Module
    logits_UX: Tensor
    probability_UX: Tensor
    """float32, with gradient."""
    expert_UE: Tensor


_SEEN: ContextVar[list[Routed] | None] = ContextVar("what routers decided", default=None)


@contextmanager
def watching() -> Iterator[list[Routed]]:
    """Inside it, a forward pass fills the list, a layer each. (Where backward recomputes inside, it grows again.)"""
    seen: list[Routed] = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


@torch.compiler.disable
def note(router: nn.Module, logits_UX: Tensor, probability_UX: Tensor, expert_UE: Tensor) -> None:
    """Called by code that computes a router, with its result."""
    seen = _SEEN.get()
    if seen is not None:
        seen.append(Routed(router, logits_UX, probability_UX, expert_UE))


def gates(model: nn.Module) -> list[nn.Module]:
    """The routers of all layers."""
    return [gate_of(m) for m in model.modules() if hasattr(m, "experts") and gate_of(m) is not None]


def gate_of(block: Any) -> Any:
    """The router of a mixture, by the names that transformers has for it; None if it has none."""
    return getattr(block, "gate", getattr(block, "router", None))


def mixture(model: Any) -> tuple[int, int]:
    """The experts of a layer and of a token, by the config: a rank of a pipeline may have no layer with a router.
    Errors: ConfigError for a model that is no mixture."""
    sizes = config_sizes(model.config.get_text_config().to_dict())
    if not (sizes["experts"] or gates(model)):
        raise ConfigError(
            f"train.router_aux_loss_coef, router_z_loss_coef: {type(model).__name__} has no routers to balance; set "
            "them to 0"
        )
    return sizes["experts"], sizes["experts_per_token"]


def hook(model: nn.Module, *, answered: bool = False) -> None:
    """Let routers that are called as modules `note` their choices. answered: those would be another's (`routing`); a
    ConfigError."""
    if answered:
        raise ConfigError(
            f"train.router_aux_loss_coef counts what routers choose, but those of {type(model).__name__} name the "
            "experts of train.router_replay in place of their choice; set one of the two to its default"
        )
    for router in gates(model):
        if _noted not in router._forward_hooks.values():
            router.register_forward_hook(_noted)


def _noted(router: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
    note(router, out[0], torch.softmax(out[0].float(), -1), out[2])


def uses(packed: PackedLayout) -> Tensor:
    """[U] float32: how many tokens each computed one stands for: those of the rollouts that share it."""
    at_N = packed.predictor_N >= 0
    times_N = torch.ones_like(packed.rollout_N, dtype=torch.float32)
    if packed.count_R is not None:
        times_N = packed.count_R.float()[packed.rollout_N]
    return times_N.new_zeros(len(packed.token_ids_U)).index_add_(0, packed.predictor_N[at_N], times_N[at_N])


@torch.no_grad()
def counts(seen: Sequence[Routed], uses_U: Tensor) -> Tensor:
    """[2, L, X] float64: how often each expert was chosen, and the sum of its probabilities. To be summed over micro-
    batches and ranks."""
    uses_U = uses_U.double()
    chosen, likely = [], []
    for layer in seen:
        weight_UE = uses_U[:, None].expand_as(layer.expert_UE)
        none_X = uses_U.new_zeros(layer.probability_UX.shape[1])
        chosen.append(none_X.index_add(0, layer.expert_UE.flatten(), weight_UE.flatten()))
        likely.append(uses_U @ layer.probability_UX.double())
    return torch.stack((torch.stack(chosen), torch.stack(likely)))


def prices(load_LX: Tensor, experts: int, *, each: bool) -> Tensor:
    """[L, X] float32: what a unit of an expert's probability costs in the term. load_LX: choices of the whole
    minibatch, with experts of them for each token; each: the term is the layers' own. 0 where no token counts."""
    tokens_L1 = load_LX.sum(1, keepdim=True) / experts
    price_LX = torch.where(tokens_L1 > 0, load_LX.shape[1] * load_LX / tokens_L1**2, 0.0)
    return (price_LX / experts if each else price_LX).float()


def balance(seen: Sequence[Routed], uses_U: Tensor, price_LX: Tensor) -> Tensor:
    """A micro-batch's part of the load-balancing term of the whole minibatch. price_LX: `prices` of these layers."""
    return torch.stack([(uses_U @ x.probability_UX) @ price_X for x, price_X in zip(seen, price_LX)]).sum()


def squares(seen: Sequence[Routed], uses_U: Tensor) -> Tensor:
    """Sum over layers and tokens of the squared logsumexp of the logits."""
    return torch.stack([uses_U @ layer.logits_UX.float().logsumexp(-1).square() for layer in seen]).sum()


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, term: Tensor) -> Tensor:
        return hidden_TD.view_as(hidden_TD)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor]:
        return dy_TD, dy_TD.new_ones((), dtype=torch.float32)


def attached(hidden_TD: Tensor, term: Tensor) -> Tensor:
    """The hidden states; when they get their gradient, the term, a float32 number, gets 1."""
    made: Tensor = _Attached.apply(hidden_TD, term)
    return made


class RouterTerms:
    """The terms of one model, from one minibatch to the next."""

    def __init__(
        self,
        model: nn.Module,
        coef: float,
        *,
        each: bool = False,
        z: float = 0.0,
        over: Sequence[Callable[[Tensor], Tensor]] = (),
        stages: Callable[[Tensor], Tensor] = lambda x: x,
        alike: int = 1,
    ) -> None:
        """coef: of the load-balancing term; each: it is each layer's own. z: of the z term.

        over: add up, in place, over ranks that have other tokens; stages: over those that have other layers. alike:
        ranks that have the same tokens (tp); each adds its share, for their gradients are summed. Errors: ConfigError
        where there are no routers.
        """
        self.coef, self.each, self.z = coef, each, z
        self.over, self.stages, self.alike = over, stages, alike
        self.among, self.experts = mixture(model)
        self.place = {id(router): at for at, router in enumerate(gates(model))}
        self.found: Tensor | None = None
        self.price_LX, self.counts_now = torch.zeros(0, 0), False
        self.tokens, self.squares = 0.0, torch.zeros(())

    def begin(self, tokens: Tensor) -> None:
        """A minibatch with this many tokens here. To be called by all ranks."""
        tokens = tokens.double()
        self.squares = torch.zeros_like(tokens)
        for add in self.over:
            add(tokens)
        self.tokens = float(tokens)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forward passes inside it, over all micro-batches of a minibatch, are counted. Its end is to be reached by all
        ranks."""
        self.found, self.counts_now = None, True
        try:
            yield
        finally:
            self.counts_now = False
        if self.place:
            assert self.found is not None, "no router output has been recorded"
            for add in self.over:
                add(self.found)
        else:
            self.found = torch.zeros(2, 0, self.among, dtype=torch.float64, device=self.squares.device)
        load_LX = self.found[0]
        if not self.each:
            load_LX = self.stages(load_LX.sum(0)).expand_as(load_LX)
        self.price_LX = prices(load_LX, self.experts, each=self.each)

    def around(
        self,
        forward: Callable[[], Tensor],
        uses_T: Callable[[], Tensor],
        *,
        scaled: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The hidden states that a forward pass makes: its choices counted, or with gradients its part of the terms
        attached, `scaled` as the loss is."""
        learns = torch.is_grad_enabled() and self.tokens > 0
        if not (self.counts_now or learns):
            return forward()
        with watching() as seen:
            hidden_TD = forward()
        if not seen:
            return hidden_TD
        if not self.counts_now:
            return attached(hidden_TD, scaled(self._term(seen, uses_T()) / self.alike))
        more = counts(seen, uses_T())
        if self.found is None:
            self.found = more.new_zeros(2, len(self.place), more.shape[2])
            self.experts = seen[0].expert_UE.shape[1]
        self.found.index_add_(1, self._at(seen, more.device), more)
        return hidden_TD

    def _at(self, seen: Sequence[Routed], device: torch.device) -> Tensor:
        """[L] where the layers that were seen stand among all."""
        return torch.tensor([self.place[id(layer.router)] for layer in seen], device=device)

    def _term(self, seen: Sequence[Routed], uses_U: Tensor) -> Tensor:
        """This micro-batch's part of the terms of the whole minibatch."""
        term = uses_U.new_zeros(())
        if self.coef:
            price_LX = self.price_LX[self._at(seen, self.price_LX.device)]
            term = self.coef * balance(seen, uses_U, price_LX)
        if self.z:
            sum_of_squares = squares(seen, uses_U)
            self.squares += sum_of_squares.detach()
            term = term + self.z / self.tokens * sum_of_squares
        return term

    def metrics(self) -> Metrics:
        """Of the last minibatch: the terms themselves, without their coefficients, and the largest load of an expert,
        in units of an even one, as the mean over layers. Alike on all ranks, which all call it."""
        out: Metrics = {}
        if self.z:
            for add in self.over:
                add(self.squares)
            sum_of_squares = float(self.stages(self.squares))
            out["router_z"] = sum_of_squares / self.tokens if self.tokens else 0.0  # no rollout may count
        if not self.coef:
            return out
        assert self.found is not None, "no router choices have been counted"
        chosen_LX, likely_LX = self.found
        share_L = chosen_LX.amax(1) / chosen_LX.sum(1).clamp(min=1e-9)
        term = (self.price_LX.double() * likely_LX).sum()
        sums = torch.stack((share_L.sum(), share_L.new_full((), len(share_L)), term))
        largest, layers, term_of_all = self.stages(sums).tolist()
        return {**out, "router_aux": term_of_all, "router_max_load": chosen_LX.shape[1] * largest / layers}

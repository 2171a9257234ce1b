"""A model spread over ranks against the same model on one: what `test_parallel_*.py` run on every rank.

`Learner` does with a `Parallel` what a train engine does; with the default one it is the single process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from batches import micro_batches
from grid import EVERYTHING
from test_train_torch import random_groups
from tiny import tiny_model
from whet.algos.distillation import Divergence, TopK
from whet.batch import Batch, pack, select
from whet.config.schema import LoraConfig
from whet.models import hf_forward, kernels, router
from whet.models.attention import PackedAttention
from whet.models.collectives import Peers
from whet.models.divergence import divergence
from whet.models.dropout import Noise, token_names
from whet.models.forward import Decoder, output_head
from whet.models.logprobs import collisions, discriminants, token_logprobs
from whet.models.lora import attach, dropping, learned, refresh
from whet.models.mesh import Dims, expert_mesh, make_mesh
from whet.models.packing import layout
from whet.models.parallel import Parallel, parallelize

OPS = kernels.load("torch")

DIVERGENCES = {
    "kl": Divergence(),
    "forward_kl": Divergence(0.0, TopK(5, floor=-6.0), least=0.0, most=4.0),
    "jsd": Divergence(0.3),
    "jsd_topk": Divergence(0.5, TopK(4, "both", "tail")),
}
"""From the reference, over many tokens."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    family: str = "qwen3"
    layers: int = 2
    share_prompts: bool = True
    checkpoint: bool = False
    lora: float | None = None
    """Dropout of the adapters, if there are any."""
    experts: Literal["each", "shared"] | None = None
    """Their adapters, too."""
    critic: bool = False
    tied: bool = False
    aux: float = 0.0
    micro: int = 1 << 20
    chunks: int = 1
    dtype: torch.dtype = torch.float64
    """float64 shows the algebra: norms, rotations and what follows the logits are float32 even so."""
    lr: float = 0.05


def batch(seed: int = 0) -> Batch:
    packed = pack(random_groups(count=4, size=3, seed=seed))
    gen = torch.Generator().manual_seed(seed)
    adv_N = torch.randn(packed.tokens, generator=gen)
    return replace(packed, adv_N=adv_N, weight_N=packed.mask_N / packed.mask_N.sum())


def model_of(case: Case, *, seed: int = 0) -> PreTrainedModel:
    model = tiny_model(case.family, layers=case.layers, seed=seed).to(case.dtype)
    model.config._experts_implementation = "eager"  # transformers' grouped product has no float64
    if case.tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    if case.lora is not None:
        experts = {} if case.experts is None else {"experts": case.experts, "targets": EVERYTHING}
        attach(model, LoraConfig(rank=3, alpha=6.0, dropout=case.lora, **experts), seed=seed)
        gen = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.data = (0.1 * torch.randn(p.shape, generator=gen)).to(case.dtype)
        refresh(model)
    return model


def prices(seen: list[router.Routed], load_X: Tensor) -> Tensor:
    """[L, X] of the term of all layers together."""
    return router.prices(load_X.expand(len(seen), -1), seen[0].expert_UE.shape[1], each=False)


class Learner:
    """Policy (or critic) of a case on this rank."""

    def __init__(self, case: Case, dims: Dims | None = None) -> None:
        self.case, self.parallel, self.model = case, Parallel(), model_of(case)
        self.names = [n for n, _ in self.model.named_parameters()]
        self.data = Peers()
        if dims is not None:
            mesh = make_mesh(dims, "cpu")
            self.data = Peers.of(mesh["dp_shard"])
            ep = expert_mesh(dims, "cpu")["ep"] if dims.ep > 1 else None
            self.parallel = parallelize(self.model, mesh, dims, ep=ep, chunks=case.chunks)
        if case.aux:
            router.hook(self.model)
        config = self.model.config
        if dims is None:  # the same road, without hooks
            self.decoder = Decoder(
                hf_forward.modules(self.model, config), output_head(self.model, config), "modules", 0, 0, 0
            )
        else:
            self.decoder = self.parallel.decoder(self.model, OPS)
        gen = torch.Generator().manual_seed(5)
        self.value_head = nn.Linear(32, 1)
        self.value_head.weight.data = torch.randn(1, 32, generator=gen)
        self.value_head.bias.data = torch.randn(1, generator=gen)
        self.value_head.to(case.dtype)
        self.seen: dict[str, Tensor] = {}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        named = [(n, p) for n, p in learned(self.model) if p.requires_grad]
        stage = self.parallel.stage
        if self.case.critic and (stage is None or stage.last):
            named += [(f"value_head.{n}", p) for n, p in self.value_head.named_parameters()]
        return named

    def hidden(self, micro: Batch, x: Tensor | None) -> Tensor:
        packed = layout(micro, share_prompts=self.case.share_prompts)
        share = self.parallel.share(packed)
        return self.decoder.hidden(
            share.token_ids_T if x is None else x,
            share.position_T,
            share.attend(PackedAttention(packed.segments, OPS)),
            checkpoint=self.case.checkpoint and torch.is_grad_enabled(),
        )

    def dropping(self, micro: Batch) -> AbstractContextManager[None]:
        """In force during a micro-batch's forward and backward."""
        packed = layout(micro, share_prompts=self.case.share_prompts)
        return dropping(self.model, Noise(token_names(micro, packed)[self.parallel.share(packed).span], 7))

    def outputs(self, micro: Batch, hidden_TD: Tensor) -> dict[str, Tensor]:
        """[N] tensors, alike on all ranks that have the hidden states or a part of them."""
        share = self.parallel.share(layout(micro, share_prompts=self.case.share_prompts))
        at_A, row_A = share.predicted(micro.mask_N)
        hidden_AD = nn.functional.embedding(row_A, hidden_TD)

        def spread(x_A: Tensor) -> Tensor:
            return self.parallel.merged(x_A.new_zeros(micro.tokens).index_copy(0, at_A, x_A))

        if self.case.critic:
            return {"value": spread(self.value_head(hidden_AD).squeeze(-1))}
        head = self.decoder.head
        logp_A, entropy_A = token_logprobs(
            hidden_AD, micro.token_ids_N[at_A], head=head, ops=OPS, temperature=0.8, entropy_grad=True
        )
        reference_AD = hidden_AD.detach().flip(-1)
        return {
            "logp": spread(logp_A),
            "entropy": spread(entropy_A),
            **{
                name: spread(divergence(hidden_AD, reference_AD, heads=(head, head), of=of))
                for name, of in DIVERGENCES.items()
            },
            "collision": spread(collisions(hidden_AD.detach(), head=head)),
            "discriminant": spread(
                discriminants(hidden_AD.detach(), micro.token_ids_N[at_A], head=head, centred=True)
            ),
        }

    def loss(self, micro: Batch, out: dict[str, Tensor]) -> Tensor:
        if self.case.critic:
            loss_N = (out["value"] - micro.adv_N) ** 2
        else:
            loss_N = (
                -out["logp"] * micro.adv_N
                - 0.1 * out["entropy"]
                + 0.05 * sum(out[name] for name in DIVERGENCES)
            )
        for name, x in {**out, "loss": loss_N}.items():
            self.seen[name] = torch.cat((self.seen.get(name, x.new_zeros(0)), x.detach()))
        return (loss_N * micro.weight_N).sum()

    def learn(self, whole: Batch) -> None:
        """Gradients of a minibatch, summed over ranks but those of dp."""
        micros = list(
            micro_batches(
                whole, max_tokens=self.case.micro, max_rollouts=None, shared=True, whole_groups=False
            )
        )
        for _, p in self.named():
            p.grad = None
        self.seen = {}
        stage = self.parallel.stage
        load_X = self.loads(micros) if self.case.aux else None
        if stage is None:
            for micro in micros:
                with (
                    self.dropping(micro),
                    router.watching() as routed,
                ):
                    total = self.loss(micro, self.outputs(micro, self.hidden(micro, None)))
                    if load_X is not None:
                        term = router.balance(routed, self.uses(micro), prices(routed, load_X))
                        total = total + self.case.aux / self.parallel.tp.size * term
                    total.backward()
        else:
            shapes = [(self.rows(micro), 32) for micro in micros]
            stage.run(
                shapes,
                lambda i, part, x: self.piece(micros[i], part, x),
                device=torch.device("cpu"),
                around=lambda i: self.dropping(micros[i]),
            )
        with torch.no_grad():
            for peers, some in self.parallel.sums(dict(self.named())):
                add_gradients(peers, some)
        for name, p in self.named():
            if name not in self.parallel.experts:
                self.data.add(p.grad)

    @torch.no_grad()
    def loads(self, micros: list[Batch]) -> Tensor:
        """Choices of the experts in a whole minibatch."""
        total = torch.zeros(self.model.config.num_experts, dtype=torch.float64)
        for micro in micros:
            with router.watching() as routed:
                self.hidden(micro, None)
            total += router.counts(routed, self.uses(micro))[0].sum(0)
        return self.data.add(self.parallel.cp.add(total))

    def uses(self, micro: Batch) -> Tensor:
        packed = layout(micro, share_prompts=self.case.share_prompts)
        return router.uses(packed)[self.parallel.share(packed).span]

    def rows(self, micro: Batch) -> int:
        share = self.parallel.share(layout(micro, share_prompts=self.case.share_prompts))
        return share.span.stop - share.span.start

    def piece(self, micro: Batch, part: int, x: Tensor | None) -> Tensor:
        stage = self.parallel.stage
        assert stage is not None
        with stage.running(part):
            hidden_TD = self.hidden(micro, x)
        return self.loss(micro, self.outputs(micro, hidden_TD)) if part == stage.parts - 1 else hidden_TD


def add_gradients(peers: Peers, parameters: Mapping[str, nn.Parameter]) -> None:
    """Over the ranks of `peers`; a gradient that is missing on some of them counts as 0 there."""
    if peers.size == 1 or not parameters:
        return
    has_P = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.int64)
    for p, ranks in zip(parameters.values(), peers.add(has_P).tolist()):
        if ranks:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            peers.add(p.grad)


def error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, in units of the norm expected."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def compare(case: Case, dims: Dims, *, steps: int = 3) -> dict[str, float]:
    """Largest errors of one case on one layout. Ranks of dp_shard learn from neighbouring rollouts each."""
    one, many = Learner(case), Learner(case, dims)
    errors: dict[str, float] = {}

    def note(what: str, value: float) -> None:
        errors[what] = max(errors.get(what, 0.0), value)

    sgd = [torch.optim.SGD([p for _, p in learner.named()], lr=case.lr) for learner in (one, many)]
    for at in range(steps):
        whole = batch(at)
        one.learn(whole)
        many.learn(select(whole, torch.arange(whole.rollouts)[many.data.span(whole.rollouts)]))
        _note_gradients(one, many, note, at)
        for optimizer, learner in zip(sgd, (one, many)):
            optimizer.step()
            refresh(learner.model)
    _note_weights(one, many, note)
    return errors


def everyones(learner: Learner, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors of all stages."""
    whole = ((n, learner.parallel.whole(n, part)) for n, part in parts.items())
    return dict(learner.parallel.gathered(whole, torch.device("cpu")))


def _note_gradients(one: Learner, many: Learner, note: Callable[[str, float], None], at: int) -> None:
    stage = many.parallel.stage
    if stage is None or stage.last:
        for name, x in one.seen.items():
            found = many.seen[name]
            note(name, error(found, x[: len(found)] if many.data.rank == 0 else x[-len(found) :]))
    expected = {n: p.grad for n, p in one.named()}
    grads = {n: p.grad for n, p in many.named() if p.grad is not None}
    inner = {n: g for n, g in grads.items() if not n.startswith("value_head.")}
    found = everyones(many, inner) | {n: g for n, g in grads.items() if n not in inner}
    lacking = {n for n, g in expected.items() if g is not None} - found.keys()
    assert all(n.startswith("value_head.") for n in lacking), lacking
    for name, g in found.items():
        assert expected[name] is not None, name
        note(f"gradient of step {at}", error(g, expected[name]))
    square = sum(float(g.double().square().sum()) for n, g in grads.items() if many.parallel.counts(n))
    if many.parallel.experts:
        return  # the norm of experts is summed over ep, that of the others is not: see DataParallel
    total = torch.tensor(square, dtype=torch.float64)
    for peers in (many.parallel.tp, many.parallel.pp):
        peers.add(total)
    full = sum(float(g.double().square().sum()) for g in expected.values() if g is not None)
    note("norm", abs(float(total) - full) / full)


def _note_weights(one: Learner, many: Learner, note: Callable[[str, float], None]) -> None:
    own = {n: p.detach() for n, p in one.model.named_parameters()}
    found = everyones(many, {n: p.detach() for n, p in many.model.named_parameters()})
    assert found.keys() == own.keys()
    for name, p in found.items():
        note("weights", error(p, own[name]))
    for name, p in many.model.named_parameters():
        note("parts", error(many.parallel.part(name, own[name]), p.detach()))

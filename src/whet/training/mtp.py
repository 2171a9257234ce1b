"""The loss of layers of multi-token prediction, beside the policy's own.

The loss of layer k is the mean over the minibatch of the cross entropy at each place that the layer has a token for:
of the token that stands k + 1 places later (`cross_entropy`, as Megatron-LM and verl), or to the policy's own
distribution k places later (`distill`, as SkyRL). The term is `coef` times the mean over the layers. Logits are not
divided by a temperature.

Denominators count the whole minibatch, on all ranks, before its first micro-batch; then each micro-batch adds its part,
so how work is cut changes nothing. The part is given to the decoder's hidden states (`router.attached`): they keep
their values, and when they get their gradient, so does the term.

Shape letters: N tokens of the batch, U tokens of a layer, A rows of a loss, K layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from whet.algos.segments import need
from whet.batch import Batch
from whet.config.mtp import is_mtp
from whet.models.attention import PackedAttention
from whet.models.kernels import Ops
from whet.models.logprobs import OutputHead, token_logprobs
from whet.models.mtp import layers_of
from whet.models.mtp_forward import embedding_of, hidden_of
from whet.models.packing import PackedLayout, layout
from whet.models.router import attached
from whet.models.soft_targets import soft_cross_entropy
from whet.training.micro_batches import MicroBatchPolicy
from whet.types import Metrics


class MtpTerm:
    """The term of one model, from one minibatch to the next."""

    def __init__(
        self,
        model: PreTrainedModel,
        ops: Ops,
        cut: MicroBatchPolicy,
        head: OutputHead,
        add: Callable[[Tensor], Tensor],
    ) -> None:
        """Make it before the model is spread over ranks. add: up, in place, over ranks that have other tokens."""
        assert cut.mtp is not None, "nothing says what the layers learn"
        self.loss, self.cut, self.head, self.ops, self.add = cut.mtp, cut, head, ops, add
        self.embedded = embedding_of(model)
        self.layers = hidden_of(model, layers_of(model), ops)
        count = model.config.get_text_config().num_hidden_layers
        own = frozenset(name for name, _ in model.named_parameters() if is_mtp(name, count))
        self.apart = own if self.loss.distill else frozenset()
        """Parameters whose gradient is clipped by itself: as nothing else learns from the term, it then changes nothing
        of the policy's steps."""
        self.tokens_K, self.sums_K = torch.zeros(0), torch.zeros(0)

    def begin(self, micros: Iterable[Batch], device: torch.device) -> None:
        """A minibatch, of which these are here. To be called by all ranks."""
        self.tokens_K = torch.zeros(len(self.layers), dtype=torch.float64, device=device)
        for micro in micros:
            at = (self._weighed(micro, ahead)[1] for ahead in range(1, len(self.layers) + 1))
            self.tokens_K += torch.stack([times_A.double().sum() for times_A in at]).to(device)
        self.add(self.tokens_K)
        self.tokens_K = torch.where(self.tokens_K > 0, self.tokens_K, 1.0)  # of none the mean is 0
        self.sums_K = torch.zeros_like(self.tokens_K)

    def _weighed(self, batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
        """([A] tokens of a batch: those that the layer predicts, or where it stands with `distill`; [A] how often each
        counts)."""
        position_N = batch.position_N
        if self.loss.distill:
            sampled_S = batch.length_S.new_zeros(batch.segments).index_add(
                0, batch.segment_N, batch.mask_N.long()
            )
            left_N = batch.length_S[batch.segment_N] - position_N
            at_A = torch.nonzero((left_N > ahead) & (sampled_S[batch.segment_N] > 0)).flatten()
        else:
            weight_N = need(batch.weight_N, "batch.weight_N")
            at_A = torch.nonzero(batch.mask_N & (position_N > ahead) & (weight_N > 0)).flatten()
        if batch.count_R is None:
            return at_A, torch.ones_like(at_A, dtype=torch.float32)
        return at_A, batch.count_R.float()[batch.rollout_N[at_A]]

    def around(
        self,
        batch: Batch,
        packed: PackedLayout,
        hidden_UD: Tensor,
        computing: Callable[[], AbstractContextManager[None]],
        scaled: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The decoder's hidden states of a micro-batch, with its part of the term attached, `scaled` as the loss is.
        computing: what layers are computed in."""
        head = self.head if self.loss.detach == "nothing" else self.head.still
        alone = self.loss.detach == "model"
        term, state_UD, before = hidden_UD.new_zeros((), dtype=torch.float32), hidden_UD, packed
        for number, layer in enumerate(self.layers):
            ahead = number + 1
            if alone and (
                number == 0 or not self.loss.distill
            ):  # Megatron-LM with verl's patch: before each layer
                state_UD = state_UD.detach()
            now = layout(batch, share_prompts=self.cut.share_prompts, ahead=ahead, whole=self.loss.distill)
            with computing():
                embedded_UD = self.embedded(batch.token_ids_N[now.at_U + ahead])
                state_UD = layer(
                    embedded_UD.detach() if alone else embedded_UD,
                    F.embedding(before.row_N[now.at_U], state_UD),
                    now.position_U,
                    PackedAttention(now.segments, self.ops),
                    checkpoint=self.cut.checkpoint,
                )
            before = now
            at_A, times_A = self._weighed(batch, ahead)
            if (
                self.loss.distill
            ):  # a place that rollouts share is computed once, and counts as often as they do
                target_UD = F.embedding(packed.row_N[now.at_U + ahead], hidden_UD.detach())
                found_A = soft_cross_entropy(state_UD, target_UD, head=head, top_k=self.loss.top_k)
                times_A = torch.zeros_like(found_A).index_add(0, now.row_N[at_A], times_A)
            else:
                rows_AD = F.embedding(now.predictor_N[at_A], state_UD)
                found_A = -token_logprobs(rows_AD, batch.token_ids_N[at_A], head=head, ops=self.ops)[0]
            total = (found_A * times_A).sum()
            self.sums_K[number] += total.detach().double()
            term = term + total / self.tokens_K[number].float()
        return attached(hidden_UD, scaled(term * (self.loss.coef / len(self.layers))))

    def metrics(self) -> Metrics:
        """Of the last minibatch: the mean over the layers, without the coefficient. Alike on all ranks, which all call
        it."""
        self.add(self.sums_K)
        return {"mtp_loss": float((self.sums_K / self.tokens_K).mean())}

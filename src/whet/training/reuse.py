"""The activations that sampling has left, as a train engine uses them.

They take the place of the products and the attention of its own forward pass, whose bits are the same. This is checked
all the time: one strand of each step is computed again and compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from whet.models.activations import Activations, Comparison, PackedActivations
from whet.models.attention import PackedAttention, Segments
from whet.models.forward import Decoder
from whet.models.kernels import Ops
from whet.models.packing import PackedLayout


class Reuse:
    """Of one policy, whose weights are those that an engine in this process samples from."""

    def __init__(self, kept: Activations, decoder: Decoder, ops: Ops) -> None:
        self.kept, self.decoder, self.ops = kept, decoder, ops
        self.differs: float | None = None
        """The largest difference of a number from the one that was computed again; None: there was none."""
        self.compared = 0
        """Strands so far."""
        self.checked: int | None = None
        """The first row of the step of which a strand has been compared."""

    def of(self, packed: PackedLayout) -> PackedActivations | None:
        """Those of a packed batch. None unless all its tokens are known."""
        found = self.kept.find(packed.segments, packed.token_ids_U)
        if found is not None and self.checked != self.kept.first:
            self.checked = self.kept.first
            self._compare(packed, found)
        return None if self.differs is not None else found

    def stepped(self) -> None:
        """The weights have changed."""
        self.kept.forget()

    @torch.no_grad()
    def _compare(self, packed: PackedLayout, found: PackedActivations) -> None:
        """Compute one strand alone, another one each time. Where a bit differs, nothing is reused from here on."""
        of = packed.segments
        at = self.compared % len(of.q_start_S)
        self.compared += 1
        pieces = ((of.prefix_start_S[at], of.prefix_len_S[at]), (of.q_start_S[at], of.q_len_S[at]))
        row_N = torch.cat([torch.arange(int(start), int(start + count)) for start, count in pieces])
        alone = Segments.of_lengths(torch.tensor([len(row_N)]))
        compared = Comparison(replace(found, row_U=found.row_U[row_N]))
        attend = PackedAttention(alone, self.ops, compared)
        self.decoder.hidden(packed.token_ids_U[row_N], alone.position_N, attend)
        if compared.differs is not None:
            self.differs = compared.differs
            self.kept.resize(0)

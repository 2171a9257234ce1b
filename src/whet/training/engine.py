"""The interface of train engines, which hold weights, gradients and an optimizer: policy, reference, critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from whet.algos.distillation import KL, Divergence
from whet.batch import Batch, LossFn
from whet.models.published import Send
from whet.types import Metrics

Want = Literal[
    "logprobs", "values", "entropy", "collision", "discriminant", "centred_discriminant", "routed"
]  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True)
class FullKl:
    """A term of the loss: coef times a divergence from the reference over many tokens at each place, at the policy's
    own tokens; its KL over the whole vocabulary, if no other is named."""

    coef: float
    reference: Any
    """A `TrainEngine` of the same kind as the one that learns."""
    of: Divergence = KL


class TrainEngine(Protocol):
    """What a stage asks of a model that it trains or compares with."""

    version: int
    """Number of published training steps."""
    drops: bool
    """An update drops parts of adapters: its log-probs are not those of `forward`."""
    apart: bool
    """The weights are in other processes: `publish` works there, `module` brings them here."""
    machine: str | None
    """Ray's name for the machine of the process that publishes; None: it is this one."""
    full_kl: FullKl | None
    """What an update adds to its loss; set once, before the first."""
    beat: Callable[[str], object]
    """Called at every micro-batch: the work goes on."""
    span: Callable[[str], AbstractContextManager[None]]
    """Around a forward, an update and its parts: what is being done."""

    @property
    def module(self) -> PreTrainedModel:
        """The policy's whole model, up to date, in this process. Of others the structure may be all there is."""

    @property
    def structure(self) -> PreTrainedModel:
        """The whole model's names, shapes and dtypes; its parameters may be old, or have no data."""

    def forward(self, batch: Batch, want: Want) -> Tensor:
        """[N] float32, no gradient; 0 where mask_N is false. entropy: in nats. collision: the sum over the
        vocabulary of p^2. discriminant, centred_discriminant: by how much the entropy falls with the token's logit.
        routed: [N, L, E] uint8 or int16, the experts that routers choose (`Batch.routed_NLE`)."""

    def update(self, batch: Batch, loss: LossFn) -> Metrics:
        """Micro-batches, backward, clip, one optimizer step. The loss is sum(loss_N * batch.weight_N)."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, adapters merged."""

    def publish(self, send: Send[T], *, there: bool = False) -> T:
        """Call `send` with all weights, in a process that has them, and return what it returns. Where they are in
        several processes, one has each whole tensor for as long as `send` looks at it. Weights on another machine are
        brought here first, so that what `send` writes is on this one; not so with `there`. Raises what `send` raises.
        """

    def write_weights(self, folder: Path) -> None:
        """All weights as the model has them, adapters apart, into a folder of this machine: `published.read_own`."""

    def call(self, function: Callable[[], T]) -> T:
        """Call a function, which can be pickled, in the process that calls `send`, and return what it returns."""

    def copy_from(self, other: Any, share: float = 1.0) -> None:
        """Take the weights of another engine of the same model; of a share below 1 the weights become share * other +
        (1 - share) * own."""

    def save(self, path: Path, *, moments: bool = True) -> None:
        """Weights and the schedule's place into a folder; with `moments` the optimizer's, too."""

    def capture(self, *, moments: bool = True) -> Callable[[Path], None]:
        """The same in two parts: a copy of the state as it is now, and the function that writes it."""

    def load(self, path: Path) -> None:
        """What `save` wrote, here or on any other layout."""

    def forget(self) -> None:
        """Reset the optimizer's moments; weights and schedule stay."""

    def place(self, device: Literal["gpu", "cpu"]) -> None:
        """Colocated engines: give the accelerator's memory to the other engine, or take it back."""

"""The section about the numbers that a trainer computes with."""

from __future__ import annotations

from typing import Literal

from whet.config.parts.base import Above0, Positive, Section


class Precision(Section):
    """Dtypes of training beside `model.dtype`. Log-probs and losses are float32 always."""

    compute: Literal["bfloat16", "float16"] | None = None
    """Dtype of the matrix products and of attention inside the model, where its parameters are float32 (autocast);
    norms, residuals and the output layer stay float32. Sampling goes on in float32, so sampled and trained log-probs
    differ a little. Default: the parameters' own."""
    float8: Literal["rowwise", "tensorwise"] | None = None
    """Compute the matrix products inside the trained models in 8 bits, forward and backward, scaled by the largest
    number of each row and column (rowwise: closer) or of each tensor (tensorwise: faster). Parameters, gradients,
    norms, attention, routers, the output layer and matrices with a side that 16 does not divide stay as they are. For
    GPUs that have such products (compute capability 8.9: L4, H100 ...); on a CPU it works, and is slow. Sampled and
    trained log-probs differ, and how a batch is cut changes the rounding."""
    reduce: Literal["float32"] | None = None
    """Dtype in which the gradients of all micro-batches are summed, where parameters are not float32: two more bytes a
    parameter, and small gradients are not lost. Default: the parameters' own."""
    master_weights: bool = True
    """Keep a float32 copy of parameters that are not float32, which the optimizer moves. false saves 4 bytes a
    parameter and keeps the moments in the parameters' dtype; steps below 1/256 of a bfloat16 weight are then lost."""
    loss_scale: Above0 = 65536.0
    """float16 only: the loss is multiplied by it at first, so that small gradients do not become 0. A gradient that is
    not finite halves it and skips the step."""
    loss_scale_steps: Positive = 2000
    """float16 only: after so many finite steps in a row the scale doubles."""

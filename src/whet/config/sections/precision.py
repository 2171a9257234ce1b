"""Section about the numeric formats of training."""

from __future__ import annotations

from typing import Literal

from whet.config.sections.base import Above0, Section


class PrecisionConfig(Section):
    """Dtypes of training in addition to `model.dtype`. Log-probs and losses are always float32."""

    compute: Literal["bfloat16", "float16"] | None = None
    """Dtype of the matrix products and of attention inside the model, where the parameters are float32 (autocast);
    norms, residuals and the output layer stay float32. Sampling stays float32, so sampled and trained log-probs differ
    slightly. Default: the dtype of the parameters."""
    float8: Literal["rowwise", "tensorwise"] | None = None
    """Compute the matrix products inside the trained models in 8 bits, forward and backward, scaled by the largest
    absolute value of each row and column (rowwise: more precise) or of each tensor (tensorwise: faster). Parameters,
    gradients, norms, attention, routers, the output layer and matrices with a side that is not divisible by 16 keep
    their dtype. For GPUs with float8 products (compute capability 8.9: L4, H100 ...); on a CPU it works, but is slow.
    Sampled and trained log-probs differ, and the rounding depends on the micro-batches."""
    reduce: Literal["float32"] | None = None
    """Dtype in which the gradients of all micro-batches and ranks are summed, where parameters are not float32: it
    takes two more bytes per parameter, and small gradients are not lost. Default: the dtype of the parameters."""
    master_weights: bool = True
    """Keep a float32 copy of parameters that are not float32; the optimizer updates the copy. false saves 4 bytes per
    parameter and keeps the moments in the dtype of the parameters; updates below 1/256 of a bfloat16 weight are then
    lost."""
    loss_scale: Above0 = 65536.0
    """float16 only: initial factor of the loss, so that small gradients do not become 0. A gradient that is not finite
    halves the factor and skips the step; it doubles after 2000 finite steps in a row (as torch's GradScaler)."""

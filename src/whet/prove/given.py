"""What `--prove` compares of a file that learns from given replies (SFT): whet's side, the same for every system."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from whet.prove import numbers, schedules, settings
from whet.prove.cases import Case, case
from whet.prove.checks import Check, File, of_rates, of_rows, our_micro_batch, scalars
from whet.prove.numbers import Numbers


def of_run(
    file: File,
    *,
    batches: Callable[[], Numbers],
    batches_by: str,
    steps: Callable[[int], int],
    steps_by: str,
    rates: Callable[[int], Tensor],
    rates_by: str,
    peak: float,
    optimizer: Callable[[], Numbers],
    optimizer_by: str,
    keys: tuple[str, ...] = (),
    rate_keys: tuple[str, ...] = (),
    optimizer_keys: tuple[str, ...] = (),
) -> Iterator[Check]:
    """Sizes, steps, learning rates and the optimizer. Of the peer: the rows of a step with what bounds a micro-batch,
    the training steps for so many rows, the factor of the learning rate in each of so many steps, the peak, and the
    optimizer (`settings.adam`); each with what is called for it. keys, rate_keys, optimizer_keys: those whose
    documented differences show in the number of steps, in the rates, in the optimizer."""
    yield Check(
        what="batches",
        called=batches_by,
        theirs=lambda _: batches(),
        ours=lambda _: scalars(rows_of_a_step=file.plan.tasks_per_step) | our_micro_batch(file.plan),
    )
    yield Check(
        what="training steps",
        called=steps_by,
        theirs=lambda _: of_rows(steps, file.plan),
        ours=lambda _: of_rows(file.steps, file.plan),
        keys=keys,
    )
    yield from of_rates(
        file,
        theirs=lambda rows: rates(file.steps(rows)),
        ours=lambda rows: schedules.of_steps(file.plan, file.steps(rows)) / peak,
        called=rates_by,
        short_keys=rate_keys,
    )
    yield settings.optimizer(file, theirs=optimizer, called=optimizer_by, keys=optimizer_keys)


def of_loss(
    file: File,
    name: str,
    *,
    theirs: Callable[[Case], Numbers],
    called: str,
    tolerance: float = 1e-9,
) -> Check:
    """The loss of replies of one and of several turns, of which the policy's turns are learned, and its gradient."""
    return Check(
        what=f"loss and gradient, {name}",
        called=called,
        theirs=theirs,
        ours=lambda each: numbers.loss(numbers.built(file.config, each), each),
        cases=[case(kind, 0) for kind in ("one turn", "several turns")],
        tolerance=tolerance,
    )

"""The orders in which the rows of a source are drawn: `data.order`.

An order is made once for each source, as `make(rows, **settings)`, and asked for the row of each draw. It may learn
from how its tasks went; then what it has learned is part of every checkpoint. An order of the user's is a class, or a
function that returns an object, with these methods:

    row(draw, out)   the row, 0 to len(rows) - 1, of draw number `draw` (0, 1, 2 ...). out: rows that are drawn and
                     whose groups have not left the buffer yet
    update(played)   optional: after each step, (row, group) of every task that has left the buffer since, in the order
                     of the tasks; also groups that were not trained on, and rollouts without a reward (None)
    state()          required with `update`: what it has learned, as JSON
    restore(state)   required with `update`: go on from such a state

What `row` answers depends on its arguments, `rows` and the state alone; so a resumed run draws the same rows.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from whet import seeds
from whet.config.chosen import Chosen
from whet.data.columns import column_of
from whet.data.parts import flaw
from whet.data.prepare import BATCH_ROWS, Prepared
from whet.guard import pulse
from whet.guard.foreign import said, shown
from whet.tables import at_line, check_settings, find
from whet.types import ConfigError, DataError, Group, Json, WhetError

KEY = "data.order"

Played = Sequence[tuple[int, Group]]
"""The row of each task, and its rollouts."""


@dataclass(frozen=True)
class Rows:
    """The K rows of a source that may be drawn, as an order sees them: `rows[k]` has all columns of row k."""

    source: Prepared
    seed: int
    per_epoch: int
    """Draws of an epoch: K, or fewer with train.drop_last."""
    read: dict[str, str] = field(default_factory=dict)
    """Digests of the columns that the order has read, by name: a resumed run checks that they are the same."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, k: int) -> dict[str, Json]:
        if not 0 <= k < len(self):
            raise IndexError(k)
        return self.source.rows.row(int(self.source.row_K[k]))

    def stream(self, purpose: str, *further: int) -> int:
        """The key of random numbers (`whet.seeds`) of this source, by purpose and number."""
        return seeds.key(self.seed, purpose, self.source.rows.name, *further)

    def column(self, name: str) -> list[Json]:
        """[K] the values of a column; dots name nested ones. DataError that names the row which lacks it."""
        rows, values = self.source.rows, []
        wanted = iter(self.source.row_K.tolist())
        i = next(wanted, None)
        for begin in range(0, len(rows), BATCH_ROWS):
            batch = rows.slice(begin, begin + BATCH_ROWS, (name, name.partition(".")[0]))
            while i is not None and i < begin + len(batch):
                values.append(self._value(batch[i - begin], name, i))
                i = next(wanted, None)
        digest = hashlib.blake2b(repr(values).encode(errors="surrogatepass"), digest_size=16)
        self.read[name] = digest.hexdigest()
        return values

    def shares(self, name: str) -> np.ndarray:
        """[K] float64: a column of numbers from 0 to 1. DataError that names the row where it is none."""
        values = self.column(name)
        for k, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                where = self.source.rows.where(int(self.source.row_K[k]))
                given = f"{type(value).__name__} {shown(value, 60)}"
                raise DataError(
                    f"{where}: column {name!r} holds {given}; {KEY} expects success rates, numbers from 0 to 1."
                )
        return np.array(values, dtype=np.float64)

    def _value(self, row: dict[str, Json], name: str, i: int) -> Json:
        try:
            return column_of(row, name)
        except LookupError as e:
            rows = self.source.rows
            has = ", ".join(sorted(rows.row(i)))
            raise DataError(f"{rows.where(i)}: no column {name!r}, which {KEY} reads; columns: {has}.") from e


class Order(Protocol):
    """What every order answers. Those that learn have the other methods too."""

    def row(self, draw: int, out: Collection[int]) -> int:
        """The row of draw number `draw`."""
        ...


# ---------------------------------------------------------------- the same order whatever happens


class ByEpoch:
    """Every row once in `size` draws, in an order that depends on the number of the epoch alone."""

    def __init__(
        self, rows: Rows, places: Callable[[Rows, int], np.ndarray], size: int | None = None
    ) -> None:
        """places: (rows, epoch) -> rows, the first ones first. size: draws of an epoch; None: `rows.per_epoch`."""
        self._rows, self._places, self._size = rows, places, size or rows.per_epoch
        self._known: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def row(self, draw: int, out: Collection[int] = ()) -> int:
        epoch, place = divmod(draw, self._size)
        if self._known[0] != epoch:
            self._known = (epoch, self._places(self._rows, epoch))
        return int(self._known[1][place])


def _shuffled(rows: Rows, epoch: int) -> np.ndarray:
    return seeds.permutation(rows.stream("shuffle", epoch), len(rows))


def _as_in_file(rows: Rows, epoch: int) -> np.ndarray:
    return np.arange(len(rows))


def _by_difficulty(rows: Rows, epoch: int, *, sign: int) -> np.ndarray:
    """By the first column, where that is equal by the second, and so on. Equally difficult rows stand shuffled."""
    if rows.source.difficulty_KD is None:
        raise ConfigError(
            f"{KEY}: source {rows.source.rows.name!r} has no column of difficulties; set its `difficulty`."
        )
    places_K = _shuffled(rows, epoch)
    sorted_by_DK = sign * rows.source.difficulty_KD[places_K].T
    return places_K[np.lexsort(sorted_by_DK[::-1])]  # lexsort is stable, and compares the last one first


def random(rows: Rows, *, distinct: int) -> Order:
    """Each draw anew from all rows; `distinct` draws in a row differ."""
    if distinct > len(rows):
        raise ConfigError(
            f"{KEY}.distinct={distinct}: source {rows.source.rows.name!r} has only {len(rows)} rows that may be drawn"
        )
    return ByEpoch(rows, _shuffled, distinct)


# ---------------------------------------------------------------- by how the tasks went


class Adaptive:
    """Tasks whose expected success rate is near a target.

    The success rate of each row is a Beta distribution. After each step the evidence of before is discounted, and what
    the rollouts of the step showed is added. With the success rates of a weaker and a stronger model (`columns`), every
    row is updated: its rate is interpolated between the two by how the policy did on the rows that it played. As BOTS
    (arXiv:2510.26374) and Trinity-RFT 0.5's `difficulty_based`; rows whose groups are out are not drawn again.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        target: float,
        temperature: float,
        thompson: bool,
        decay: float,
        evidence: int | None,
        reward_min: float,
        reward_max: float,
        columns: Sequence[str],
        prior_weight: float,
        prior_adapts: bool,
    ) -> None:
        if columns and len(columns) != 2:
            raise ConfigError(
                f"{KEY}.columns: got {len(columns)}; give two columns of success rates, of a weaker and a stronger "
                "model"
            )
        if not reward_min < reward_max:
            raise ConfigError(f"{KEY}.reward_min={reward_min:g} is not below reward_max={reward_max:g}")
        self._rows, self._target, self._temperature, self._thompson = rows, target, temperature, thompson
        self._decay, self._evidence, self._adapts = decay, evidence, prior_adapts
        self._lowest, self._range = reward_min, reward_max - reward_min
        self._anchors = tuple(rows.shares(name) for name in columns)
        self._weight = prior_weight if columns else 0.0
        self._capability: float | None = None
        self._alpha_K, self._beta_K = np.ones(len(rows)), np.ones(len(rows))
        self._ranked: tuple[int, list[int]] | None = None
        """The draw at which the rows were ranked, and the rows, the best one first."""
        self._next = 0

    @property
    def expected_K(self) -> np.ndarray:
        """[K] the expected success rate of each row."""
        rate_K: np.ndarray = self._alpha_K / (self._alpha_K + self._beta_K)
        return rate_K

    def row(self, draw: int, out: Collection[int]) -> int:
        if self._ranked is None:
            self._ranked, self._next = (draw, self._rank(draw)), 0
        _, ranked = self._ranked
        while self._next < len(ranked):
            self._next += 1
            if ranked[self._next - 1] not in out:
                return ranked[self._next - 1]
        self._next = 1  # every row is out: the best one once more
        return ranked[0]

    def update(self, played: Played) -> None:
        """Of each task the mean reward of the rollouts that have one."""
        rates: defaultdict[int, list[float]] = defaultdict(list)
        for row, group in played:
            rates[row] += [self._success(r.reward) for r in group.rollouts if r.reward is not None]
        seen = {row: found for row, found in sorted(rates.items()) if found}
        if not seen:
            return
        at = list(seen)
        rate = np.array([math.fsum(found) / len(found) for found in seen.values()])
        count = np.array([self._evidence or len(found) for found in seen.values()], dtype=np.float64)
        prior_K = self._prior(at, rate)
        for counts_K, share, prior in (
            (self._alpha_K, rate, prior_K),
            (self._beta_K, 1 - rate, 1 - prior_K),
        ):
            counts_K *= 1 - self._decay
            counts_K += self._decay
            if self._weight:
                counts_K += self._weight * prior * (self._evidence or float(count.mean()))
            counts_K[at] += (1 - self._weight) * share * count
        self._ranked = None

    def state(self) -> Json:
        return {
            "alpha": self._alpha_K.tolist(),
            "beta": self._beta_K.tolist(),
            "capability": self._capability,
            "prior_weight": self._weight,
            "ranked": None if self._ranked is None else [self._ranked[0], self._next],
        }

    def restore(self, state: Json) -> None:
        self._alpha_K, self._beta_K = np.array(state["alpha"]), np.array(state["beta"])
        self._capability, self._weight = state["capability"], state["prior_weight"]
        self._ranked = None
        if state["ranked"] is not None:
            draw, self._next = state["ranked"]
            self._ranked = (draw, self._rank(draw))

    def _success(self, reward: float) -> float:
        return min(max((reward - self._lowest) / self._range, 0.0), 1.0)

    def _prior(self, at: Sequence[int], rate: np.ndarray) -> np.ndarray:
        """[K] the rate of each row by the two models' rates; of rows that were played, what they showed. 0 without."""
        if not self._anchors:
            return np.zeros(len(self._rows))
        weak_K, strong_K = self._anchors
        weak, strong = float(weak_K[at].mean()), float(strong_K[at].mean())
        shown = (float(rate.mean()) - weak) / (strong - weak + 1e-6)
        before = self._capability
        self._capability = shown if before is None else 0.9 * before + 0.1 * shown
        prior_K: np.ndarray = np.clip((strong_K - weak_K) * self._capability + weak_K, 0, 1)
        if self._adapts and float(np.abs(prior_K[at] - rate).mean()) >= 0.25:
            self._weight *= 0.5
        prior_K[at] = rate
        return prior_K

    def _rank(self, draw: int) -> list[int]:
        """All rows: without replacement, in proportion to exp(-distance from the target / temperature). The logarithms
        are Python's, as numpy's differ in their last digit between kinds of CPUs."""
        rate_K = self.expected_K
        if self._thompson:
            made = np.random.Generator(np.random.Philox(key=self._rows.stream("thompson", draw)))
            rate_K = made.beta(self._alpha_K, self._beta_K)
        distance_K = np.abs(self._target - rate_K)
        uniform_K = seeds.uniforms(self._rows.stream("adaptive", draw), 0, len(self._rows))
        if self._temperature == 0:
            ranked_K = np.lexsort((uniform_K, distance_K))
        else:  # the smallest of exponential times with these rates (Efraimidis and Spirakis 2006)
            waits = [math.log(max(-math.log1p(-u), 1e-300)) for u in uniform_K.tolist()]
            ranked_K = np.argsort(np.array(waits) + distance_K / self._temperature, kind="stable")
        ranked: list[int] = ranked_K.tolist()
        return ranked


# ---------------------------------------------------------------- all of them

ORDERS: dict[str, Callable[..., Order]] = {
    "shuffle": partial(ByEpoch, places=_shuffled),
    "sequential": partial(ByEpoch, places=_as_in_file),
    "easy_first": partial(ByEpoch, places=partial(_by_difficulty, sign=1)),
    "hard_first": partial(ByEpoch, places=partial(_by_difficulty, sign=-1)),
    "random": random,
    "adaptive": Adaptive,
}

LEARNS = ("update", "state", "restore")


class OrderError(WhetError):
    """A method of an order failed, or gave what it may not; also in the middle of a run."""


def learns(order: Order) -> bool:
    """It has a state, which depends on how its tasks went or on its own earlier draws."""
    return any(hasattr(order, name) for name in LEARNS)


def open_order(chosen: Chosen, rows: Rows) -> Order:
    """The order of one source. Raises ConfigError for an unknown name, for wrong settings, and for an object that is no
    order or fails at once."""
    make = find(ORDERS, chosen.name, what=KEY)
    if chosen.is_own:
        check_settings(make, chosen.settings, key=KEY, name=chosen.name, given=1)
    try:
        order: Order = _called(partial(make, rows, **chosen.settings), f"{KEY} {chosen.name!r}")
        _check(order, chosen.name)
    except OrderError as e:
        raise ConfigError(str(e)) from e
    return order


def _check(order: Order, name: str) -> None:
    methods = ("row", *(LEARNS if learns(order) else ()))
    lacking = [method for method in methods if not callable(getattr(order, method, None))]
    if lacking and lacking != ["update"]:  # a state of earlier draws needs no update
        why = "" if lacking == ["row"] else "; without its state a resumed run would draw other rows"
        raise ConfigError(
            f"{KEY} {name!r} made {type(order).__name__}, which has no method {' or '.join(lacking)}{why}"
        )
    for method in ("row", *LEARNS):  # called, these would do nothing
        if _is_no_plain(getattr(order, method, None)):
            raise ConfigError(
                f"{KEY} {name!r}: {method} is async or a generator; expected a method without async and yield"
            )
    if learns(order):
        state_of(order, name=name)  # not only at the first checkpoint


def row_of(order: Order, rows: Rows, draw: int, out: Collection[int], *, name: str) -> int:
    """What an order answers, checked. Raises OrderError for anything but the number of a row."""
    what = f"{KEY} {name!r}, draw {draw} of source {rows.source.rows.name!r}"
    found = _called(partial(order.row, draw, out), what)
    try:
        k = operator.index(found)
    except TypeError:
        k = -1
    if isinstance(found, bool) or not 0 <= k < len(rows):
        raise OrderError(f"{what}: row returned {shown(found, 60)}; expected a row from 0 to {len(rows) - 1}")
    return k


def state_of(order: Order, *, name: str) -> Json:
    """What an order has learned, checked: a checkpoint holds JSON. OrderError that names what is none."""
    state = call(order, "state", name=name)
    try:
        if (fault := flaw(state, "state")) is None:
            json.dumps(state)
    except (RecursionError, ValueError) as e:  # too deep, or a number of too many digits
        fault = f"state cannot be written as JSON: {said(e)}"
    if fault is not None:
        raise OrderError(
            f"{KEY} {name!r}: {fault.removeprefix('column ')}; a checkpoint holds dict, list, str, int, float, bool "
            "and None"
        )
    return state


def call(order: Order, method: str, *arguments: Any, name: str) -> Any:
    """A method of an order that learns."""
    return _called(partial(getattr(order, method), *arguments), f"{KEY} {name!r}, {method}")


def _called(function: Callable[[], Any], what: str) -> Any:
    pulse.beat(what)  # where it hangs, the watchdog names it
    try:
        return function()
    except WhetError:
        raise
    except (Exception, SystemExit) as e:  # code of the user's: it can fail in any way
        raise OrderError(f"{what}: {type(e).__name__}: {said(e)}{at_line(e)}") from e


def _is_no_plain(method: object) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method)

"""The account of every rollout: asked = trained + rejected + failed + pending, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from whet.types import Json, Metrics, WhetError

SKIPPED = "skipped_update"
"""Reason booked for groups whose updates were all skipped, for their gradient was not finite."""


class Ledger:
    """Counts rollouts, over the run and since the last `end_step`. A reason is a short fixed word."""

    def __init__(self, total: dict[str, int] | None = None, step: dict[str, int] | None = None) -> None:
        self._total = Counter(total or {})
        self._step = Counter(step or {})

    def asked(self, n: int) -> None:
        """`n` rollouts were asked for."""
        self.book("asked", n)

    def trained(self, n: int) -> None:
        """`n` went into an update."""
        self.book("trained", n)

    def rejected(self, n: int, reason: str) -> None:
        """`n` were fine but not used, e.g. 'uniform', 'stale'."""
        self.book(f"rejected/{reason}", n)

    def book(self, account: str, n: int) -> None:
        """`n` more of an account by its whole name: 'asked', 'trained', 'rejected/REASON', 'failed/REASON'."""
        if n < 0:
            raise ValueError(f"ledger: {n} rollouts of {account!r}; counts cannot decrease")
        self._total[account] += n
        self._step[account] += n

    def settle(self, totals: Mapping[str, int]) -> None:
        """Book what a common account (a store's, over all processes) has more than this one."""
        for account, n in totals.items():
            if account != "pending" and n > self._total[account]:
                self.book(account, n - self._total[account])

    @property
    def pending(self) -> int:
        """Asked for and not yet accounted for."""
        return self._total["asked"] - sum(n for account, n in self._total.items() if account != "asked")

    def balance(self, held: int | None = None) -> None:
        """WhetError if more came out than was asked for, or if not exactly `held` are pending: the number
        counted where they are, in flight and in the buffer.
        """
        if self.pending < 0 or (held is not None and held != self.pending):
            where = "" if held is None else f", but {held} were found in flight and in the buffer"
            counts = ", ".join(f"{account} {n}" for account, n in sorted(self._total.items()))
            raise WhetError(
                f"rollouts do not add up: {counts}; so {self.pending} are pending{where}. This is a bug."
            )

    def check_learned(self) -> None:
        """WhetError if every update was skipped: rollouts were booked so, and none as trained on."""
        lost = self._total[f"rejected/{SKIPPED}"]
        if lost and not self._total["trained"]:
            raise WhetError(
                f"every update was skipped because its gradient was not finite, so {lost} rollouts were not trained on "
                "and the weights did not change. Check the rewards and the loss in metrics.jsonl, "
                "model.dtype and train.precision; use another run_dir or checkpoint.resume=fresh to restart"
            )

    def unfilled(self, step: int, *, asked: int, there: int, needed: int) -> WhetError:
        """The error of a step for which too few groups can be trained on. step: its number; the others are groups."""
        lost = {
            account: n
            for account, n in sorted(self._step.items())
            if account.startswith(("rejected", "failed"))
        }
        uniform = lost.get("rejected/uniform", 0)
        counts = ", ".join(f"{account} {n}" for account, n in lost.items()) or "none"
        advice = (
            "Groups with equal rewards have no gradient: use easier or harder tasks, a larger rollout.group_size, or "
            "set algorithm.dynamic_sampling=false"
            if uniform or not lost
            else "run.log has the reasons; ledger/* in metrics.jsonl counts them at every step"
        )
        return WhetError(
            f"step {step} could not be filled: of {asked} tasks only {there} gave a group that can be trained on, but "
            f"{needed} are needed. Rollouts since the last step that were not trained on: {counts}. {advice}"
        )

    def end_step(self) -> Metrics:
        """The counts since the last call, as metrics, and how many are pending now. Starts the next step."""
        metrics = {
            f"ledger/{'requested' if account == 'asked' else account}_rollouts": float(n)
            for account, n in sorted(self._step.items())
        }
        self._step.clear()
        return {**metrics, "ledger/pending_rollouts": float(self.pending)}

    def state(self) -> dict[str, Json]:
        return {"total": dict(self._total), "step": dict(self._step)}

    @staticmethod
    def from_state(state: dict[str, Json]) -> Ledger:
        return Ledger(state["total"], state["step"])

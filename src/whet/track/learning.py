"""Whether a stage learns: signs in its metrics that it does not, or slowly, each with what to try; and its trend.

A row is the metrics of one training step, as a line of metrics.jsonl has them (a number that is not finite is NaN or
absent); while a run trains, with its timings. A sign looks at the last rows only, so it goes when its cause does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from whet.track.metrics import ACCURACY, LOSS, REWARD

TOOL = "reward/part/env/calls/"
"""Before the name of a tool: the mean of its calls in a rollout."""

Row = Mapping[str, float]
Rows = Sequence[Row]


@dataclass(frozen=True)
class Sign:
    """A sign that a stage does not learn, or learns something else than intended."""

    name: str
    window: int
    """Number of steps that it looks at."""
    holds: Callable[[Rows], bool]
    """Of exactly `window` rows."""
    says: str
    advice: str

    def __str__(self) -> str:
        return f"{self.says.format(window=self.window)}. To try: {self.advice}"


def numbers(rows: Rows, name: str) -> list[float]:
    """A metric of the rows that have it as a finite number."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def constant_reward(rows: Rows) -> bool:
    """Every reward of every row is the same number."""
    least, most = numbers(rows, "reward/min"), numbers(rows, "reward/max")
    several = min(numbers(rows, "reward/scored_count"), default=0) > 1
    return several and len(least) == len(most) == len(rows) and min(least) == max(most)


def uniform_groups(rows: Rows) -> bool:
    """Rewards differ, but never within a group."""
    uniform = numbers(rows, "group/zero_std_frac")
    return len(uniform) == len(rows) and min(uniform) == 1.0 and not constant_reward(rows)


def never_ends(rows: Rows) -> bool:
    """Every reply reached its limit."""
    cut = numbers(rows, "rollout/finish_length_frac")
    return len(cut) == len(rows) and min(cut) == 1.0


def no_calls(rows: Rows) -> bool:
    """There are tools, and no reply called one."""
    calls = numbers(rows, "rollout/calls_mean")
    return len(calls) == len(rows) and max(calls) == 0.0


def tool_unused(rows: Rows) -> bool:
    """One of several tools was never called, while others were."""
    named = {name for row in rows for name in row if name.startswith(TOOL)}
    return not no_calls(rows) and any(max(numbers(rows, name), default=1.0) == 0.0 for name in named)


def malformed(rows: Rows) -> bool:
    """More than half of the replies could not be read."""
    found = numbers(rows, "rollout/malformed_frac")
    return len(found) == len(rows) and min(found) > 0.5


def length_pays(rows: Rows) -> bool:
    """Replies have become half as long again, and the reward has followed their length step by step."""
    reward, length = numbers(rows, REWARD), numbers(rows, "rollout/tokens_mean")
    if not len(reward) == len(length) == len(rows):
        return False
    quarter = len(rows) // 4
    longer = fmean(length[-quarter:]) >= 1.5 * fmean(length[:quarter]) > 0
    return longer and _correlation(reward, length) >= 0.95


def entropy_collapsed(rows: Rows) -> bool:
    """The policy is nearly deterministic, and nearly every group uniform, while not all rewards are the best one."""
    entropy, uniform = numbers(rows, "train/entropy_nats"), numbers(rows, "group/zero_std_frac")
    reward, best = numbers(rows, REWARD), numbers(rows, "reward/max")
    if not len(entropy) == len(uniform) == len(reward) == len(best) == len(rows):
        return False
    return max(entropy) < 0.01 and fmean(uniform) > 0.9 and fmean(reward) < 0.9 * max(best)


def kl_exploded(rows: Rows) -> bool:
    """The policy moves far away in every step, or is far from its reference: nats per token."""
    moved = numbers(rows, "train/approx_kl_k3_nats")
    away = numbers(rows, "train/kl_reference_nats")
    return any(len(kl) == len(rows) and min(kl) > limit for kl, limit in ((moved, 0.3), (away, 1.0)))


def steps_skipped(rows: Rows) -> bool:
    """Most steps had an optimizer step whose gradient was not finite."""
    return sum(skipped > 0 for skipped in numbers(rows, "train/skipped_steps")) > len(rows) / 2


def rewards_slow(rows: Rows) -> bool:
    """Each step waits for its rewards longer than for everything else, and longer than a second."""
    scoring, whole = numbers(rows, "time/reward_s"), numbers(rows, "time/step_s")
    same = len(scoring) == len(whole) == len(rows)
    return same and all(s > max(1.0, step / 2) for s, step in zip(scoring, whole))


def _correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's; 0 where one does not vary."""
    mean_x, mean_y = fmean(x), fmean(y)
    both = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    size = math.sqrt(math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y))
    return both / size if size else 0.0


_READ = "read replies with `whet show RUN --step N`"

SIGNS = (
    Sign(
        "constant reward",
        5,
        constant_reward,
        "every reward of the last {window} steps was the same, so nothing tells good replies from bad ones",
        f"{_READ}; print what the reward compares (it goes to run.log); check the answer column (data.train), the "
        "format that the prompt asks for, and rollout.sampling.max_tokens; easier or harder tasks, if the reward is "
        "right",
    ),
    Sign(
        "uniform groups",
        5,
        uniform_groups,
        "within every group of the last {window} steps all rewards were equal, so advantages "
        "that compare a group are 0",
        "more rollouts of each task (rollout.group_size), a higher rollout.sampling.temperature, tasks that are "
        "neither always solved nor never (algorithm.dynamic_sampling), a reward with more than two values",
    ),
    Sign(
        "no reply ends",
        5,
        never_ends,
        "every reply of the last {window} steps was cut at its limit: no end token was ever sampled",
        "a larger rollout.sampling.max_tokens; a chat template that ends a turn with the model's end token "
        "(tokenizer.chat_template); rollout.sampling.stop; a few steps of SFT on replies that end",
    ),
    Sign(
        "no tool calls",
        5,
        no_calls,
        "the policy has tools, and called none in the last {window} steps",
        f"{_READ}: is a call written in another format than rollout.env.tool_format? A prompt that asks for the tools; "
        "a few steps of SFT on conversations with calls; a reward for a call that is right",
    ),
    Sign(
        "tool unused",
        20,
        tool_unused,
        "at least one tool was never called in the last {window} steps (reward/part/env/calls/NAME_mean is 0)",
        "leave the tool out (rollout.env.arguments), or say in its description when it helps",
    ),
    Sign(
        "malformed replies",
        5,
        malformed,
        "more than half of the replies of the last {window} steps had calls that could not be read",
        f"{_READ} for why (`malformed`); rollout.env.tool_format; a larger rollout.sampling.max_tokens, where "
        "calls are cut",
    ),
    Sign(
        "length pays",
        20,
        length_pays,
        "replies have grown by half in the last {window} steps, and the reward has moved with their length",
        f"{_READ} to see if long replies are better or only longer; the reward `overlong`; an "
        "algorithm.loss_agg_mode that does not favour long replies",
    ),
    Sign(
        "entropy collapsed",
        10,
        entropy_collapsed,
        "the policy has been nearly deterministic for {window} steps (train/entropy_nats below 0.01), so its rollouts "
        "of a task are equal",
        "an earlier checkpoint (checkpoint.resume) with algorithm.entropy_coef, a smaller train.optimizer.lr, a larger "
        "algorithm.loss.clip_high, or algorithm.kl.coef",
    ),
    Sign(
        "KL exploding",
        3,
        kl_exploded,
        "the policy has changed too fast in the last {window} steps (train/approx_kl_k3_nats above 0.3, or "
        "train/kl_reference_nats above 1)",
        "an earlier checkpoint (checkpoint.resume) with a smaller train.optimizer.lr, fewer train.update_epochs, "
        "train.optimizer.max_grad_norm, or algorithm.kl.coef",
    ),
    Sign(
        "steps skipped",
        5,
        steps_skipped,
        "most of the last {window} steps had a gradient that was not finite, and were skipped",
        "a smaller train.optimizer.lr, train.optimizer.max_grad_norm, train.precision.compute=bfloat16 instead of "
        "float16, or model.dtype=float32",
    ),
    Sign(
        "rewards slow",
        3,
        rewards_slow,
        "scoring took more than half of each of the last {window} steps (time/reward_s)",
        "a larger reward_workers.count (replies that are scored at once; the default is 1), a faster reward, or "
        "rollout.max_staleness above 0, so that the next replies are scored while the trainer trains",
    ),
)


def signs(rows: Rows) -> list[Sign]:
    """Those that hold after the last row."""
    return [s for s in SIGNS if len(rows) >= s.window and s.holds(rows[-s.window :])]


LONGEST = max(sign.window for sign in SIGNS)

HEADLINES = ((ACCURACY, 1.0), (REWARD, 1.0), (LOSS, -1.0))
"""The first metric that a stage has, and the direction in which it gets better. The rewards of a pair are 1 and 0,
whatever is learned. The loss of a policy gradient says nothing, but where there is one there are rewards."""


def trend(rows: Rows) -> str:
    """In words, how the headline of a stage has moved: its first quarter compared with its last one."""
    for name, better in HEADLINES:
        values = numbers(rows, name)
        if not values:
            continue
        label = "reward" if name == REWARD else name.rpartition("/")[2]
        quarter = len(values) // 4
        if quarter < 2:
            return f"too early to say: {label} {values[0]:.3g} → {values[-1]:.3g} in {len(values)} steps"
        first, last = values[:quarter], values[-quarter:]
        moved = fmean(last) - fmean(first)
        noise = math.sqrt(variance(first) / quarter + variance(last) / quarter)
        told = (
            f"{label} {fmean(first):.3g} → {fmean(last):.3g} (first and last quarter of {len(values)} steps)"
        )
        if abs(moved) <= 2 * noise:
            return f"no clear trend yet: {told}, which is within the noise"
        return f"yes: {told}" if moved * better > 0 else f"no: {told}"
    return "no step yet"

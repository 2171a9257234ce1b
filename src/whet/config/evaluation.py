"""What a config says of held-out evaluation: whether, how each source is asked, what cannot work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whet.config.engines import NO_STOP, SERVED
from whet.config.schema import Config, SamplingConfig
from whet.tables import near

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class EvalSampling:
    """How a held-out task is asked. Tasks with equal values are asked together."""

    samples: int
    """Replies a task."""
    sampling: SamplingConfig


def writes_replies(cfg: Config) -> bool:
    """Whether the config is for `whet generate`, which asks held-out tasks and writes the replies unjudged."""
    return "replies" in cfg.track.dump


def trains(cfg: Config) -> bool:
    """Whether the config is for training; else for `whet generate`, or for `whet eval` of the model as it is."""
    return not writes_replies(cfg) and cfg.train.steps != 0


def scores_alone(config: Config, stages: Iterable[Config]) -> bool:
    """Whether there are given replies to score and nothing to train on: a file for `whet eval` alone."""
    return bool(config.eval.offline) and not any(cfg.data.train for cfg in stages)


def evaluates(cfg: Config) -> bool:
    """Whether a stage ever evaluates."""
    on = cfg.eval.interval != 0 or cfg.eval.at_start or cfg.eval.at_end
    return bool(cfg.data.eval) and (on or writes_replies(cfg))


def judges(cfg: Config) -> bool:
    """Whether held-out tasks are asked and the replies judged, by rewards or by the environment, or written; else only
    the loss of given replies is measured."""
    return evaluates(cfg) and bool(cfg.rewards or cfg.rollout.env or writes_replies(cfg))


def asked(cfg: Config, source: str) -> EvalSampling:
    """How tasks with this label are asked."""
    own = cfg.eval.sources.get(source)
    if own is None:
        return EvalSampling(cfg.eval.samples, eval_sampling(cfg))
    return EvalSampling(own.samples or cfg.eval.samples, merged(eval_sampling(cfg), own.sampling))


def eval_sampling(cfg: Config) -> SamplingConfig:
    """Greedy with the training limits, and the keys of `eval.sampling` over it."""
    return merged(cfg.rollout.sampling.model_copy(update=GREEDY), cfg.eval.sampling)


def reward_weights(cfg: Config) -> dict[str, float]:
    """What replies are judged by: weights of rewards, by name."""
    chosen = cfg.eval.reward
    if isinstance(chosen, str):
        return {chosen: 1.0}
    return dict(chosen) if chosen else {name: reward.weight for name, reward in cfg.rewards.items()}


def all_asked(cfg: Config) -> dict[str, EvalSampling]:
    """Every way of asking there is, by the section that says it."""
    own = {f"eval.sources.{name}": asked(cfg, name) for name in cfg.eval.sources}
    return {"eval": EvalSampling(cfg.eval.samples, eval_sampling(cfg))} | own


def all_sampling(cfg: Config) -> dict[str, SamplingConfig]:
    """Every way of sampling, by the section that says it: that of training, and those of evaluation."""
    return {"rollout": cfg.rollout.sampling, **{key: how.sampling for key, how in all_asked(cfg).items()}}


def reply_tokens(cfg: Config) -> int:
    """The longest reply that evaluation may ask for; 0 where it asks for none."""
    return max(how.sampling.max_tokens for how in all_asked(cfg).values()) if judges(cfg) else 0


def longest_reply(cfg: Config) -> tuple[int, str]:
    """The most tokens of a reply in training and in evaluation, and the key that says so."""
    asked_for = (reply_tokens(cfg), "eval.sampling.max_tokens")
    return (
        max((cfg.rollout.sampling.max_tokens, "rollout.sampling.max_tokens"), asked_for)
        if trains(cfg)
        else asked_for
    )


def observation_tokens(cfg: Config) -> int:
    """The most tokens of an environment in one rollout; 0 without one."""
    return cfg.rollout.env.observation_tokens if cfg.rollout.env else 0


def tokens_after_prompt(cfg: Config, max_tokens: int) -> int:
    """The most tokens of a rollout after its prompt, if sampling.max_tokens is max_tokens."""
    env = cfg.rollout.env
    if env is None:
        return max_tokens
    sampled = max_tokens * (env.max_turns if env.max_tokens_per == "turn" else 1)
    most = sampled + env.observation_tokens
    return min(most, env.tokens_after_prompt or most)


def total_tokens(cfg: Config, max_tokens: int) -> int | None:
    """The most tokens of a rollout with its prompt, where the config limits them together."""
    env, limits = cfg.rollout.env, [cfg.data.max_total_tokens]
    if env is not None and env.input_tokens is not None:
        limits.append(env.input_tokens + max_tokens)
    return min((limit for limit in limits if limit is not None), default=None)


def longest_rollout(cfg: Config) -> int:
    """The most tokens of a rollout with its prompt."""
    reply, _ = longest_reply(cfg)
    longest = cfg.data.max_prompt_tokens + tokens_after_prompt(cfg, reply)
    return min(longest, total_tokens(cfg, reply) or longest)


def merged(base: SamplingConfig, over: SamplingConfig | None) -> SamplingConfig:
    """The keys that `over` gives, over those of `base`."""
    return base.model_copy(update={k: getattr(over, k) for k in over.model_fields_set}) if over else base


# ---------------------------------------------------------------- what cannot work


def eval_problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) of one stage."""
    yield from _reward_problems(cfg)
    for key, how in all_asked(cfg).items() if judges(cfg) and cfg.rollout.env is None else ():
        if how.samples > 1 and how.sampling.temperature == 0:
            yield (
                f"{key}.samples",
                f"{how.samples} greedy replies to a task are all the same; set {key}.sampling.temperature, "
                f"or {key}.samples to 1",
            )
    for name, own in cfg.eval.sources.items() if cfg.rollout.engine in SERVED else ():
        if own.sampling is not None and own.sampling.stop:
            yield f"eval.sources.{name}.sampling.stop", NO_STOP.format(f"eval.sources.{name}")
    names = [source.name for source in cfg.data.eval]
    if cfg.data.eval and all(names) and not any(source.label for source in cfg.data.eval):
        for name in cfg.eval.sources:
            if name not in names:
                known = ", ".join(map(str, names))
                yield f"eval.sources.{name}", f"no source of data.eval has this name; they are: {known}"


def _reward_problems(cfg: Config) -> Iterator[tuple[str, str]]:
    chosen = cfg.eval.reward
    for name in reward_weights(cfg):
        if name not in cfg.rewards:
            there = ", ".join(cfg.rewards) or "there are none"
            yield "eval.reward", f"'{name}' is not among rewards: {there}{near(name, cfg.rewards)}"
    if isinstance(chosen, dict) and chosen and not any(chosen.values()):
        yield "eval.reward", "every weight is 0, so no reply could be better than another"

"""Problems of rewards: each is either a function or a model, with the keys of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from whet.config.schema import Config, RewardModelConfig


def problems(cfg: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) in the rewards of one stage."""
    for name, reward in cfg.rewards.items():
        at = f"rewards.{name}"
        if (reward.function is None) == (reward.model is None):
            given = "both are given" if reward.function else "neither is given"
            yield at, f"give either function or model.path (a reward model's folder); {given}"
        if reward.function is None and reward.arguments:
            yield f"{at}.arguments", "only a function has arguments, and none is given; leave them out"
        if reward.model is not None:
            yield from ((f"{at}.model.{key}", why) for key, why in _model(reward.model))


def _model(model: RewardModelConfig) -> Iterator[tuple[str, str]]:
    template = model.chat_template
    if model.input == "tokens":
        for key in ("tokenizer", "chat_template"):
            if getattr(model, key) is not None:
                yield (
                    key,
                    "with input=tokens the model reads the tokens of the policy; leave it out, or set input=text",
                )
    elif template and "{" not in template and not Path(template).expanduser().is_file():
        yield (
            "chat_template",
            f"'{template}' is neither a file nor a template (it has no Jinja '{{'); give the text or a path",
        )

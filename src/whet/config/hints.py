"""What a form needs to know about a key beyond its type: a short title, the unit, and whether beginners see it."""

from __future__ import annotations

from whet.config.keys import column

WORDS = {
    "ddof": "degrees of freedom",
    "dir": "folder",
    "dppo": "DPPO",
    "aipo": "AIPO",
    "coef": "weight",
    "eps": "epsilon",
    "eos": "end token",
    "ffn": "feed-forward",
    "gspo": "GSPO",
    "init": "initial",
    "kl": "KL",
    "kv": "KV",
    "lam": "lambda",
    "lb": "lower bound",
    "lora": "LoRA",
    "lr": "learning rate",
    "nll": "NLL",
    "opmd": "OPMD",
    "pissa": "PiSSA",
    "ppo": "PPO",
    "cov": "covariance",
    "cispo": "CISPO",
    "rec": "REC",
    "rslora": "rsLoRA",
    "rope": "RoPE",
    "sapo": "SAPO",
    "std": "standard deviation",
    "topr": "TOPR",
    "ub": "upper bound",
}
"""Parts of a key's name, written out."""

SUFFIXES = {
    "_tokens": "tokens",
    "_rollouts": "rollouts",
    "_steps": "steps",
    "_interval": "steps",
    "_s": "s",
    "_mb": "MiB",
    "_ratio": "fraction",
    "_rate": "fraction",
}
"""Units by the end of a key's name."""

SHOWN = ("_s", "_mb")
"""Suffixes that the title leaves out: the form shows the unit next to the value."""

UNITS = column("unit")
"""Units that the name of the key does not show."""

BEGINNER = frozenset(column("level"))
"""Keys of the beginner's form; all other keys are for experts."""


def title(name: str) -> str:
    """A key's name as a short title: 'max_prompt_tokens' is 'Max prompt tokens', 'timeout_s' is 'Timeout'."""
    for suffix in SHOWN:
        name = name.removesuffix(suffix)
    text = " ".join(WORDS.get(word, word) for word in name.split("_"))
    return text[:1].upper() + text[1:]


def unit(key: str) -> str | None:
    """The unit of a key's value; None where it has none, or where only the description gives it."""
    ends = (unit for suffix, unit in SUFFIXES.items() if key.endswith(suffix))
    return UNITS.get(key) or next(ends, None)


def level(key: str) -> str:
    return "beginner" if key in BEGINNER else "expert"

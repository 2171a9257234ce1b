"""An unquoted scalar -> its value: as native files mean it, as foreign files do, and as Hydra's command line does.

A native file is YAML 1.2 by its core rules. Foreign files are read by OmegaConf, which is PyYAML with its rules of
YAML 1.1 (`no` is false, 0x1F and 1_000 and 1:30 are numbers, 010 is eight), without dates, and with 1e-6 a number.
All raise ValueError for a number beyond 64 bits (infinity is written .inf).
"""

from __future__ import annotations

import re
from math import isinf

import yaml

from whet.types import Json

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_MOST_DIGITS = 19
"""Of a whole number: what 64 bits hold."""


def scalar(text: str) -> Json:
    """By the core rules of YAML 1.2: null, boolean, number, or the text itself. ValueError also for 010, which is ten
    by these rules and eight by those of 1.1."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        if _LEADING_ZERO.fullmatch(text):
            raise ValueError(
                f"{text[:40]} begins with 0: a decimal number in YAML 1.2, an octal one in YAML 1.1; write it without "
                "the 0, or quote it if it is text"
            )
        return _whole(text)
    if _FLOAT.fullmatch(text):
        return _finite(float(text.lower().replace(".inf", "inf").replace(".nan", "nan")), text)
    return text


def _whole(text: str) -> int:
    short = len(text) <= 2 * _MOST_DIGITS + 10  # octal has more digits; a long one takes time to read
    number = (int(text, 0) if text[:2] in ("0o", "0x") else int(text)) if short else 2**64
    return _fitting(number, text)


def _fitting(number: int, text: str) -> int:
    if not fits(number):
        raise ValueError(
            f"{text[:20]}{'...' * (len(text) > 20)} is a whole number beyond 64 bits; quote it if it is text"
        )
    return number


def _finite(number: float, text: str) -> float:
    if isinf(number) and "inf" not in text.lower():
        raise ValueError(f"{text[:40]} is beyond 64-bit floating point; infinity is written .inf")
    return number


def fits(number: int) -> bool:
    """Whether a whole number has a place in 64 bits, signed or not."""
    return -(2**63) <= number < 2**64


# ---------------------------------------------------------------- foreign files


class _Rules(yaml.SafeLoader):
    """What an unquoted scalar is in a file that OmegaConf reads."""


_Rules.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] in ("null", "bool", "int", "float")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Rules.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)\Z|\.[0-9]+(_[0-9]+)*([eE][-+][0-9]+)?\Z"
    ),
    list("-+0123456789."),
)


def foreign_scalar(text: str) -> Json:
    """As OmegaConf reads it in a file."""
    if len(text) > 100:
        return scalar(text)  # no number that fits, or text
    rules = _Rules("")
    tag = rules.resolve(yaml.ScalarNode, text, (True, False))
    value = rules.yaml_constructors[tag](rules, yaml.ScalarNode(tag, text))
    if isinstance(value, float):
        return _finite(value, text)
    return _fitting(value, text) if isinstance(value, int) else value


_HYDRA_WHOLE = r"(0|[1-9](_?[0-9])*)"
_HYDRA_POINT = rf"({_HYDRA_WHOLE}\.|{_HYDRA_WHOLE}?\.[0-9](_?[0-9])*)"
_HYDRA_NUMBER = re.compile(
    rf"[-+]?({_HYDRA_WHOLE}|{_HYDRA_POINT}|({_HYDRA_WHOLE}|{_HYDRA_POINT})[eE][-+]?[0-9](_?[0-9])*|inf|nan)",
    re.IGNORECASE,
)
_HYDRA_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}


def hydra_scalar(text: str) -> Json:
    """As Hydra reads it in an override. ValueError also for what is text to Hydra and something else to YAML 1.1 (`no`,
    0x1F, 1:30), by which other programs read their overrides: the one who wrote it may have meant either."""
    if text.lower() in _HYDRA_WORDS:
        return _HYDRA_WORDS[text.lower()]
    if _HYDRA_NUMBER.fullmatch(text):
        bare = text.replace("_", "")
        return _finite(float(bare), text) if re.search("[.eEn]", bare, re.IGNORECASE) else _whole(bare)
    other = foreign_scalar(text)
    if text and other != text:
        meant = "null" if other is None else str(other).lower()
        raise ValueError(
            f"{text} is text to Hydra, and {meant} to YAML 1.1; write {meant}, or quote it if it is text"
        )
    return other

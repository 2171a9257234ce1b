"""Checks of a tokenizer's files before they are used: they must not make a text grow without bound.

tokenizer.json is a small program. A `Replace` that puts many characters in the place of one, several of them after one
another, makes gigabytes of a word, in code that cannot be interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from whet.inputs import read_json_object
from whet.types import ConfigError, Json

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
MOST_GROWTH = 1000.0
"""Limit of the characters that one character may become."""
MOST_TOKENS = 2**24
"""Ids of tokens are below this."""


def check_files(folder: Path) -> None:
    """Raise ConfigError for a file that is none, is no JSON object, or would blow a text up."""
    for name in FILES:
        if (folder / name).exists():
            found = read_json_object(folder / name, ConfigError)
            if name == "tokenizer.json":
                _check_program(found, folder / name)


def _check_program(found: dict[str, Json], file: Path) -> None:
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = math.prod(map(_growth, _steps(found.get(part))))
        if growth > MOST_GROWTH:
            raise ConfigError(
                f"{file}: its {part} can turn one character into {growth:.3g}, limit {MOST_GROWTH:g}; the "
                "file is damaged or malicious"
            )
    for step in _steps(found.get("decoder")):
        if isinstance(pattern := step.get("pattern"), dict) and "Regex" in pattern:
            raise ConfigError(
                f"{file}: its decoder has the expression {str(pattern['Regex'])[:60]!r}; decoders of models replace "
                "plain texts, and an expression may try for hours. Use the file that belongs to the model"
            )
    tokens = found.get("added_tokens")
    for token in tokens if isinstance(tokens, list) else ():
        number = token.get("id") if isinstance(token, dict) else None
        if isinstance(number, int) and not 0 <= number < MOST_TOKENS:
            raise ConfigError(f"{file}: an added token has the id {number}; expected 0 to {MOST_TOKENS - 1}")


def _steps(value: Json) -> Iterator[dict[str, Json]]:
    """The steps of a normalizer, pre-tokenizer or decoder, those inside of sequences among them."""
    if isinstance(value, dict):
        yield value
        for inside in value.values():
            yield from _steps(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _steps(inside)


def _growth(step: dict[str, Json]) -> float:
    """Characters that a step may make of one."""
    content = step.get("content", step.get("prepend", ""))
    if not isinstance(content, str) or step.get("type") not in ("Replace", "Prepend"):
        return 1.0
    pattern = step.get("pattern")
    given = pattern.get("String", "") if isinstance(pattern, dict) else ""
    if isinstance(given, str) and given:
        return max(1.0, len(content) / len(given))
    return 1.0 + len(content)

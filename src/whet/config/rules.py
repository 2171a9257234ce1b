"""The table of rules over keys, and what it says of one stage's config.

`rules.tsv` has a line for each rule; `#` begins a comment. The columns:

    rule     read: something reads the keys only when the condition holds; otherwise a key that is set is refused, and
             a form hides it. acts: the same of settings of an algorithm, whose defaults, and false, may stand there
             though nothing reads them. refused: these values do not go together; the error stands at the key. noted:
             they do, with a consequence that a user should know; a note. where: a name for a condition.
             computed: a check in Python over these keys; the condition is overrides that break it (`constraints`)
    keys     one dotted key, or `section: name name`; `*` stands for any entry of a list or any name, a section for all
             keys in it
    when     the condition, in the words of `conditions`. Names without a section are facts (`facts.NAMED`) or settings
             (`loss.clip_low`); names in capitals are conditions of lines before, or lists (`LISTS`)
    message  why nothing reads the keys where the condition does not hold; of `refused` the error, of `noted` the
             note. Values may stand in it: {cfg.data.order}, {kind} and other facts

A line with a name of `EACH` gives a rule for each name that it stands for. A key without a rule is always read. If a
key has several rules, the first one that does not hold gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whet.config.chosen import unread_settings
from whet.config.conditions import Condition, met, no, parsed, subjects
from whet.config.engines import SERVED
from whet.config.facts import named
from whet.config.functions import LOSSES
from whet.config.learning import READS
from whet.config.recipes import FUNCTIONS, Resolved, choices
from whet.config.schema import Config
from whet.config.trackers import TRACKERS
from whet.tables import lines


@dataclass(frozen=True)
class Rule:
    """What is said of keys where a condition holds."""

    keys: tuple[str, ...]
    when: Condition
    message: str
    level: Literal["unused", "refused", "noted"]
    """unused: nothing reads the keys. refused: these values do not go together. noted: they have a consequence."""
    default_passes: bool = False
    """unused: their defaults, and false, may stand there."""


EACH: Mapping[str, Sequence[str]] = {
    "OPTIMIZER": ("train.optimizer", "critic.optimizer"),
    "LORA": ("model.lora", "critic.lora"),
    "MICRO_BATCH": ("train.micro_batch", "train.forward_micro_batch", "critic.micro_batch"),
    "TRACKER": tuple(TRACKERS),
}
"""Names for which a line is read several times."""

LISTS: Mapping[str, Sequence[str]] = {
    "SERVED": SERVED,
    "WHOLE": [name for name, row in LOSSES.items() if row.whole_replies],
    "PAIRS": [name for name, row in LOSSES.items() if row.pairs],
    "SAMPLED_ANCHOR": [name for name, row in LOSSES.items() if row.anchor == "sampled"],
    **{f"WITH_{key.upper()}": [kind for kind, read in READS.items() if key in read] for key in READS["wsd"]},
}
"""Values that follow from other tables: engines that are servers, losses with one number per reply or per pair, losses
whose ratio is to the policy that sampled, and the types of schedule that read a key."""


def _table() -> Iterator[Rule]:
    defined: dict[str, Condition] = {}
    for line in lines("whet.config", "rules.tsv"):
        if line["rule"] == "where":
            defined[line["keys"]] = parsed(line["when"], defined, LISTS)
        elif line["rule"] != "computed":
            yield from (_rule(each, defined) for each in _several(line))


def _several(line: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """The line for each name that a name of `EACH` stands for."""
    name = next((name for name in EACH if name in line["keys"]), "")
    for one in EACH.get(name, [""]):
        yield {column: said.replace(name, one) if name else said for column, said in line.items()}


def _rule(line: Mapping[str, str], defined: Mapping[str, Condition]) -> Rule:
    section, _, names = line["keys"].rpartition(": ")
    keys = tuple(f"{section}.{name}" if section else name for name in names.split())
    when = parsed(line["when"], defined, LISTS)
    if line["rule"] in ("refused", "noted"):
        return Rule(keys, when, line["message"], line["rule"])  # type: ignore[arg-type]
    return Rule(keys, no(when), line["message"], "unused", line["rule"] == "acts")


RULES: tuple[Rule, ...] = tuple(_table())
UNUSED = tuple(rule for rule in RULES if rule.level == "unused")
REFUSED = tuple(rule for rule in RULES if rule.level == "refused")
NOTED = tuple(rule for rule in RULES if rule.level == "noted")


def unused(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str, bool]]:
    """(key or section, with * for any name or number; why nothing reads it; whether its default passes) in a stage."""
    for at, made in choices(cfg).items():
        yield from ((key, why, False) for key, why in unread_settings(at, made, FUNCTIONS[at]))
    known = named(cfg, algorithm)
    for rule in UNUSED:
        if met(rule.when, cfg, known):
            message = _filled(rule, cfg, known)
            yield from ((key, message, rule.default_passes) for key in rule.keys)


def refused(cfg: Config, algorithm: Resolved | None) -> Iterator[tuple[str, str]]:
    """(key, what does not go with it) in a stage. Without an algorithm, rules that look at it are left out."""
    yield from _met(REFUSED, cfg, algorithm)


def notes(cfg: Config, algorithm: Resolved) -> Iterator[tuple[str, str]]:
    """(key, its consequence) in a stage."""
    yield from _met(NOTED, cfg, algorithm)


def _met(rules: Sequence[Rule], cfg: Config, algorithm: Resolved | None) -> Iterator[tuple[str, str]]:
    known = named(cfg, algorithm) if algorithm is not None else {}
    for rule in rules:
        unknown = algorithm is None and any(kind == "condition" for kind, _ in subjects(rule.when))
        if not unknown and met(rule.when, cfg, known):
            yield rule.keys[0], _filled(rule, cfg, known)


def _filled(rule: Rule, cfg: Config, known: Mapping[str, Any]) -> str:
    return rule.message.format_map({"cfg": cfg, **known})


def visible_when(path: Sequence[str]) -> Condition | None:
    """When something reads a key: all rules on it and on the sections around it. None: always."""
    above = {".".join(path[:n]) for n in range(1, len(path) + 1)}
    found = [no(rule.when) for rule in UNUSED if above & set(rule.keys)]
    return None if not found else found[0] if len(found) == 1 else {"all": found}

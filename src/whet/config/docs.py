"""docs/config.md, made from the schema: `python -m whet.config.docs > docs/config.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from whet.config.conditions import in_words, no
from whet.config.explain import default_of
from whet.config.facts import NAMED
from whet.config.keys import ASIDES, TABLES, Key, Path, dotted, inside, keys, settings_of
from whet.config.rules import NOTED, REFUSED, UNUSED, Rule
from whet.config.schema import Section
from whet.dialects.report import cell, table

INTRO = """\
# Configuration

Generated from `src/whet/config/schema.py` by `python -m whet.config.docs`; `whet explain KEY` prints the same.

A config is a YAML, JSON or TOML file. Keys that it leaves out have the defaults below. `null` means that
the value is derived, which `whet plan FILE` prints, or that there is none; the meaning of the key says which.

- **Booleans** are `true` and `false` (YAML 1.2): `off`, `yes` and `on` are text. `1e-6` is a number, and
  `010` is refused. `"8"` is text and is refused where a number is expected. A duplicate key is refused.
- **Overrides** follow the file on the command line: `train.steps=5`, `data.eval.0.limit=10`,
  `stages.sft.train.steps=5`. The value is YAML: `rollout.sampling.stop=["###"]`. Sections are merged, lists
  replaced.
- **References**: `${train.steps}` stands for another value, defaults included; `${oc.env:NAME,default}` for
  an environment variable, as text (`${oc.decode:${oc.env:NAME}}` makes it a number); `\\${` for a literal `${`.
- **Stages** run one after the other. A stage inherits the whole config, and its own keys override it.
  A stage that sets a different `algorithm.name` does not inherit the other `algorithm` keys. References are
  resolved before stages inherit.
- **Paths** are relative to the directory in which the command runs. Every `path` and `chat_template` may be a
  URL (`hf://`, `s3://`, `gs://`, `hdfs://`): it is fetched once, into the folder WHET_CACHE (`~/.cache/whet`).
- **A key that can have no effect is refused**, with the reason: an unknown key, a critic's learning rate
  without a critic, a group size for demonstrations.
- **Editors and forms**: `whet schema` prints all of this as JSON schema, with units, the conditions under which
  a key is read, and the rules between keys.
"""


def markdown() -> str:
    """The whole page: a table for every section, each kind of section once."""
    homes = _homes()
    parts = [INTRO, "## Top level\n", _table((), homes)]
    for key in keys().values():
        if key.section and homes[key.section] == key.path:
            parts += [
                f"{'#' * (1 + len(key.path))} `{dotted(inside(key))}`\n",
                f"{cell(key.section.__doc__ or '')}\n",
            ]
            twins = [k for k in keys().values() if k.section is key.section and k.path != key.path]
            also = [f"`{dotted(inside(k))}`" for k in twins if k.path[-1] != "*"]
            if also:
                parts.append(f"The same keys: {', '.join(also)}.\n")
            parts.append(_table(inside(key), homes))
    for path in TABLES:
        parts += [f"## Settings of `{dotted(path)}`\n", _settings(path)]
    parts += [
        "## When a key is read\n",
        READ,
        _read_when(),
        _facts(),
        "## Combinations that are refused\n",
        REFUSALS,
        _of_rules(("key", "refused when", "error"), REFUSED),
        "Combinations that are allowed, with a note before the run:\n",
        _of_rules(("key", "noted when", "note"), NOTED),
    ]
    return "\n".join(parts)


READ = """\
Other keys are always read. A line on a section applies to every key in it; a key in two lines needs both. Names
without a dot are facts derived from the config; they are explained below the table.
"""
REFUSALS = """\
Rules over several keys, with the error. `{...}` stands for a value. Further checks, which need a
computation or facts about this machine, run when the config is loaded.
"""


def _read_when() -> str:
    rows = ((", ".join(f"`{key}`" for key in rule.keys), in_words(no(rule.when))) for rule in UNUSED)
    return table(("keys", "read only when"), ([cell(said) for said in row] for row in rows))


def _facts() -> str:
    return table(("fact", "meaning"), ((f"`{name}`", cell(said)) for name, (said, _) in NAMED.items()))


def _of_rules(titles: Sequence[str], rules: Sequence[Rule]) -> str:
    return table(
        titles,
        (
            (f"`{rule.keys[0]}`", cell(in_words(rule.when)), cell(rule.message.replace("{cfg.", "{")))
            for rule in rules
        ),
    )


def _settings(path: Path) -> str:
    """What each function does that a key may name, and a row for each of its settings."""
    rows = (
        (
            f"`{name}`" if n == 0 else "",
            f"`{key.path[-1]}`",
            cell(key.words),
            f"`{cell(default_of(key))}`",
            cell(key.description),
        )
        for name, has in settings_of(path)
        for n, key in enumerate(has)
    )
    meanings = table(
        ("function", "meaning"), ((f"`{n}`", cell(row.about)) for n, row in TABLES[path].items())
    )
    settings = table(("function", "setting", "type", "default", "meaning"), rows)
    return f"{meanings}\n{settings}"


def _homes() -> dict[type[Section], tuple[str, ...]]:
    """Where each kind of section is documented: at its first place that is not an aside."""
    found: dict[type[Section], tuple[str, ...]] = {}
    for key in sorted(keys().values(), key=lambda k: k.path[0] in ASIDES):
        if key.section and key.path[-1] != "*":
            found.setdefault(key.section, key.path)
    return found


def _table(above: tuple[str, ...], homes: dict[type[Section], tuple[str, ...]]) -> str:
    own = (key for key in keys().values() if key.path[:-1] == above and key.path[-1] != "*")
    return table(
        ("key", "type", "default", "meaning"),
        (
            (f"`{key.path[-1]}`", _type(key, homes), cell(_code(default_of(key))), cell(key.description))
            for key in own
        ),
    )


def _code(default: str) -> str:
    return default if default in ("", "required") else f"`{default}`"


def _type(key: Key, homes: dict[type[Section], tuple[str, ...]]) -> str:
    if key.section is None:
        return cell(key.words)
    home = dotted(inside(keys()[homes[key.section]]))
    anchor = "".join(c for c in home.lower() if c.isalnum() or c in "_-")
    what = "sections" if (*key.path, "*") in keys() else "section"
    return f"[{what}](#{anchor})"


if __name__ == "__main__":
    sys.stdout.write(markdown())

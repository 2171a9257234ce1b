"""docs/from_*.md, made from the dialects' tables: `python -m whet.dialects.docs [FOLDER]`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from whet.config.faults import shown
from whet.dialects.listing import what_happens
from whet.dialects.report import cell, table
from whet.dialects.row import BaseDefault, Row, Status, aliases, base_defaults, unbuilt
from whet.dialects.tables import TABLES, every_line
from whet.dialects.versions import DOCUMENTS, VERSIONS, span

PAGES = {
    "from_verl.md": (
        "verl",
        ("verl-ppo", "verl-megatron-optim", "verl-eval", "verl-sft", "verl-generation", "verl-server"),
    ),
    "from_skyrl.md": ("SkyRL", ("skyrl", "skyrl-sft")),
    "from_cosmos.md": ("Cosmos-RL", ("cosmos-grpo", "cosmos-sft")),
    "from_trinity.md": ("Trinity-RFT", ("trinity", "trinity-verl")),
}
"""Page -> (the system, its tables)."""

ABOUT = {
    "verl-generation": "Files of `main_generation`, until 0.7.0: `whet generate FILE` runs them.",
    "verl-server": "What `main_generation_server` reads of a verl-ppo file, since 0.6.0. `whet generate FILE` runs it; "
    "its other keys may stand there, unread as in verl. A file is recognised by `data.output_path`.",
}
"""What a table is for, where it is not the training of a policy."""

INTRO = """\
# From {system}

Generated from the tables in `src/whet/dialects` by `make docs`; `whet keys --dialect {first}` prints the same.

This page lists every documented key of {system}, with its native keys, default and meaning. `whet train FILE` runs a
config of {system} unchanged. `whet convert FILE` writes it as a native one. Every key has one of these statuses:

| status | what happens |
|---|---|
| mapped | The value is passed to one native key of the same meaning. |
| translated | Native keys are computed from it and other keys. |
| derived | It follows from other keys; a value that contradicts them is refused. |
| coming | Its feature is not built yet: a value that would turn it on is refused. |
| refused | whet will not support it; the reason names what to write instead. |

An unknown key is refused. A key that is left out has the default of the system's documentation, given below. A key
that is only read with some settings has no effect with others, whatever its value.

A file is read as one release of {system}. `--dialect {system_name}@VERSION` selects it. Otherwise it is the release
that has most of the file's keys. If several have as many, it is {document} (the release of the configuration reference)
if that is one of them, else the newest. Defaults and meanings differ between releases, and so do results: if the file's
keys do not determine the release, the report before a run names the native keys that depend on it. Releases that are
read: {releases}.

`whet convert FILE --prove` compares whet's reading of a file with the installed package of {system}: batch sizes,
steps, learning rates, KL, and advantages and losses of random batches, by {system}'s own code. It prints a table, and
exits with 1 if a row differs without a note, or cannot be compared.
"""


def page(name: str) -> str:
    """One page of `PAGES`."""
    system, tables = PAGES[name]
    key = TABLES[tables[0]][0]
    names = {"first": tables[0], "system_name": key, "document": DOCUMENTS[key]}
    intro = INTRO.format(system=system, releases=", ".join(VERSIONS[key]), **names)
    parts = [intro, "## Counts\n", _counts(tables)]
    for each in tables:
        parts += [f"## {each}\n", *([f"{ABOUT[each]}\n"] if each in ABOUT else [])]
        parts += [*_sections(every_line(each), TABLES[each][0])]
    if others := base_defaults(key):
        rows = [(f"`{one.file}`", _of(one), f"`{cell(shown(one.default))}`") for one in others]
        parts += ["## Defaults of other documents\n", OTHERS, table(("document", "key", "default"), rows)]
    renamed = aliases(TABLES[tables[0]][0], [TABLES[each][1] for each in tables])
    if renamed:
        rows = [(f"`{old}`", f"`{new}`", cell(note)) for old, (new, note) in renamed.items()]
        parts += ["## Other names\n", table(("in the file", "read as", ""), rows)]
    return "\n".join(parts)


OTHERS = "Some files extend another document than that of the tables above. Its defaults are then these.\n"


def _of(one: BaseDefault | Row) -> str:
    return f"`{one.key}`" + (f" {span(one.since, one.until)}" if one.since or one.until else "")


def _counts(tables: Sequence[str]) -> str:
    statuses = get_args(Status)
    rows = []
    for name in tables:
        found = Counter(row.status for row in every_line(name))
        keys = len({row.key for row in every_line(name)})
        rows.append([name, str(keys), *(str(found[status]) for status in statuses)])
    return table(("table", "keys", *statuses), rows)


def _sections(rows: Sequence[Row], system: str) -> Iterator[str]:
    """A table for each section, its keys in the order of the code."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(".".join(row.key.split(".")[:-1][:2]), []).append(row)
    for section, keys in found.items():
        yield f"### `{section}`\n" if section else "### Top level\n"
        titles = ("key", "default", "status", "native", "what happens")
        yield table(titles, (_row(row, system) for row in keys))


def _row(row: Row, system: str) -> tuple[str, ...]:
    native = ", ".join(f"`{name}`" for name in row.native)
    return _of(row), f"`{cell(shown(row.default))}`", row.status, native, cell(_what(row, system))


def _what(row: Row, system: str) -> str:
    """What happens, and the documented values that are refused."""
    values = unbuilt(system).get(row.key, ())
    return what_happens(row, system) + (f" Not built: {'; '.join(values)}." if values else "")


def main(folder: Path) -> None:
    """Write every page into a folder."""
    for name in PAGES:
        (folder / name).write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))

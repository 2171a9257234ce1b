"""What is known of a key beside its type and meaning: the lines of `keys.tsv`, one for each key of which something is.

key     a dotted key, `*` for any entry or name; what is said of a section is said of all keys in it
resume  what a change of it means for a run that resumes: its class in `resuming`
unit    of its value, where the end of its name does not say it (`hints.SUFFIXES`)
level   beginner: the beginner's form shows it
names   what other frameworks call it
"""

from __future__ import annotations

from whet.tables import lines

ROWS = {line["key"]: line for line in lines("whet.config", "keys.tsv")}


def column(name: str) -> dict[str, str]:
    """A column by key, where it says something."""
    return {key: row[name] for key, row in ROWS.items() if row[name]}

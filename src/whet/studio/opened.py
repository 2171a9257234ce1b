"""What the studio opens and writes: native YAML as it is, everything else as native YAML with a report."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.faults import shown
from whet.config.load import SCRIPT, SUFFIXES, Loaded, load
from whet.config.parse import parse
from whet.dialects.convert import native_yaml
from whet.dialects.recognise import recognise
from whet.dialects.report import counts, summary
from whet.dialects.tables import NATIVE
from whet.dialects.translate import ReportLine
from whet.inputs import MOST_CONFIG_BYTES, read_text
from whet.track.files import write_text
from whet.types import ConfigError, Json

OWN = (".yaml", ".yml")
"""Endings of the files that the studio edits."""


class IsThere(ConfigError):
    """A file would be overwritten that is not the one that was opened."""


@dataclass(frozen=True)
class Opened:
    """A text in the studio."""

    text: str
    path: str
    """Where it would be saved, relative to the folder of the studio."""
    digest: str = ""
    """Of the file with this text; '' where it is not saved yet."""
    report: dict[str, Any] | None = None
    """What became of each key of another system's file."""


@dataclass(frozen=True)
class WorkingFolder:
    """The folder in which the studio was started: it opens and writes files in it alone, and the file it was given."""

    root: Path
    file: Path | None = None

    def find(self, path: str) -> Path:
        """A path that the page names. ConfigError for one outside, also by a link."""
        if not path.strip() or not path.isprintable():
            raise ConfigError(f"{path!r}: expected the path of a file")
        found = (self.root / path).resolve()
        if found == (self.file and self.file.resolve()) or found.is_relative_to(self.root.resolve()):
            return found
        raise ConfigError(
            f"{path} is outside of {self.root}, where the studio was started; start it in another folder, or give it "
            "the file: whet studio FILE"
        )

    def name(self, path: Path) -> str:
        """A path as the page shows it: relative to the folder if it is inside."""
        found, root = path.resolve(), self.root.resolve()
        return str(found.relative_to(root) if found.is_relative_to(root) else found)

    def open(
        self, path: str, dialect: str | None = None, *, here: bool = True, script: bool = False
    ) -> Opened:
        """A file of the folder. here: a file of another system is fitted to this machine, else it keeps its layout.
        script: it may be a launch script, which runs in a sandbox."""
        found = self.find(path)
        if found.suffix == SCRIPT:
            if not script:
                raise ConfigError(
                    f"{path}: the page cannot run launch scripts; start `whet studio {path}`, or convert it: whet "
                    f"convert {path} -o native.yaml"
                )
            return self._translated(load(found, dialect=dialect, here=here), found)
        if found.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
        text = read_text(found, ConfigError, most=MOST_CONFIG_BYTES)
        made = self.imported(str(path), text, dialect, here=here)
        saved = made.report is None and found.suffix in OWN
        return Opened(text, self.name(found), digest(text)) if saved else made

    def imported(self, name: str, text: str, dialect: str | None = None, *, here: bool = True) -> Opened:
        """A text that was uploaded, or read from a file of this name. What is native YAML stays as it is, with comments
        and mistakes. Raises ConfigError with every problem of another system's file."""
        path = Path(name)
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{name}: expected a file that ends in {', '.join(SUFFIXES)}")
        if len(text.encode(errors="replace")) > MOST_CONFIG_BYTES:
            raise ConfigError(f"{name} has more than {MOST_CONFIG_BYTES >> 20} MiB; is it the right file?")
        parsed = parse(text, toml=path.suffix == ".toml")
        native = not isinstance(parsed.tree, dict) or recognise(parsed.tree, dialect) == NATIVE
        if native and path.suffix in OWN:
            return Opened(text, path.name)
        return self._translated(load(path, dialect=dialect, here=here, text=text), path)

    def _translated(self, loaded: Loaded, path: Path) -> Opened:
        name = f"{path.stem}.native.yaml" if loaded.translation else f"{path.stem}.yaml"
        return Opened(native_yaml(loaded), name, report=_report(loaded))

    def save(self, path: str, text: str, known: str) -> Opened:
        """Write a file in one rename. known: digest of the file that may be overwritten; IsThere for another one."""
        found = self.find(path)
        if found.suffix not in OWN:
            raise ConfigError(f"{path}: the name of a config ends in {' or '.join(OWN)}")
        if found.exists():
            there = digest(read_text(found, ConfigError, most=MOST_CONFIG_BYTES))
            if there != known:
                raise IsThere(there)
        if not found.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {found.parent}")
        write_text(found, text)
        return Opened(text, self.name(found), digest(text))


def digest(text: str) -> str:
    """Another one for another text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _report(loaded: Loaded) -> dict[str, Any] | None:
    made = loaded.translation
    if made is None:
        return None
    return {
        "dialect": made.dialect,
        "version": made.version,
        "counts": dict(counts([line for line in made.lines if line.given])),
        "summary": [*summary(made).split("\n  "), *loaded.notes],
        "lines": list(map(_line, made.lines)),
    }


def _line(line: ReportLine) -> dict[str, Json]:
    return {
        "key": line.key,
        "value": shown(line.value),
        "given": line.given,
        "status": line.status,
        "native": list(line.native),
        "said": "; ".join(text for text in (line.note, line.reason) if text),
        "differs": line.differs,
    }

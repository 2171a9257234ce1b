"""`make test-releases`: the default document of each release that whet reads, translated.

The whole document, with what a user must give, is read as it is and as its release; then the file of a user who gives
nothing else, as that release. No key may be unknown or of another release, and all three must be the same natively:
then the defaults of whet's tables are those of the release. `python -m peers.releases [SYSTEM [RELEASE]]`; packages are
kept in the folder RELEASES, if that is set. Exit status 1 for an unknown key or an undocumented difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from peers.documents import DOCUMENTS, Document
from peers.repositories import REPOSITORIES, checkout
from whet.config.keys import dotted
from whet.config.load import Loaded, load
from whet.config.plan import plans
from whet.config.tree import leaves
from whet.dialects.versions import VERSIONS
from whet.prove.peers import PACKAGES
from whet.types import ConfigError, Json

TAGS = {
    ("verl", "main"): (REPOSITORIES["verl"].commit, "verl"),
    ("skyrl", "main"): (REPOSITORIES["skyrl"].commit, "skyrl"),
    ("skyrl", "doc"): ("bafdbb5", "skyrl-train/skyrl_train"),
    **{
        ("skyrl", f"train-{number}"): (f"skyrl_train-v{number}.0", "skyrl-train/skyrl_train")
        for number in ("0.1", "0.2", "0.3", "0.4")
    },
}
"""Releases that are not on the package index: a commit of the repository, and the folder of the package there."""


def package(system: str, version: str, place: Path) -> Path:
    """The folder of a release's package; it is fetched if it is not there."""
    folder = place / f"{PACKAGES[system]}-{version}"
    if folder.is_dir():
        return folder
    if (system, version) in TAGS:
        commit, under = TAGS[system, version]
        checkout(system, under, folder, commit)
        return folder
    with tempfile.TemporaryDirectory() as wheels:
        number = f"{version}.0" if version.count(".") == 1 else version
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, f"{PACKAGES[system]}=={number}", "--dest", wheels], check=True)
        (wheel,) = Path(wheels).iterdir()
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    return folder


# ---------------------------------------------------------------- files


def put(tree: Json, given: Mapping[str, Json]) -> dict[str, Json]:
    """A tree with these values at their dotted keys."""
    out = dict(tree) if isinstance(tree, dict) else {}
    for key, value in given.items():
        first, _, rest = key.partition(".")
        out[first] = put(out.get(first), {rest: value}) if rest else value
    return out


def without_nulls(value: Json) -> Json:
    """TOML has none."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def written(tree: dict[str, Json], system: str, place: Path) -> Path:
    """A file of the system."""
    if system == "cosmos":
        file, text = place / "document.toml", tomli_w.dumps(without_nulls(tree))
    else:
        file, text = place / "document.json", json.dumps(tree)
    file.write_text(text, encoding="utf-8")
    return file


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What whet makes of a file."""

    version: str = ""
    """The release that it is read as; '' if it is refused."""
    native: Mapping[str, Json]
    """The config by dotted key."""
    said: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    """Keys that the release does not have, by whet's tables."""
    """Why it is refused or not planned, and which features are not built."""


STANDS_FOR = {"reference.path": "model.path", "train.temperature": "rollout.sampling.temperature"}
"""Native keys whose null stands for the value of another."""


def read(tree: dict[str, Json], system: str, dialect: str, place: Path) -> Reading:
    file = written(tree, system, place)
    try:
        loaded = load(file, dialect=dialect, here=False, rehearsal=True)
    except ConfigError as e:
        return Reading(native={}, said=tuple(problems(e)))
    assert loaded.translation is not None
    native = {
        ".".join(map(str, path)): value for path, value in leaves(loaded.config.model_dump(mode="json"))
    }
    for key, other in STANDS_FOR.items():
        native[key] = native.get(other) if native.get(key) is None else native[key]
    missing = tuple(text for _, text in loaded.translation.unbuilt)
    here = {dotted(path) for path, _ in leaves(tree)}  # a reference to a section has all keys of that
    newer = tuple(
        f"{each.key}: {each.note}"
        for each in loaded.translation.lines
        if "does not have it" in each.note and each.key in here
    )
    return Reading(
        version=loaded.translation.version, native=native, said=(*planned(loaded), *missing), newer=newer
    )


def planned(loaded: Loaded) -> tuple[str, ...]:
    """Why a run cannot be planned; an evaluation of replies that are there has no plan."""
    if loaded.config.eval.offline:
        return ()
    trains = loaded.config.track.dump.get("replies") is None
    try:
        plans(loaded, here=False, rehearsal=True, trains=trains)
    except ConfigError as e:
        return tuple(problems(e))
    return ()


def problems(error: ConfigError) -> Iterator[str]:
    """Without their places."""
    told = getattr(error, "problems", None)
    yield from (text for _, text in told) if told else (str(error),)


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one document of a release."""

    release: str
    name: str
    keys: int
    whole: Reading
    unknown: tuple[str, ...]
    differences: tuple[str, ...]
    """Undocumented ones, for people."""
    documented: tuple[str, ...] = ()


TORCHRUN = "the document has no number of GPUs, torchrun says it; the table has the one of another release"
DICTS = "differs.tsv: the column has the text itself"
THINKING = "differs.tsv: the chat template decides"
DOCUMENTED: Sequence[tuple[str, str, str]] = (
    ("verl@0.6.0 sft_trainer_engine", "train.parallel.dp_shard", TORCHRUN),
    ("verl@0.6.1 sft_trainer_engine", "train.parallel.dp_shard", TORCHRUN),
    *(
        ("verl@0.4.0 sft_trainer", f"data.{part}.0.{column}", DICTS)
        for part in ("train", "eval")
        for column in ("prompt", "response")
    ),
    *(
        (f"trinity@{release} Config", key, THINKING)
        for release in ("0.4.0", "0.4.1")
        for key in ("tokenizer.chat_template_kwargs", "tokenizer.chat_template_kwargs.enable_thinking")
    ),
)
"""Differences that stay: how the document's name begins with its release, the native key, why."""


def compare(system: str, version: str, document: Document, place: Path) -> Result:
    """One document."""
    release = f"{system}@{version}"
    whole, least = put(document.tree, document.given), put(document.base, document.given)
    as_it_is = read(whole, system, document.kind, place)
    as_said = read(whole, system, f"{document.kind}@{version}", place)
    minimal = read(least, system, f"{document.kind}@{version}", place)
    differences, documented = [], []
    for which, other in (("detected", as_it_is), ("minimal", minimal)):
        for key, one, two in apart(as_said, other):
            why = next(
                (w for n, k, w in DOCUMENTED if f"{release} {document.name}".startswith(n) and k == key), ""
            )
            found = f"{which}: {key}: {one!r} in the whole document, {two!r}"
            (documented if why else differences).append(f"{found}: {why}" if why else found)
    return Result(
        release=release,
        name=document.name,
        keys=sum(1 for _ in leaves(whole)),
        whole=as_said,
        unknown=(
            *(text for text in as_said.said if "unknown key" in text),
            *(text for text in as_said.newer if text.partition(":")[0] not in document.given),
        ),
        differences=tuple(differences),
        documented=tuple(documented),
    )


def apart(one: Reading, other: Reading) -> Iterator[tuple[str, Json, Json]]:
    """The native keys, or what is said, that differ: (key, value in the one, value in the other)."""
    if bool(one.native) != bool(other.native) or (not one.native and one.said != other.said):
        yield "refusal", list(one.said), list(other.said)
        return
    absent = object()
    for key in dict.fromkeys([*one.native, *other.native]):
        a, b = (each.native.get(key, absent) for each in (one, other))
        if a is absent or b is absent or a != b:
            yield key, *("absent" if each is absent else each for each in (a, b))


def line(result: Result) -> str:
    """For people."""
    state = "refused" if not result.whole.native else "not built" if result.whole.said else "planned"
    head = f"{result.release} {result.name}: {result.keys} keys, {len(result.unknown)} unknown, {state}"
    told = [
        f"  {text}"
        for text in (
            *dict.fromkeys((*result.whole.said, *result.unknown)),
            *result.differences,
            *result.documented,
        )
    ]
    return "\n".join([head, *told])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("system", nargs="?", help="verl, skyrl, trinity or cosmos; all if none is given")
    parser.add_argument("release", nargs="?", help="one of its releases")
    told = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(os.environ.get("RELEASES", folder))
        for system in [told.system] if told.system else DOCUMENTS:
            for version in [told.release] if told.release else VERSIONS[system]:
                for document in DOCUMENTS[system](package(system, version, kept)):
                    result = compare(system, version, document, Path(folder))
                    print(line(result), flush=True)
                    good &= not result.unknown and not result.differences
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

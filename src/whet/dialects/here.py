"""What a foreign file says about devices, made to fit this machine, so that a file for 64 GPUs runs on a laptop too.

Only what the translation wrote is changed; native keys put over it mean what they say. No number depends on any of it
beyond rounding, and the report names what was changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from whet.config import hardware
from whet.config.draft import Draft
from whet.config.keys import Path, dotted
from whet.config.tree import get, origin, path_of
from whet.dialects.idle import without
from whet.dialects.layout import APART, DIMS, native
from whet.dialects.served import OPTIONS, SLEEP
from whet.dialects.served import fit as fit_server
from whet.dialects.translate import ReportLine, Translation
from whet.tables import is_installed
from whet.types import Json

KEYS = (
    *map(native, (*DIMS, "engines", "nodes")),
    *(APART, "train.engine", "train.offload", "train.compile", "profile.tools", "profile.steps"),
    *(OPTIONS, SLEEP),
)
"""Native keys about devices."""

Changes = dict[Path, tuple[Json, str]]
"""Native path: the value here, None where it is left out, and what the report says."""


def fitted(draft: Draft, made: Translation, *, layout: bool = True) -> Translation:
    """Put the sizes of this machine into a draft, overrides in it; returns the report with what was changed.

    layout: else the file keeps its own sizes, and loses only what cannot be on any machine."""
    changes: Changes = {}
    stages = draft.tree.get("stages")
    for at in ((), *(("stages", n) for n in range(len(stages) if isinstance(stages, list) else 0))):
        found = {path: value for path, value in _asked(draft.tree, at) if _is(path, made, draft.origins)}
        changes |= _changes(draft.tree, at, found) if layout else _alone(at, found)
    for path, (value, _) in changes.items():
        if value is not None:
            draft.put(path, value, origin(draft.origins, path))
    draft.tree = without(draft.tree, {path: why for path, (value, why) in changes.items() if value is None})
    return replace(made, lines=tuple(_noted(line, changes) for line in made.lines))


def _asked(tree: dict[str, Json], at: Path) -> Iterator[tuple[Path, Json]]:
    for key in KEYS:
        path = _path(at, key)
        value = get(tree, path)
        if value:
            yield path, value


def _is(path: Path, made: Translation, origins: Mapping[Path, str]) -> bool:
    """The translation's own value, with nothing native over it."""
    return bool(origin(made.origins, path)) and origin(origins, path) == origin(made.origins, path)


def _changes(tree: dict[str, Json], at: Path, found: Mapping[Path, Json]) -> Changes:
    """What becomes of the values that the translation wrote below one stage's path, or at the top."""
    devices = 0 if get(tree, ("machine", "device")) == "cpu" else hardware.cuda_count()
    here = f"this machine has {devices or 'none'}"
    sizes = {dim: found[path] for dim in DIMS if (path := _path(at, native(dim))) in found}
    out: Changes = {}
    if not get(tree, ("cluster", "address")):
        asked, sizes = sizes, fit(sizes, max(devices, 1))
        for dim, size in sizes.items():
            if size != asked[dim]:
                told = f"{native(dim)} is {size}, not {asked[dim]}: it needs GPUs, and {here}"
                out[_path(at, native(dim))] = (size, told)
        out |= _engines(_path(at, native("engines")), found, devices, here)
        several = (machines := hardware.elsewhere()) is not None and machines.count > 1
        if (path := _path(at, native("nodes"))) in found and not several:
            out[path] = (None, "one machine: the cluster is not named (cluster.address)")
        out |= _together(_path(at, APART), found, _ranks(sizes), devices, here)
    out |= _served(_path(at, OPTIONS), _path(at, SLEEP), found, devices, here)
    ranks = _ranks(sizes)
    return out | left_out(at, found, gpu=devices > 0, ranks=ranks, ep=sizes.get("ep", 1))


def _ranks(sizes: Mapping[str, int]) -> int:
    """ep is over neighbours among the others."""
    return math.prod(size for dim, size in sizes.items() if dim != "ep")


def _engines(path: Path, found: Mapping[Path, Json], devices: int, here: str) -> Changes:
    """As many engines as there are GPUs for them; a single one is the trainer's own."""
    if path not in found:
        return {}
    most = min(found[path], devices)
    if most > 1 and not is_installed("ray"):
        return {path: (None, f"one engine, not {found[path]}: ray is not installed")}
    if most == found[path]:
        return {}
    said = f"{max(most, 1)} of {found[path]} engines: each needs a GPU, and {here}"
    return {path: (most if most > 1 else None, said)}


def _served(options: Path, sleep: Path, found: Mapping[Path, Json], devices: int, here: str) -> Changes:
    """A server with the devices that there are."""
    out: Changes = {}
    for name, value, why in fit_server(found.get(options, {}), devices):
        out[*options, name] = (value, f"{why}, and {here}")
    if sleep in found and not devices:
        out[sleep] = (None, f"{SLEEP} is left out: it is about a GPU, and {here}")
    return out


def _together(path: Path, found: Mapping[Path, Json], ranks: int, devices: int, here: str) -> Changes:
    """Models apart share the policy's ranks where there are no GPUs for all."""
    names = found.get(path, ())
    if (needed := ranks * (1 + len(names))) <= devices or not names:
        return {}
    told = (
        f"{' and '.join(names)} on the ranks of the policy: ranks of their own need {needed} GPUs, and {here}"
    )
    return {path: (None, told)}


def left_out(at: Path, found: Mapping[Path, Json], *, gpu: bool, ranks: int, ep: int) -> Changes:
    """What frees or hastens a GPU where there is none, or cannot be done as the models lie here."""
    offload, compiled = _path(at, "train.offload"), _path(at, "train.compile")
    out: Changes = {}
    engine = _path(at, "train.engine")
    if found.get(engine) == "deepspeed" and ranks == 1:
        out[engine] = (None, "train.engine is torch: DeepSpeed shards over ranks, and one process trains")
    if compiled in found and (not gpu or ep > 1):
        why = (
            "it has not been tested with ep"
            if gpu
            else "it is only faster on a GPU, and this machine has none"
        )
        out[compiled] = (None, f"train.compile is left out: {why}")
    if offload in found and not gpu:
        out[offload] = (
            None,
            "train.offload is left out: it frees memory of a GPU, and this machine has none",
        )
    elif ranks == 1:
        out |= _alone(at, found)
    return out | ({} if gpu else _unrecorded(_path(at, "profile.tools"), _path(at, "profile.steps"), found))


def _alone(at: Path, found: Mapping[Path, Json]) -> Changes:
    """Of one process that trains: its policy samples, too, and so is not offloaded."""
    offload = _path(at, "train.offload")
    sizes = {dim: found.get(_path(at, native(dim)), 1) for dim in DIMS}
    if "policy" not in found.get(offload, ()) or _ranks(sizes) != 1:
        return {}
    rest = [name for name in found[offload] if name != "policy"]
    return {
        offload: (rest or None, "the policy stays on the GPU: in one process rollouts are sampled from it")
    }


def _unrecorded(tools: Path, steps: Path, found: Mapping[Path, Json]) -> Changes:
    """Without a GPU: torch's profiler alone."""
    rest = [tool for tool in found.get(tools, ()) if tool == "torch"]
    if tools not in found or rest == list(found[tools]):
        return {}
    told = "only torch's profiler works without a GPU, and this machine has none"
    return {tools: (rest or None, told)} | ({} if rest else {steps: (None, told)} if steps in found else {})


def _path(at: Path, key: str) -> Path:
    return (*at, *key.split("."))


def fit(asked: Mapping[str, int], devices: int) -> dict[str, int]:
    """Sizes that so many devices can have: each the largest divisor of what was asked that there is room for.

    ep is over the neighbours among dp_shard, so it must divide that and takes no device.
    """
    out: dict[str, int] = {}
    for dim in DIMS:
        if dim not in asked:
            continue
        if dim == "ep":
            out[dim] = math.gcd(asked[dim], out.get("dp_shard", 1))
            continue
        out[dim] = max(n for n in range(1, min(asked[dim], devices) + 1) if asked[dim] % n == 0)
        devices //= out[dim]
    return out


def _noted(line: ReportLine, changes: Changes) -> ReportLine:
    """A line with what became of its native keys here."""
    own = [path_of(key, ()) for key in line.native]
    said = [text for at, (_, text) in changes.items() if any(at[: len(path)] == path for path in own)]
    if not said:
        return line
    gone = {dotted(path) for path, (value, _) in changes.items() if value is None}
    return replace(
        line,
        native=tuple(key for key in line.native if key not in gone),
        note="; ".join(text for text in (line.note, *said) if text),
    )

"""Runs of two commits on this machine, compared number by number: what a rebuilding must leave as it was.

    python tests/golden/compare.py BASE [--only NAME]      `make golden BASE=<commit>` runs it

Needs: git, and what `make test` needs. Takes: about ten minutes on two CPU cores. Each case runs twice, by the source
of BASE and by that of the working tree, with the config files of BASE, so that files of before still mean the same.
What is compared is decoded: every number of metrics.jsonl, every column of every row of the rollouts and of the
evaluation, every tensor of the exports. Names that were changed on purpose stand in renames.tsv. Exit code
1 where anything differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FEW = (
    "stages.0.train.steps=6",
    "stages.1.train.steps=6",
    "stages.0.eval.interval=3",
    "stages.1.eval.interval=3",
)
CASES: dict[str, tuple[str, ...]] = {
    "first_run": ("examples/first_run.yaml", *FEW),
    "verl": ("examples/from_verl.yaml", "trainer.total_epochs=1"),
    "skyrl": ("examples/from_skyrl.yaml", "trainer.epochs=1"),
    "cosmos": ("examples/from_cosmos.toml", "train.max_num_steps=4"),
    "trinity": ("examples/from_trinity.yaml", "buffer.total_steps=4"),
    "recipes": ("tests/resume/config.yaml",),
    "lora": ("tests/golden/tiny.yaml", "algorithm.name=grpo", "model.lora.rank=4"),
    "8 bits": (
        "tests/golden/tiny.yaml",
        "algorithm.name=grpo",
        "rollout.quantization=int8",
        "algorithm.correction.weight=token",
    ),
    "experts": ("tests/golden/tiny.yaml", "algorithm.name=gspo", "model.scratch.name=qwen3_moe"),
    "critic": (
        "tests/golden/tiny.yaml",
        "algorithm.name=ppo",
        "algorithm.kl.coef=0.01",
        "train.minibatches=2",
    ),
    "ranks": ("tests/golden/tiny.yaml", "algorithm.name=ppo", "train.parallel.dp_shard=2"),
    "replicas": ("tests/golden/tiny.yaml", "algorithm.name=grpo", "rollout.replicas=2"),
    "overlapped": (
        "tests/golden/tiny.yaml",
        "algorithm.name=dapo",
        "algorithm.max_refills=50",
        "rollout.max_staleness=1",
    ),
    "rounds": (
        "tests/golden/tiny.yaml",
        "algorithm.name=grpo",
        "mode=train",
        "cluster.explorers=2",
        "buffer.url=sqlite:///${run_dir}/groups.db",
    ),
}
"""By name: a file, of BASE where it has it, and overrides, by names that both sides read."""
MODEL = "runs/first_run/export/sft"
"""What the files of other systems train: the model that the first case leaves behind."""

Decoded = dict[str, Any]


def run(tree: Path, configs: Path, case: str, out: Path) -> None:
    """One case by the source of a tree, from the folder of the configs. SystemExit if it fails."""
    file, *given = CASES[case]
    native = not file.startswith("examples/from_")
    target = f"run_dir={out}" if native else f"whet.run_dir={out}"
    at = configs / file if (configs / file).exists() else ROOT / file
    threads = "machine.threads=1" if native else "whet.machine.threads=1"
    done = subprocess.run(
        [sys.executable, "-m", "whet.cli", "train", str(at), *given, target, threads],
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        cwd=configs, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{case}: by {tree} it failed:\n{(done.stdout + done.stderr)[-3000:]}")


def decoded(run_dir: Path) -> Iterator[tuple[str, Any]]:
    """(what, value) of every number, column and tensor of a run."""
    for number, line in enumerate((run_dir / "metrics.jsonl").read_text().splitlines()):
        for name, value in json.loads(line).items():
            yield f"metric {name}, line {number + 1}", value
    for path in sorted(run_dir.rglob("*.parquet")):
        at = path.relative_to(run_dir)
        for name, column in pq.read_table(path).to_pydict().items():  # type: ignore[no-untyped-call]
            yield f"column {name} of {at}", column
    for path in sorted((run_dir / "export").rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            yield f"tensor {name} of {path.relative_to(run_dir)}", tensor.float().tolist()


def table() -> list[dict[str, str]]:
    """The rows of renames.tsv; `old` is empty where a value has come, `new` where it has gone."""
    with (HERE / "renames.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def renames() -> dict[str, str]:
    """'metric old' -> 'metric new', and the same of columns, tensors and files."""
    return {
        f"{row['what']} {row['old']}": f"{row['what']} {row['new']}"
        for row in table()
        if row["old"] and row["new"]
    }


def on_purpose(what: str) -> bool:
    """A value that came or went on purpose."""
    names = [
        f"{row['what']} {row['old'] or row['new']}" for row in table() if not (row["old"] and row["new"])
    ]
    return any(what.startswith((f"{name} of ", f"{name}, line ")) for name in names)


def renamed(what: str, names: Mapping[str, str]) -> str:
    """What a value of the base is called now."""
    for old, new in names.items():
        for end in (" of ", ", line "):
            what = what.replace(f"{old}{end}", f"{new}{end}", 1) if what.startswith(f"{old}{end}") else what
    files = {old[5:]: new[5:] for old, new in names.items() if old.startswith("file ")}
    for old, new in files.items():
        what = what.replace(f" of {old}", f" of {new}", 1)
    return what


def same(a: Any, b: Any) -> bool:
    """Equal, NaN to NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b or (a != a and b != b))


def differences(base: Decoded, head: Decoded) -> list[str]:
    """What is gone, new or another."""
    gone = [f"gone: {what}" for what in base.keys() - head.keys() if not on_purpose(what)]
    new = [f"new: {what}" for what in head.keys() - base.keys() if not on_purpose(what)]
    other = [f"differs: {what}" for what in base.keys() & head.keys() if not same(base[what], head[what])]
    return sorted(gone) + sorted(new) + sorted(other)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("--only", choices=CASES)
    said = parser.parse_args()
    names, wrong = renames(), 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", base, said.base], check=True
        )
        try:
            for case in [said.only] if said.only else CASES:
                wrong += one(case, base, Path(folder), names)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", base], check=True)
    raise SystemExit(1 if wrong else 0)


def one(case: str, base: Path, folder: Path, names: Mapping[str, str]) -> int:
    """Run a case by both and print what differs; how much does."""
    if "from_" in CASES[case][0] and not (base / MODEL).exists():
        run(base, base, "first_run", base / "runs" / "first_run")
    started, found = time.monotonic(), list[Decoded]()
    for side, tree in (("base", base), ("head", ROOT)):
        out = folder / f"{case}.{side}"
        run(tree, base, case, out)
        found.append(dict(decoded(out)))
        shutil.rmtree(out)
    was = {renamed(what, names): value for what, value in found[0].items()}
    said = differences(was, found[1])
    print(
        f"{case:12} {len(was):6} values, {len(said)} differ, {time.monotonic() - started:.0f} s", flush=True
    )
    for text in said[:20]:
        print(f"    {text}")
    return len(said)


if __name__ == "__main__":
    main()

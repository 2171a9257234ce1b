"""Does this machine compute the bits that others do? The first steps of the demo, held against a digest kept here.

    python benchmarks/bits.py [--keep | --emulate CPU]      `make bits` runs it

Needs: nothing but whet, and a C compiler. Takes: about two minutes. Trains examples/first_run.yaml for 6 steps of each
stage, in float32 and in bfloat16, as it comes and under settings that stand for other machines. The reward is
`letters`: the verifier of the demo gives 0 to all that so young a model writes, and the second stage would not change a
weight. The exported weights are compared with the digests, byte for byte, and metrics.jsonl among these runs: the names
in it change with whet, the weights follow from all numbers alone. Exit code 1 where they differ.

--keep: write the digests of this machine's weights to benchmarks/bits.json. --emulate: run it on an emulated processor
alone (`qemu-x86_64 -cpu help` lists them), and compile for that one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import whet

HERE = Path(__file__).parent
KEPT = HERE / "bits.json"
DEMO = HERE.parent / "examples" / "first_run.yaml"
LONGEST_S = 4 * 3600.0
"""Longest time of a run; an emulated processor is slow."""
SETTINGS = {
    "as it comes": {},
    "torch with AVX2 alone": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "vectors of 4 floats": {"CC": "cc -DWHET_WIDTH=4"},
    "vectors of 8 floats": {"CC": "cc -DWHET_WIDTH=8"},
    "vectors of 16 floats": {"CC": "cc -DWHET_WIDTH=16"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "no tiles": {"CC": "cc -DWHET_NO_TILES"},
}
DTYPES = ("float32", "bfloat16")


def letters(response: str, task: whet.Task) -> float:
    """The share of the answer's letters that are in the reply."""
    return sum(c in response for c in task.answer) / len(task.answer)


def digests(environment: dict[str, str], emulator: list[str], dtype: str = "float32") -> tuple[str, str]:
    """Of the weights and of the metrics that the demo's first steps write in this dtype, in a process with this
    environment, which an emulator may run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        short = [f"stages.{stage}.{key}" for stage in (0, 1) for key in ("train.steps=6", "eval.interval=0")]
        short += [f"model.dtype={dtype}", "machine.kernels=compiled"]
        short += [f"rewards={{letters: {{function: '{__file__}:letters'}}}}", "data.eval.0.limit=1"]
        command = [sys.executable, "-m", "whet.cli", "train", str(DEMO), f"run_dir={run}", *short]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        try:
            done = subprocess.run(
                [*emulator, *command],
                env=env,
                cwd=DEMO.parents[1],
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise SystemExit(f"the run took more than {LONGEST_S:g} s and was ended") from late
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stderr[-2000:]}")
        first, second = (
            (run / "export" / stage / "model.safetensors").read_bytes() for stage in ("sft", "rl")
        )
        if first == second:
            raise SystemExit("the second stage changed no weight: its part of the digest would say nothing")
        return hashlib.sha256(second + first).hexdigest(), hashlib.sha256(
            (run / "metrics.jsonl").read_bytes()
        ).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--emulate", metavar="CPU")
    given = parser.parse_args()
    emulator, settings = list[str](), SETTINGS
    if given.emulate:
        # the compiler is emulated, too: it compiles for the processor that it finds
        emulator = ["qemu-x86_64", "-cpu", given.emulate]
        settings = {f"{given.emulate}, emulated": {"CC": shlex.join([*emulator, shutil.which("cc") or "cc"])}}
    here = {dtype: digests({}, [], dtype) for dtype in DTYPES}
    if given.keep:
        KEPT.write_text(json.dumps({dtype: weights for dtype, (weights, _) in here.items()}, indent=2) + "\n")
    kept, differ = json.loads(KEPT.read_text()), 0
    for dtype, (name, environment) in itertools.product(DTYPES, settings.items()):
        found = digests(environment, emulator, dtype) if environment else here[dtype]
        same = found == (kept[dtype], here[dtype][1])
        differ += not same
        said = "the same bits" if same else "OTHER BITS"
        print(f"{dtype:9} {name:24} {found[0][:16]} {found[1][:16]} {said}", flush=True)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()

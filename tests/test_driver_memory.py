"""A run whose driver has less memory than its model: ranks and replicas have it, the driver never does."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of one process as Linux does"),
    pytest.mark.sweep,  # a minute of one core; test_published.py measures what the driver has at each way to a replica
]

WIDE = 256, 52_000
MATRIX_BYTES = 4 * WIDE[0] * WIDE[1]
MODEL_BYTES = 3 * MATRIX_BYTES
"""Of its one layer: 152 MiB."""
ABOVE_BYTES = MODEL_BYTES * 9 // 10
"""What the driver may take from the moment on at which it would build the model: stacks of threads, above all."""
FREE = """
import os
import resource

if str(os.getpid()) != os.environ.get("DRIVER"):
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
"""
"""Imported by all processes of the run: the driver's limit is its own."""
DRIVER = """
import os, resource, sys
from dataclasses import replace
from pathlib import Path

os.environ["DRIVER"] = str(os.getpid())
import matplotlib.backends.backend_agg, matplotlib.pyplot, pyarrow.parquet, ray, whet.job, whet.stages
from whet.cli import main

said, above, builds = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "builds"
open_models = whet.job.open_models

def status(name):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return 1024 * int(line.split()[1])

def limited(loaded, plans, **how):
    plans = [replace(plan, models_elsewhere=not builds) for plan in plans]
    most = status("VmData") + above
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return open_models(loaded, plans, **how)

whet.job.open_models = limited
sys.argv = ["whet", "train", "run.yaml"]
try:
    main()
finally:
    Path(said).write_text(str(status("VmData")))
"""


def small_stacks() -> None:
    """Threads' stacks are memory, too: as many threads as there are may start."""
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def trained(folder: Path, *, builds: bool = False, **cluster: object) -> subprocess.CompletedProcess[str]:
    """A run in `folder`, whose driver is limited. builds: its driver makes the model itself. cluster: its section."""
    tree: dict[str, Any] = {
        "seed": 3,
        "imports": ["free.py"],
        "model": {
            "scratch": {
                "hidden_size": WIDE[0],
                "intermediate_size": WIDE[1],
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
            }
        },
        "tokenizer": {"build": "chars"},
        "data": {"max_prompt_tokens": 16, "train": [{"path": str(Path("tests/data/words.jsonl").absolute())}]},
        "rewards": {"letters": {"function": str(Path("tests/resume/rewards.py").absolute()) + ":shared_letters"}},
        "rollout": {"group_size": 4, "sampling": {"max_tokens": 4}, "replicas": 1},
        "algorithm": {"name": "grpo"},
        "train": {
            "steps": 1,
            "tasks_per_step": 2,
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "parallel": {"dp_shard": 2},
        },
        "track": {"trackers": ["jsonl"]},
        "cluster": {"start_timeout_s": 300, **cluster},
        "machine": {"threads": 1},
        "run_dir": "run",
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    (folder / "free.py").write_text(FREE)
    return subprocess.run(
        [sys.executable, "-c", DRIVER, "said", str(ABOVE_BYTES), "builds" if builds else "gives away"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        preexec_fn=small_stacks,
        check=False,
    )


def test_a_model_larger_than_the_driver_s_memory_is_trained_synced_saved_and_exported(tmp_path: Path) -> None:
    done = trained(tmp_path)
    run = tmp_path / "run"
    log = (run / "run.log").read_text()
    assert done.returncode == 0, done.stdout[-3000:] + log[-3000:]
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 1
    assert "the ranks write them to" in log
    assert not (run / "models").exists(), "what passed between processes is removed"
    with safe_open(run / "export" / "main" / "model.safetensors", framework="pt") as exported:
        wide = [exported.get_slice(name).get_shape() for name in exported.keys()]  # noqa: SIM118
    assert list(WIDE) in wide
    (saved,) = (run / "checkpoints").glob("*")
    assert (saved / "policy" / "model.safetensors").stat().st_size > MODEL_BYTES


def test_the_limit_fails_a_driver_that_makes_the_model(tmp_path: Path) -> None:
    done = trained(tmp_path, builds=True)
    assert done.returncode != 0
    assert "memory" in done.stdout

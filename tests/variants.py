"""The tests of everything that computes, under switches that stand for other machines; part of `make sweep`.

    python tests/variants.py [NAME ...]

Each variant is an environment, or what `as_another_machine` changes in the process of the tests. A variant is green or
its failures are printed; what it cannot hold says so by its own test.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

VARIANTS: dict[str, dict[str, str]] = {
    "narrow vectors": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "no AVX in torch": {"ATEN_CPU_CAPABILITY": "default"},
    "MKL's rows disagree": {"MKL_CBWR": "COMPATIBLE"},
    "no oneDNN": {"WHET_VARIANT": "no oneDNN"},
    "no compiler": {"CC": "none"},
    "compiler with arguments": {"CC": "env gcc"},
    "half as wide": {"CC": "gcc -DWHET_WIDTH=4"},
    "no tiles": {"CC": "gcc -DWHET_NO_TILES"},
    "no entry for the user": {"WHET_VARIANT": "no entry for the user", "HOME": ""},
    "AddressSanitizer": {
        "CC": "gcc -fsanitize=address --param asan-instrumentation-with-call-threshold=0",
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",
        "PYTHONMALLOC": "malloc",
    },
}
PRELOADED = {"AddressSanitizer": ("libasan.so", "libstdc++.so.6")}
"""Libraries of gcc that processes of a variant have from their beginning on."""
FILES = (
    "activations",
    "attention",
    "cluster",
    "compiled_step",
    "elementwise",
    "exact",
    "exact_engines",
    "forward",
    "kernels",
    "lora",
    "memory",
    "mtp",
    "native",
    "native_graphs",
    "placement",
    "precision",
    "products",
    "products_bf16",
    "quantised",
    "replay_run",
    "rollout_contract",
    "rounds",
    "same_run",
    "skipping",
    "skipping_runs",
    "timeline",
    "train_torch",
)
IN_C = (
    "activations",
    "attention",
    "compiled_step",
    "elementwise",
    "kernels",
    "native",
    "paged",
    "products",
    "products_bf16",
)
"""Those that call the C kernels in the process of the tests: what AddressSanitizer can watch."""
WHOLE = ("no compiler", "no entry for the user")
"""Variants that touch more than what computes: all of `make test` passes under them, too."""


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of the tests: change what no variable of the environment can."""
    kind = os.environ.get("WHET_VARIANT")
    if kind == "no oneDNN":
        import torch

        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if kind == "no entry for the user":
        patch.object(pwd, "getpwuid", side_effect=KeyError("getpwuid(): uid not found")).start()
        os.environ.pop("HOME", None)


def run(name: str) -> bool:
    here = Path(__file__).parent
    files = IN_C if name == "AddressSanitizer" else FILES
    computing = ["--every-case", *(str(here / f"test_{file}.py") for file in files)]
    parts = [computing, [str(here)]] if name in WHOLE else [computing]
    green = [passed(name, tests) for tests in parts]
    return all(green)


def passed(name: str, tests: list[str]) -> bool:
    """Whether these arguments of pytest pass under a variant; what does not is printed."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache, "PYTHONPATH": path}
        if libraries := PRELOADED.get(name):
            asked = [["gcc", f"-print-file-name={library}"] for library in libraries]
            env["LD_PRELOAD"] = " ".join(subprocess.check_output(words, text=True).strip() for words in asked)
        command = [sys.executable, "-m", "pytest", "-p", "variants", "-n", "2", *tests]
        done = subprocess.run(command, env=env | VARIANTS[name], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    print(f"{name}: {lines[-1] if lines else done.stderr}", flush=True)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(f"  {line}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    failed = [name for name in sys.argv[1:] or VARIANTS if not run(name)]
    sys.exit(bool(failed))

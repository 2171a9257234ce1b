"""Bits that travel: a run has the same bits on a CPU with narrower vectors, and those whose digest was kept."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

import forked
from tiny import RUN
from whet.cli import app
from whet.config.load import load
from whet.models import build, kernels, products
from whet.models.arithmetic import PORTABLE, PORTABLE_HALVES, VERSION, _digest, arithmetic, facts
from whet.start import arithmetic_of

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import bits

HERE = arithmetic(kernels.load("auto"))
TORCH = torch.backends.cpu.get_cpu_capability()
TRAVELS = pytest.mark.skipif(
    not HERE.portable or TORCH not in ("AVX2", "AVX512"),
    reason=f"{HERE}; torch's own operations use {TORCH}: bits travel with AVX2 and AVX512 alone",
)
TINY = "tests/golden/tiny.yaml"
PROMISE = f"arithmetic {VERSION}, the same bits on every CPU with AVX2 and fused multiply-add"
WARNING = "this machine computes differently"
Digests = tuple[str, str]
"""Of a demo's weights, and of its metrics."""

SAY = """
import torch
from whet.models.build import library
print(torch.backends.cpu.get_cpu_capability(), library()[1].rpartition(", ")[2])
"""


@pytest.fixture(scope="module")
def narrow() -> dict[str, str]:
    """The environment of a CPU with narrower vectors. A process that is forked obeys it."""
    compiler = shlex.join([*build._compiler(), "-DWHET_WIDTH=4"])
    found = {"CC": compiler, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    said = forked.ran(SAY, env=os.environ | found, timeout_s=300)
    assert said.returncode == 0, said.stderr
    capability, library = said.stdout.split()
    assert capability == "AVX2"
    assert not build.library()[1].endswith(library), "the kernels are compiled for its vectors"
    return found


# ---------------------------------------------------------------- the demo


def demo(environment: Mapping[str, str], dtype: str = "float32") -> Digests:
    """Of the demo's first steps in this dtype, in a process that is forked: a new interpreter loads torch for longer
    than it runs."""

    def run(
        command: list[str], *, env: Mapping[str, str], cwd: Path, **_: object
    ) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "whet.cli"]
        return forked.ran(forked.COMMAND, *command[3:], env=env, cwd=cwd, timeout_s=300)

    with patch.object(bits, "subprocess", SimpleNamespace(run=run)):
        found: Digests = bits.digests(dict(environment), [], dtype)
    return found


@pytest.fixture(scope="module")
def as_it_comes() -> Digests:
    return demo({})


@TRAVELS
def test_the_demo_has_the_weights_whose_digest_is_kept(as_it_comes: Digests) -> None:
    weights, _ = as_it_comes
    assert json.loads(bits.KEPT.read_text())["float32"] == weights


@TRAVELS
@pytest.mark.long
def test_the_demo_in_bfloat16_has_the_weights_whose_digest_is_kept(narrow: dict[str, str]) -> None:
    weights, metrics = demo(narrow, "bfloat16")
    assert json.loads(bits.KEPT.read_text())["bfloat16"] == weights
    assert demo({}, "bfloat16") == (weights, metrics)


@TRAVELS
def test_the_demo_has_the_same_bits_with_narrower_vectors(
    as_it_comes: Digests, narrow: dict[str, str]
) -> None:
    assert demo(narrow) == as_it_comes


@TRAVELS
@pytest.mark.sweep  # each in a new interpreter, as `make bits` runs them
@pytest.mark.parametrize("dtype", bits.DTYPES)
@pytest.mark.parametrize("name", bits.SETTINGS)
def test_the_demo_has_the_same_bits_under_every_setting(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bits, "subprocess", SimpleNamespace(run=partial(subprocess.run, timeout=300)))
    weights, _ = bits.digests(bits.SETTINGS[name], [], dtype)
    assert json.loads(bits.KEPT.read_text())[dtype] == weights


# ---------------------------------------------------------------- a run that moves

KILLED = f"""
import os, signal
from whet import checkpoint
write = checkpoint.write
def last(*given):
    write(*given)
    os.kill(os.getpid(), signal.SIGKILL)
checkpoint.write = last
{forked.COMMAND}
"""
"""`whet`, until its first checkpoint is whole."""


def went(run_dir: Path, environment: Mapping[str, str], code: str = forked.COMMAND) -> int:
    """How a run of some steps ended, in a process with this environment."""
    short = ("train.steps=4", "checkpoint.interval=1", "track.trackers=[console, jsonl]")
    run = forked.Started(
        "train",
        TINY,
        f"run_dir={run_dir}",
        *short,
        said=run_dir.with_suffix(".said"),
        code=code,
        env=os.environ | environment,
    )
    try:
        return run.wait(120)
    finally:
        run.kill()


def written(run_dir: Path) -> dict[str, bytes]:
    """What equal runs write byte for byte."""
    found = [run_dir / "metrics.jsonl", *(run_dir / "export").rglob("*")]
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in found if p.is_file()}


def resumed(run_dir: Path, environment: Mapping[str, str]) -> str:
    """The log of a run that is killed here and goes on in a process with this environment."""
    assert went(run_dir, {}, KILLED) == -signal.SIGKILL
    assert len(list((run_dir / "checkpoints").iterdir())) == 1
    assert not (run_dir / "export").exists()
    ended, said = went(run_dir, environment), run_dir.with_suffix(".said").read_text()
    assert ended == 0, said
    assert "resuming from" in said
    return (run_dir / "run.log").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert went(run_dir, {}) == 0
    found = written(run_dir)
    assert found["metrics.jsonl"].count(b"\n") == 4
    assert any(name.endswith(".safetensors") for name in found)
    return found


@TRAVELS
def test_a_run_that_is_killed_goes_on_with_narrower_vectors_and_is_the_undisturbed_one(
    undisturbed: dict[str, bytes], narrow: dict[str, str], tmp_path: Path
) -> None:
    log = resumed(tmp_path / "run", narrow)
    assert WARNING not in log
    assert written(tmp_path / "run") == undisturbed


@TRAVELS
@pytest.mark.sweep  # test_going_on.py says it of a start whose digest is changed by hand
def test_where_nothing_is_compiled_it_goes_on_with_other_bits_and_says_so(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    log = resumed(tmp_path / "run", {"CC": "none"})
    assert WARNING in log
    assert written(tmp_path / "run") != undisturbed


# ---------------------------------------------------------------- what is said of them


def planned(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", TINY, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_plan_says_which_cpus_have_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(forked.ROOT)
    said = planned("--arithmetic")
    assert (PROMISE in said) == (PORTABLE in said) == HERE.portable
    assert f"float32 on this CPU: {HERE}" in said
    by_torch = planned("--arithmetic", "machine.kernels=torch")
    assert f"arithmetic {VERSION}, bits of this machine and its libraries" in by_torch
    assert PORTABLE not in by_torch
    assert "arithmetic" not in planned()


@pytest.mark.parametrize("kind", ["compiled", "torch"])
def test_bits_are_the_same_whatever_torchs_defaults_are(kind: str) -> None:
    """C writes float32 of the CPU: into other tensors it would write elsewhere than they are."""
    if kind not in ("torch", HERE.kernels):
        pytest.skip(str(HERE))
    ops, multiply = kernels.load(kind), products.chosen().multiply
    was = (_digest(ops), products._obeys(multiply), products.half_by(torch.bfloat16))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        half_by = products._half_by.__wrapped__(torch.bfloat16, products._own_halves)
        now = (_digest(ops), products._obeys(multiply), half_by)
    finally:
        torch.set_default_dtype(before)
    assert now == was


@pytest.mark.skipif(not HERE.portable, reason=str(HERE))
def test_a_start_names_its_cpu_only_where_its_bits_depend_on_it() -> None:
    assert facts("cpu", kernels="auto")["digest"] == PORTABLE
    assert "cpu" not in facts("cpu", kernels="auto")
    half = facts("cpu", kernels="auto", halves={"bfloat16"})
    assert half["bfloat16"] == products.half_by(torch.bfloat16), "the compiler decides it, too"
    assert ("cpu" in half) == (half["bfloat16"] == "torch")
    assert facts("cpu", kernels="auto", torch_products=True)["cpu"], "whose products are torch's"
    assert facts("cpu", kernels="torch")["cpu"]


@pytest.mark.skipif(not HERE.portable, reason=str(HERE))
@pytest.mark.parametrize(
    ("override", "travels"),
    [
        ("train.optimizer.lr=1e-3", True),
        ("train.optimizer.name=muon", False),
        ("train.precision.compute=bfloat16", False),
    ],
)
def test_a_run_whose_products_are_partly_torchs_names_its_cpu(override: str, travels: bool) -> None:
    told = arithmetic_of(load(None, [override, "machine.device=cpu", "model.dtype=float32"], RUN))
    assert ("cpu" not in told) is travels


@pytest.mark.skipif(not HERE.portable, reason=str(HERE))
def test_half_precision_travels_where_its_products_are_asked_of_whet() -> None:
    own = facts("cpu", kernels="compiled", halves={"bfloat16", "float16"})
    assert (own["bfloat16"], own["float16"]) == ("tiles", "float32")
    assert "cpu" not in own
    ops = kernels.load("compiled")
    assert {name: _digest(ops, getattr(torch, name)) for name in PORTABLE_HALVES} == PORTABLE_HALVES
    kernels.table("torch")
    assert products.half_by(torch.bfloat16) == "tiles", (
        "not asked by a run: an export, a layer that torch compiles"
    )
    for later in ("auto", "torch"):  # a later run of this process
        kernels.load("compiled")
        kernels.load(later)
        assert not products._own_halves


@pytest.mark.skipif(HERE.kernels != "compiled", reason=str(HERE))
def test_the_plan_says_whose_the_bits_of_half_precision_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(forked.ROOT)
    said = planned("--arithmetic", "model.dtype=bfloat16", "machine.kernels=compiled")
    line = next(one for one in said.splitlines() if one.startswith("bfloat16 on this CPU: "))
    assert (PORTABLE_HALVES["bfloat16"] in line) == ("the same bits on every CPU" in line) == HERE.portable

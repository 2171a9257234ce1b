"""Profiling windows: the steps that were asked for and no others, complete files, refusals."""

from __future__ import annotations

import contextlib
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerAction

from test_memory import full_batch
from test_timeline import TINY, reward
from tiny import VOCAB, tiny_model
from whet.api import train
from whet.config.load import load
from whet.config.memory import Lengths
from whet.config.plan import plans
from whet.config.schema import ProfileConfig, TrainConfig
from whet.models import kernels
from whet.track.written import read_lines
from whet.training import profile
from whet.training.micro_batches import MicroBatchPolicy
from whet.training.profile import Profiler, schedule, window
from whet.training.throughput import Meter, meter_of, peak_flops
from whet.training.torch import TorchEngine
from whet.training.work import BatchFlops, batch_flops, work_of
from whet.types import ConfigError

NONE, WARM, RECORD, SAVE = (
    ProfilerAction.NONE,
    ProfilerAction.WARMUP,
    ProfilerAction.RECORD,
    ProfilerAction.RECORD_AND_SAVE,
)


@pytest.mark.parametrize(
    ("steps", "warmup", "first", "expected"),
    [
        ([3], 1, 1, [NONE, WARM, SAVE, NONE]),
        ([3], 0, 1, [NONE, NONE, SAVE, NONE]),
        ([3], 5, 1, [WARM, WARM, SAVE, NONE]),
        ([2, 3, 4], 1, 1, [WARM, RECORD, RECORD, SAVE, NONE]),
        ([1, 3], 1, 1, [SAVE, WARM, SAVE]),
        ([7], 1, 6, [WARM, SAVE]),
        ([2, 7], 1, 4, [NONE, NONE, WARM, SAVE]),
    ],
)
def test_the_schedule(steps, warmup, first, expected):
    action = schedule(steps, warmup=warmup, first=first)
    assert [action(n) for n in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("at", "expected"), [(1, [2, 3]), (2, [2, 3]), (3, [3]), (4, [6]), (6, [6]), (7, [])]
)
def test_the_next_window(at, expected):
    assert window({6, 3, 2}, at) == expected


def run_steps(profiler: Profiler, numbers: range) -> None:
    """Steps of which each multiplies matrices of its own size."""
    for n in numbers:
        with profiler.step(n), profiler.range("update"):
            torch.ones(n, 10 + n) @ torch.ones(10 + n, n)
    profiler.close()


def traced(path: Path) -> dict[str, list[list[int]]]:
    """Names of annotations, and the first shape of each matrix product."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {
        "ranges": sorted({e["name"] for e in events if e.get("cat") == "user_annotation"}),
        "products": [e["args"]["Input Dims"][0] for e in events if e.get("name") == "aten::mm"],
    }


CPU = torch.device("cpu")


def test_the_steps_asked_for_are_in_the_traces_and_no_others(tmp_path):
    cfg = ProfileConfig(steps=(2, 3, 6, 8), torch=("record_shapes",), warmup=2)
    run_steps(Profiler(cfg, tmp_path, stage="rl", device=CPU), range(1, 10))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rl-step-000006.json.gz",
        "rl-step-000008.json.gz",
        "rl-steps-000002-000003.json.gz",
    ]
    two = traced(tmp_path / "rl-steps-000002-000003.json.gz")
    assert two["products"] == [[2, 12], [3, 13]]
    assert {"step 2", "step 3", "update"} <= set(two["ranges"])
    assert traced(tmp_path / "rl-step-000006.json.gz")["products"] == [[6, 16]]
    assert traced(tmp_path / "rl-step-000008.json.gz")["products"] == [[8, 18]]


def test_a_resumed_run_records_what_is_still_ahead(tmp_path):
    run_steps(
        Profiler(ProfileConfig(steps=(2, 5), torch=("record_shapes",)), tmp_path, stage="s", device=CPU),
        range(4, 8),
    )
    assert [p.name for p in tmp_path.iterdir()] == ["s-step-000005.json.gz"]
    assert traced(tmp_path / "s-step-000005.json.gz")["products"] == [[5, 15]]


def test_a_run_stopped_inside_a_window_writes_what_it_has(tmp_path):
    cfg = ProfileConfig(steps=(2, 3, 4), torch=("record_shapes",))
    run_steps(Profiler(cfg, tmp_path, stage="s", device=CPU), range(1, 4))
    assert traced(tmp_path / "s-steps-000002-000003.json.gz")["products"] == [[2, 12], [3, 13]]


def test_without_steps_nothing_is_ever_started(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: pytest.fail("started"))
    run_steps(Profiler(ProfileConfig(), tmp_path / "none", stage="s", device=CPU), range(1, 4))
    assert not (tmp_path / "none").exists()


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's profiling calls, written down instead of made."""
    calls: list[str] = []

    def history(enabled: str | None = "all", **_: object) -> None:
        calls.append(f"history {enabled}")

    @contextlib.contextmanager
    def ranged(name: str):
        calls.append(f"[{name}")
        yield
        calls.append(f"{name}]")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", ranged)
    return calls


def test_cuda_tools_are_called_around_each_window(tmp_path, cuda):
    cfg = ProfileConfig(steps=(2, 3, 5), tools=("memory",))
    run_steps(Profiler(cfg, tmp_path, stage="s", device=torch.device("cuda")), range(1, 7))
    assert cuda == [
        "history all", "s-steps-000002-000003.pickle", "history None",
        "history all", "s-step-000005.pickle", "history None",
    ]  # fmt: skip
    cuda.clear()
    cfg = ProfileConfig(steps=(2,), tools=("nsys",))
    run_steps(Profiler(cfg, tmp_path, stage="s", device=torch.device("cuda")), range(1, 4))
    assert cuda == ["start", "[step 2", "[update", "update]", "step 2]", "stop"]


def test_a_stopped_run_ends_cudas_recording(tmp_path, cuda):
    cfg = ProfileConfig(steps=(2, 3), tools=("memory",))
    run_steps(Profiler(cfg, tmp_path, stage="s", device=torch.device("cuda")), range(1, 3))
    assert cuda == ["history all", "s-step-000002.pickle", "history None"]


def test_tools_that_need_cuda_are_refused_elsewhere(tmp_path):
    with pytest.raises(
        ConfigError, match=r"profile\.tools: memory, nsys: memory snapshots .* the run is on cpu"
    ):
        Profiler(ProfileConfig(steps=(1,), tools=("memory", "nsys")), tmp_path, stage="s", device=CPU)


BASE = {**TINY, "rewards": {"r": {"function": "exact"}}}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["profile={steps: [1], tools: []}"], "profile.tools: [] records nothing"),
        (["profile={steps: [1], tools: [nsys]}", "machine.device=cpu"], "profile.tools: memory snapshots and nsys"),
        (["profile={steps: [1], tools: [torch, nsys]}"], "profile.tools: torch and nsys both use CUPTI"),
        (["profile.torch=[record_shapes]"], "profile.torch[0]: has no effect: profile.steps is empty"),
        (["profile={steps: [4]}"], "profile.steps[0]: has no effect: the stage has 3 steps, and every"),
        (["profile={steps: [2], tools: [memory], torch: [with_stack]}"], "profile.torch[0]: has no effect"),
        (["profile={steps: [0]}"], "profile.steps: got [0], expected"),
        (["profile.step=3"], "did you mean profile.steps"),
    ],
)  # fmt: skip
def test_refusals(overrides, said):
    with pytest.raises(ConfigError) as caught:
        plans(load(None, overrides, BASE))
    assert said in str(caught.value)


def test_a_run_traces_its_phases_and_changes_no_number(tmp_path):
    elsewhere = tmp_path / "traces"
    given = {"profile": {"steps": [2]}, "dirs": {"profile": str(elsewhere)}}
    train(rewards=reward, run_dir=str(tmp_path / "with"), **given, **TINY)
    train(rewards=reward, run_dir=str(tmp_path / "without"), **TINY)
    assert (tmp_path / "with/profile").resolve() == elsewhere
    (file,) = elsewhere.glob("*.json.gz")
    assert file.name == "main-step-000002.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ranges = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert {"step 2", "generate", "reward", "logprobs", "update"} <= ranges
    assert "step 1" not in ranges
    both = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("with", "without")]
    assert both[0] == both[1]


def test_the_history_of_a_snapshot_is_bounded():
    assert profile.HISTORY_EVENTS <= 10**6


# ---------------------------------------------------------------- throughput


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A10G", torch.bfloat16, 70e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("Some new GPU", torch.bfloat16, None),
        ("NVIDIA H1000", torch.bfloat16, None),
    ],
)
def test_peak_of_a_device(name, dtype, peak):
    assert peak_flops(name, dtype) == peak


def test_work_of_a_model_by_hand():
    model = tiny_model("qwen3", layers=2)
    # a layer: q, k, v, o of heads 4 and 2 of 16, feed-forward of 48, width 32
    matrices = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48
    whole = work_of(model, output=True)
    assert (whole.layers, whole.output) == (6 * 2 * matrices, 6 * VOCAB * 32)
    assert whole.attention == 12 * 2 * 64
    assert work_of(model, output=False).output == 0
    model.requires_grad_(False)
    assert work_of(model, output=True).layers == 4 * 2 * matrices
    mixture = work_of(tiny_model("qwen3_moe", layers=1), output=False)
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    assert mixture.layers == 6 * (attention + 4 * 32 + 2 * 3 * 32 * 48), "two of four experts, and the router"


def test_flops_of_a_batch_by_a_double_loop():
    lengths, work = Lengths(prompt=6, reply=5, group=4), BatchFlops(layers=7.0, output=11.0, attention=13.0)
    batch = full_batch(lengths, 3)
    for shared in (True, False):
        tokens = pairs = 0.0
        for _group in range(3):
            for row in range(4):
                own = 6 if row == 0 or not shared else 0
                tokens += own + 5
                pairs += own**2 / 2 + sum(6 + i + 0.5 for i in range(5))
        assert batch_flops(work, batch, shared=shared) == pytest.approx(
            7 * tokens + 11 * 12 * 5 + 13 * pairs, rel=1e-12
        )


def test_a_meter_adds_passes_and_leaves_a_waiting_policy_out():
    batch = full_batch(Lengths(prompt=6, reply=5, group=4), 3)
    one, two = BatchFlops(1.0, 0.0, 0.0), BatchFlops(2.0, 0.0, 0.0)
    meter = Meter(peak=1.0, policy=one, critic=two, shared=False, passes=3, critic_passes=5)
    tokens = 12 * 11
    assert meter.flops(batch, policy_learns=True) == 3 * tokens + 5 * 2 * tokens
    assert meter.flops(batch, policy_learns=False) == 5 * 2 * tokens
    mixed = replace(batch, expert_R=torch.arange(batch.rollouts) < 2)
    assert meter.flops(mixed, policy_learns=True) == 3 * tokens + 5 * 2 * (tokens - 2 * 11), (
        "the policy learns from demonstrations, too"
    )


def test_a_run_on_a_known_device_says_how_much_of_it_it_uses(tmp_path, monkeypatch):
    """The device is this CPU under another name: what is tested is the way of the numbers."""
    work = BatchFlops(layers=3.0, output=0.0, attention=0.0)
    meter = Meter(peak=1e6, policy=work, critic=None, shared=True, passes=2, critic_passes=0)
    train(rewards=reward, run_dir=str(tmp_path / "cpu"), **TINY)
    monkeypatch.setattr("whet.learner.meter_of", lambda *_, **__: meter)
    train(rewards=reward, run_dir=str(tmp_path / "known"), **TINY)
    steps = [line for line in read_lines(tmp_path / "known/timings.jsonl") if "time/step_s" in line]
    assert len(steps) == 3
    for line in steps:
        tokens = line["speed/mfu"] * line["time/update_s"] * 1e6 / 2 / 3
        assert tokens == pytest.approx(round(tokens))
        assert 4 * 4 + 8 <= round(tokens) <= 4 * 4 + 8 * 4, (
            "four prompts of four tokens, eight replies of at most four"
        )
        assert line["speed/tokens_per_device_s"] == line["speed/tokens_per_s"]
    assert not any("speed/mfu" in line for line in read_lines(tmp_path / "cpu/timings.jsonl"))


def test_on_a_cpu_there_is_no_meter():
    engine = TorchEngine(tiny_model(), kernels.load("torch"), cut=MicroBatchPolicy())
    assert meter_of(engine, None, device=engine.device, train=TrainConfig(), of_critic=None) is None


def test_a_meter_of_cuda(monkeypatch):
    engine = TorchEngine(tiny_model(), kernels.load("torch"), cut=MicroBatchPolicy())
    of = {"device": torch.device("cuda"), "of_critic": None}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = meter_of(
        engine, engine, train=TrainConfig(update_epochs=2), **of | {"of_critic": TrainConfig(update_epochs=3)}
    )
    assert found is not None
    assert (found.peak, found.passes, found.critic_passes) == (67e12, 2, 3)
    assert found.critic is not None
    assert found.critic.output == 0 < found.policy.output
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unheard of")
    assert meter_of(engine, None, train=TrainConfig(), **of) is None


def test_ranks_that_are_named_record_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = {"train.parallel.dp_replicate": 2, "profile.steps": [2], "profile.ranks": [1]}
    overrides = [f"{key}={value}" for key, value in parallel.items()]
    train(overrides=[f"run_dir={tmp_path}/run", *overrides], rewards=reward, **TINY)
    written = {p.name for p in (tmp_path / "run/profile").iterdir()}
    assert written == {"main-step-000002.json.gz", "main-rank-1-step-000002.json.gz"}
    with gzip.open(tmp_path / "run/profile/main-rank-1-step-000002.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"policy: update", "policy: optimizer step"} <= names
    line = read_lines(tmp_path / "run/timings.jsonl")[-1]
    assert line["memory/rank_0_peak_mb"] > 0 < line["memory/rank_1_peak_mb"]
    assert line["speed/tokens_per_rank_s"] == pytest.approx(line["speed/tokens_per_s"] / 2)


def test_ranks_that_are_not_there_cannot_record() -> None:
    base = {**TINY, "rewards": {"r": {"function": "exact"}}}
    with pytest.raises(ConfigError, match=r"profile\.ranks: 2 does not exist: a model has 2 ranks"):
        plans(load(None, ["train.parallel.dp_replicate=2", "profile.steps=[1]", "profile.ranks=[2]"], base))
    with pytest.raises(ConfigError, match="no ranks"):
        plans(load(None, ["profile.steps=[1]", "profile.ranks=[1]"], base))

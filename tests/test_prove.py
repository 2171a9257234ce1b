"""`whet convert FILE --prove`, with a small package in the place of Cosmos-RL's own (tests/cosmos_double.py)."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cosmos_double
from forked import ran
from peers.ours import READ_AS
from whet.config.load import load
from whet.dialects import versions
from whet.prove import checks, peers, proof, settings, trinity
from whet.prove.cases import case
from whet.types import ConfigError, Json

ROOT = Path(__file__).parent.parent
LOSS = "loss and gradient, grpo, without the KL"
DOUBLE = os.environ | {"COLUMNS": "400", "OMP_NUM_THREADS": "1"}


def prove(tmp_path: Path, *arguments: str, text: str = cosmos_double.FILE) -> tuple[int, dict[str, str], str]:
    """(exit status, result by row, everything written) of a process that has the double's folder on its path."""
    file = tmp_path / "job.toml"
    file.write_text(text, encoding="utf-8")
    words = ["convert", str(file), "--prove", *arguments]
    env = DOUBLE | {"PYTHONPATH": str(tmp_path)}
    done = ran("from whet.cli import main; main()", *words, cwd=tmp_path, env=env)
    cells = [re.split(r"\s*│\s*", line.strip("│ ")) for line in done.stdout.splitlines() if "│" in line]
    rows = {row[0]: row[4] for row in cells if len(row) == 5 and row[0]}
    return done.returncode, rows, done.stdout + done.stderr


def test_a_file_that_means_the_same_is_equal_in_every_row(tmp_path: Path) -> None:
    cosmos_double.write(tmp_path)
    status, rows, said = prove(tmp_path)
    assert set(rows.values()) == {"equal"}, said
    assert {"batches", "training steps", "learning rate of each step", "advantage, grpo"} <= set(rows)
    assert {"optimizer", "sampling"} <= set(rows)
    assert "compared with cosmos-rl 0.4.7" in said
    # 128 rollouts of the file's 32 a step, 4 a task: 8 tasks; 1, 17 // 8, 55 // 8 and 50 steps, 40 at most
    assert "steps 1 2 6 40" in said
    assert status == 0


def test_steps_over_parts_of_groups_are_counted_as_cosmos_counts_them(tmp_path: Path) -> None:
    """Eight of its steps, of two replies each, are one step here: eight optimizer steps over a group of 16."""
    cosmos_double.write(tmp_path)
    short = "train.train_batch_per_replica=2 rollout.n_generation=16 train.train_policy.mini_batch=1"
    status, rows, said = prove(tmp_path, *short.split())
    assert set(rows.values()) == {"equal"}, said
    assert "rollouts of a step 2, rollouts of a task 16" in said
    assert "steps 8 24 40 40" in said
    assert status == 0


def test_what_differs_and_what_cannot_be_compared_fails(tmp_path: Path) -> None:
    """The loss is half of whet's: that whet says that Cosmos's means are over mini-batches is no reason on one whole
    batch. One module cannot be imported, and one key of the file is none of the installed release."""
    cosmos_double.write(tmp_path, scale=0.5)
    (tmp_path / "cosmos_rl" / "dispatcher" / "status.py").write_text(
        "raise OSError('no disk')", encoding="utf-8"
    )
    text = cosmos_double.FILE.replace("[train]\n", "[train]\nseed = 3\n")
    text = text.replace("[policy]\n", "[policy]\nenable_liger_kernel = true\n")  # has no say
    status, rows, said = prove(tmp_path, text=text)
    assert "differs: train.train_policy.loss_type" in said
    assert rows[LOSS].startswith("DIFFERS: by up to"), said
    assert rows["keys"].startswith("not compared: cosmos-rl 0.4.7 does not have train.seed"), said
    assert rows["training steps"].startswith("not compared: OSError: no disk (status.py:1)")
    assert (rows["batches"], rows["advantage, grpo"]) == ("equal", "equal")
    assert status == 1


def test_settings_that_differ_are_seen(tmp_path: Path) -> None:
    """The double's optimizer has no weight decay of its own, and its sampling another temperature."""
    cosmos_double.write(tmp_path)
    for path, mine, other in (
        ("policy/trainer/optm.py", "weight_decay=train.optm_weight_decay", "weight_decay=0.0"),
        ("policy/config.py", "temperature: float = 1.0", "temperature: float = 0.7"),
    ):
        file = tmp_path / "cosmos_rl" / path
        file.write_text(file.read_text(encoding="utf-8").replace(mine, other), encoding="utf-8")
    status, rows, said = prove(tmp_path)
    assert rows["optimizer"].startswith("DIFFERS: by up to 0.01"), said
    assert rows["sampling"].startswith("DIFFERS: by up to 0.3"), said
    assert (rows["batches"], status) == ("equal", 1)


def test_a_run_within_its_warmup_has_a_row_of_its_own(tmp_path: Path) -> None:
    """Seven steps of a warm-up of 20: the double's rates rise over all of it, as whet's do, and beyond it, too."""
    cosmos_double.write(tmp_path)
    told = ("train.optm_warmup_steps=20", "train.max_num_steps=100")
    status, rows, said = prove(tmp_path, *told)
    assert rows["learning rate of each step"] == "equal", said
    assert rows["learning rate of each step, a run within its warm-up"] == "equal", said
    assert status == 0


def test_a_file_for_sft(tmp_path: Path) -> None:
    """Of 55 rows each of two ranks has 28: seven batches of four an epoch, six by whet, which leaves rows out. That is
    told; without the second rank nothing differs."""
    cosmos_double.write(tmp_path)
    names = {"batches", "training steps", "learning rate of each step", "loss and gradient, sft"}
    status, rows, said = prove(tmp_path, text=cosmos_double.SFT_FILE)
    assert rows.keys() & names == names
    assert {rows[name] for name in names} == {"equal"}, said
    # 8, 17, 55 and 400 rows of 8 a step, two epochs
    assert "steps 2 4 12 100" in said
    assert status == 0

    two = ("policy.parallelism.dp_shard_size=2", "train.train_batch_per_replica=4")
    status, rows, said = prove(tmp_path, *two, text=cosmos_double.SFT_FILE)
    assert rows["training steps"].startswith("differs as documented: by up to 0.14 Each rank of Cosmos"), said
    assert "steps 2 4 14 100" in said
    assert {rows[name] for name in names - {"training steps"}} == {"equal"}
    assert status == 0


def test_the_loss_of_a_file_for_sft_can_differ(tmp_path: Path) -> None:
    cosmos_double.write(tmp_path, scale=0.5)
    status, rows, said = prove(tmp_path, text=cosmos_double.SFT_FILE)
    assert rows["loss and gradient, sft"].startswith("DIFFERS: by up to 0.6"), said  # half of 1.2
    assert (rows["batches"], status) == ("equal", 1)


def test_each_stage_is_held_against_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a system of ours whose rows are the settings of a stage: the rows of each stage have its name, and a
    number of stages that differs is a row."""
    monkeypatch.setattr(peers, "prepared", lambda peer: ())
    loaded = load(ROOT / "tests" / "peers" / "files" / "trinity_stages.yaml", here=False, rehearsal=True)

    def steps(config: int, file: checks.File) -> list[checks.Check]:
        return [_check(config, file.plan.total_steps or 0)]

    made = replace(loaded.translation, foreign={}, lines=())
    monkeypatch.setattr(proof, "require", lambda kind: "trinity")  # its package need not be here

    def rows(theirs: tuple[int, ...]) -> list[tuple[str, str]]:
        system = proof.System(
            peer="trinity",
            known=dict,
            configured=lambda tree: theirs,
            checks=lambda config, file: iter(steps(config, file)),
            stages=lambda config: config,
        )
        monkeypatch.setitem(proof.SYSTEMS, made.dialect, system)
        proved = proof.prove(replace(loaded, translation=made))
        return [(result.what, result.status) for result in proved.results]

    assert rows((40, 20)) == [("sft_warmup: x", checks.EQUAL), ("rft: x", checks.EQUAL)]
    assert rows((40, 30)) == [("sft_warmup: x", checks.EQUAL), ("rft: x", checks.DIFFERS)]
    assert rows((40,)) == [("stages", checks.DIFFERS)]


def test_a_package_that_is_not_installed_is_named_with_its_command(tmp_path: Path) -> None:
    if peers.version("cosmos"):
        pytest.skip("cosmos-rl is installed here")
    status, rows, said = prove(tmp_path)
    assert (status, rows) == (2, {})
    assert "cosmos-rl, which is not installed" in said
    assert f"-m pip install --no-deps cosmos-rl=={peers.NEWEST['cosmos']}" in said


def test_trinity_calls_its_functions_with_the_arguments_of_the_file_alone() -> None:
    """Beside them its constructors' defaults count, and not what default_args() says."""

    class Made:
        def __init__(
            self, backend: str = "verl", mu: float = 2.0, clip: float | None = None, part: float = 0.1
        ):
            pass

        @classmethod
        def default_args(cls) -> dict[str, float]:
            return {"mu": 8.5, "clip": 0.2, "part": 0.1}

    def told(**given: Json) -> dict[str, Json]:
        return trinity.arguments(Made, {"algorithm.advantage_fn_args": given}, "advantage_fn")

    assert told() == Made.default_args()
    assert told(part=0.5) == {"mu": 2.0, "clip": 0.2, "part": 0.5}
    assert told(mu=3.0, clip=0.1) == {"mu": 3.0, "clip": 0.1, "part": 0.1}


def test_files_that_cannot_be_proved_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"first_run\.yaml is a native file"):
        proof.prove(load(ROOT / "examples" / "first_run.yaml"))
    with pytest.raises(ConfigError, match=r"expected a file of verl-ppo, .*, trinity; this one is verl-eval"):
        proof.require("verl-eval")


def test_the_releases_are_those_that_the_peers_environment_installs() -> None:
    text = (ROOT / "tests" / "peers" / "requirements.txt").read_text(encoding="utf-8")
    wanted = {peers.PACKAGES[peer]: version for peer, version in peers.NEWEST.items()}
    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)
    assert wanted.items() <= pinned.items()
    for peer, read_as in READ_AS.items():
        version = versions.version_named(peer, read_as.partition("@")[2])
        assert peers.NEWEST[peer].startswith(version), "rows are read as the release that is installed"


def _check(theirs: float, ours: float, **rest: object) -> checks.Check:
    def number(x: float) -> checks.Numbers:
        return checks.scalars(x=x)

    return checks.Check(
        what="x", called="m:f", theirs=lambda _: number(theirs), ours=lambda _: number(ours), **rest
    )


def test_each_status_of_a_row() -> None:
    told = {"a.b": "Because.", "c": "Not this."}
    assert checks.compared(_check(1.0, 1.0, keys=("a.b",)), told).status == checks.EQUAL
    other = checks.compared(_check(1.0, 2.0, keys=("a.b",)), told)
    assert (other.status, other.told) == (checks.TOLD, "by up to 1 Because.")
    assert checks.compared(_check(1.0, 2.0, keys=("a",)), told).status == checks.DIFFERS
    assert checks.compared(_check(1.0, 2.0), told).status == checks.DIFFERS, "no key, no excuse"
    refused = checks.compared(_check(1.0, 1.0, refused="too large"), told)
    assert (refused.status, refused.told) == (checks.NOT_COMPARED, "too large")
    assert checks.compared(_check(1e9, 1e9 + 0.5), told).status == checks.EQUAL, "relative to the number"
    assert checks.compared(_check(float("nan"), 1.0), told).status == checks.DIFFERS
    nothing = checks.compared(replace(_check(1.0, 1.0), theirs=lambda _: {}), told)
    assert nothing.status == checks.NOT_COMPARED, "nothing is equal to anything"
    assert nothing.told.startswith("ValueError: theirs have no numbers; ours have x (")


def test_a_row_shows_the_case_that_is_farthest_apart() -> None:
    batches = [case("one turn", seed, sizes=[2, 2]) for seed in (0, 1)]

    def numbers(each: object) -> checks.Numbers:
        return {
            "x": torch.zeros_like(batches[0].mask) if each is batches[0] else torch.ones_like(batches[1].mask)
        }

    found = checks.compared(
        checks.Check(
            what="x",
            called="",
            theirs=numbers,
            ours=lambda each: {"x": torch.zeros_like(each.mask)},
            cases=batches,
        ),
        {},
    )
    assert (found.status, found.theirs, found.ours) == (checks.DIFFERS, "x 1 to 1", "x 0 to 0")
    assert "one turn, seed 1" in found.told


def test_keys_that_a_config_does_not_have() -> None:
    known = {"a": {"b": 1, "open": {}, "none": None}, "c": 2}
    tree = {"a": {"b": 2, "open": {"x": 1}, "none": {"y": 1}, "z": 0}, "d": {"e": 1}}
    assert list(checks.absent(tree, known)) == ["a.z", "d"]
    assert checks.without(tree, ["a.z", "d"]) == {"a": {"b": 2, "open": {"x": 1}, "none": {"y": 1}}}


def test_the_peak_of_an_optimizer_is_not_that_of_its_first_step() -> None:
    """A schedule that is built with it sets the first step's; a vector may be in a group of its own."""
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    made = torch.optim.AdamW([{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}], lr=3e-4)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.0)
    numbers = settings.of_optimizer([made], None)
    assert {name: x.item() for name, x in numbers.items()} == {
        "learning rate": 3e-4,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight decay": 0.01,
        "weight decay of vectors": 0.0,
        "largest gradient norm": 0.0,
    }


def test_greedy_sampling_is_the_same_however_it_is_written() -> None:
    greedy = settings.drawn(temperature=0.0, top_p=0.5, top_k=20, min_p=0.1, replies=1, tokens=8)
    assert greedy == settings.drawn(temperature=0.0, top_p=1.0, top_k=-1, replies=1, tokens=8)
    some = settings.drawn(temperature=1.0, top_p=0.5, top_k=20, replies=1, tokens=8)
    assert (some["top p"].item(), some["top k"].item()) == (0.5, 20.0)

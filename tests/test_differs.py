"""differs.tsv: where whet knowingly differs from a system, and that a user reads it before the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asked import strange_names
from whet.cli import app
from whet.dialects import report
from whet.dialects.listing import differing
from whet.dialects.row import Difference, differences
from whet.dialects.tables import FILES, TABLES, dialect, every_line
from whet.dialects.translate import Translation, translate
from whet.dialects.versions import VERSIONS, covers
from whet.types import Json

EVERY = [(system, each) for system in VERSIONS for each in differences(system)]


def said(made: Translation) -> list[str]:
    return [text for text in report.notes(made) if text.startswith("differs: ")]


def verl(version: str = "0.9.0", **given: Json) -> Translation:
    return translate({"trainer": given}, dialect("verl-ppo", version), origins={})


@pytest.mark.parametrize(("system", "one"), EVERY, ids=lambda x: x.key if isinstance(x, Difference) else x)
def test_each_line_names_what_there_is(system: str, one: Difference) -> None:
    rows = [row for name, (of, _) in TABLES.items() if of == system for row in every_line(name)]
    mine = [row for row in rows if (row.key, row.file) == (one.key, one.file)]
    assert mine, f"{system} has no key {one.key} in its files {one.file!r}"
    assert {one.since, one.until} <= {"", *VERSIONS[system]}
    assert any(covers(one, version, VERSIONS[system]) for version in VERSIONS[system])
    assert one.values == "" or isinstance(json.loads(one.values.removeprefix("!")), list)
    assert one.reason.endswith(".")
    assert strange_names(system, one.when) == []
    assert any(one.reason in differing(row, system) for row in mine), "whet keys and the pages tell it"


@pytest.mark.parametrize(("system", "one"), EVERY, ids=lambda x: x.key if isinstance(x, Difference) else x)
def test_each_line_is_told_of_a_value_that_differs(system: str, one: Difference) -> None:
    """In some release, for some value; with a value that does not differ it is not."""
    kind = next(n for n in FILES if one.file in {TABLES[each][1] for each in (*FILES[n].tables, *FILES[n].optional)}
                and TABLES[FILES[n].tables[0]][0] == system)  # fmt: skip
    version = next(v for v in VERSIONS[system] if covers(one, v, VERSIONS[system]))
    of = dialect(kind, version)
    assert one in of.differences
    listed = json.loads(one.values.removeprefix("!")) if one.values else []
    other = object()
    inside = listed[0] if listed and not one.values.startswith("!") else other
    assert one.of_value(inside)  # type: ignore[arg-type]
    for value in listed:
        assert one.of_value(value) is not one.values.startswith("!")
    if listed:
        assert one.of_value(other) is one.values.startswith("!")  # type: ignore[arg-type]


def test_a_difference_is_told_for_its_values_alone() -> None:
    def warmup(steps: int) -> list[str]:
        return [text for text in said(verl(critic_warmup=steps)) if "critic_warmup" in text]

    (told,) = warmup(5)
    assert told.startswith("differs: trainer.critic_warmup=5: If the length follows")
    assert warmup(1) == []


@pytest.mark.parametrize(("penalty", "lines"), [(1, 0), (1.0, 0), (1.1, 1)])
def test_a_number_is_the_same_with_and_without_a_point(penalty: float, lines: int) -> None:
    rollout = {"mode": "async", "repetition_penalty": penalty}
    made = translate({"actor_rollout_ref": {"rollout": rollout}}, dialect("verl-ppo", "0.9.1"), origins={})
    assert sum("repetition_penalty" in text for text in said(made)) == lines


def test_a_mean_over_sequences_is_told_where_whole_responses_are_rejected() -> None:
    def told(**given: Json) -> int:
        actor = {"actor": {key: value for key, value in given.items() if key == "loss_agg_mode"}}
        correction = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "2"}
        correction |= {key: value for key, value in given.items() if key == "bypass_mode"}
        tree = {"actor_rollout_ref": actor, "algorithm": {"rollout_correction": correction}}
        made = translate(tree, dialect("verl-ppo", "0.9.0"), origins={})
        return sum("counts in no mean over sequences" in text for text in said(made))

    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    assert [told(loss_agg_mode=mode) for mode in modes] == [0, 1, 1]
    assert told(loss_agg_mode="seq-mean-token-mean", bypass_mode=True) == 0


def test_sampling_that_agent_loops_lose_is_told() -> None:
    def told(version: str, **given: Json) -> list[str]:
        made = translate({"actor_rollout_ref": {"rollout": given}}, dialect("verl-ppo", version), origins={})
        return [text.split("=")[0].split(".")[-1] for text in said(made) if ".rollout." in text]

    lost = {"top_k": 20, "repetition_penalty": 1.1, "val_kwargs": {"top_k": 5, "do_sample": True}}
    assert told("0.7.0", **lost) == ["top_k", "repetition_penalty", "top_k"]
    assert told("0.9.0", **lost) == ["repetition_penalty"]
    assert told("0.6.0", mode="sync", **lost) == []


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_schedule_that_ends_early_in_skyrl_is_told(role: str) -> None:
    def told(version: str, scheduler: str, **trainer: Json) -> int:
        sections = {
            role: {"optimizer_config": {"scheduler": scheduler}},
            "algorithm": {"advantage_estimator": "gae"},
        }
        tree = {"trainer": {"train_batch_size": 8, f"{role}_mini_batch_size": 8, **sections, **trainer}}
        made = translate(tree, dialect("skyrl", version), origins={})
        return sum(f"{role}.optimizer_config.scheduler" in text for text in said(made))

    several: Json = {f"{role}_mini_batch_size": 4}
    assert (
        told("train-0.3", "cosine", **several) == told("train-0.3", "linear", update_epochs_per_batch=2) == 1
    )
    assert told("train-0.3", "cosine") == told("train-0.4", "cosine", **several) == 0
    assert told("train-0.3", "constant_with_warmup", **several) == 0


def test_the_schedule_of_the_older_sft_trainer_is_as_long_as_its_epochs() -> None:
    def told(model: Json, steps: int | None) -> int:
        tree = {"model": model, "trainer": {"total_training_steps": steps}}
        made = translate(tree, dialect("verl-sft", "0.6.0"), origins={})
        return sum("as long as total_epochs" in text for text in said(made))

    assert [
        told({"partial_pretrain": "m"}, 9),
        told({"partial_pretrain": "m"}, None),
        told({"path": "m"}, 9),
    ] == [1, 0, 0]


def test_a_decay_of_a_share_of_unknown_steps_is_told() -> None:
    def told(**train: Json) -> int:
        tree = {"train": {"optm_decay_ratio": 0.3, "optm_decay_type": "linear", **train}}
        made = translate(tree, dialect("cosmos-grpo", "0.4.4"), origins={})
        return sum("rounds to the nearest whole number" in text for text in said(made))

    assert [told(), told(max_num_steps=9), told(optm_decay_type=None), told(optm_decay_ratio=None)] == [
        1,
        0,
        0,
        0,
    ]


def test_steps_over_parts_of_groups_are_told() -> None:
    """Those of Cosmos's own defaults, 8 responses and groups of 16."""

    def told(kind: str = "cosmos-grpo", **train: Json) -> int:
        made = translate({"train": train}, dialect(kind, "0.4.4"), origins={})
        return sum("several steps of Cosmos are one step here" in text for text in said(made))

    assert [told(), told(train_batch_per_replica=24), told(train_batch_per_replica=16)] == [1, 1, 0]
    assert told("cosmos-sft") == 0


def test_a_default_that_differs_is_told() -> None:
    """SkyRL's KL in the loss is on where a file does not say so."""

    def told(**given: Json) -> int:
        made = translate({"trainer": {"algorithm": given}}, dialect("skyrl", "0.3"), origins={})
        return sum("SkyRL's is always a mean over sequences" in text for text in said(made))

    assert [told(), told(use_kl_loss=True), told(use_kl_loss=False)] == [1, 1, 0]
    assert told(loss_reduction="sequence_mean") == 0


def test_a_difference_is_told_in_its_releases_alone() -> None:
    def kl(version: str) -> int:
        tree: Json = {"trainer": {"algorithm": {"use_kl_loss": True}}}
        made = translate(tree, dialect("skyrl", version), origins={})
        return sum(text.count("without one") for text in said(made))

    assert [kl("doc"), kl("train-0.1"), kl("0.1"), kl("0.2")] == [0, 1, 1, 0]


def test_tokens_of_weight_0_beside_rejected_ones() -> None:
    def averages(**given: Json) -> int:
        tree: Json = {"algorithm": {"rollout_correction": {"rollout_rs": "token_k2", **given}}}
        made = translate(tree, dialect("verl-ppo", "0.9.0"), origins={})
        return sum("in verl they still count in them" in text for text in said(made))

    both = {"rollout_rs_threshold": "0.1", "rollout_is": "token"}
    assert averages(**both, rollout_is_threshold="0.5_2") == 1
    assert averages(**both, rollout_is_threshold=2.0) == 0
    assert averages(rollout_rs_threshold="0.1") == 0


def test_the_penalty_of_kl_cov() -> None:
    def told(kind: str, version: str) -> int:
        tree: Json = {"trainer": {"algorithm": {"policy_loss_type": kind, "kl_cov": {"ppo_kl_coef": 0.5}}}}
        made = translate(tree, dialect("skyrl", version), origins={})
        return sum("a sum over the chosen tokens" in text for text in said(made))

    assert [told("kl_cov", "0.1"), told("kl_cov", "0.3"), told("regular", "0.3")] == [0, 1, 0]


def test_steps_of_turns_are_told() -> None:
    """Of workflows that give an experience for each turn, under the key that counts them; given or not."""

    def told(workflow: str, **given: Json) -> list[str]:
        sets = {"taskset": {"path": "a.jsonl", "default_workflow_type": workflow}}
        tree: Json = {"buffer": {"explorer_input": sets, **given}}
        made = translate(tree, dialect("trinity", "0.6.0"), origins={})
        return [text for text in said(made) if "A step trains on all turns" in text]

    (turns,) = told("step_wise_alfworld_workflow", train_batch_size=7680)
    assert turns.startswith("differs: buffer.train_batch_size=7680: ")
    assert len(told("sudoku_workflow")) == 1
    assert told("alfworld_workflow", train_batch_size=7680) == told("math_workflow") == []


def test_true_is_not_1() -> None:
    one = Difference(file="", key="k", since="", until="", values="[1]", when="", reason="R.")
    assert [one.of_value(value) for value in (1, True, 1.0)] == [True, False, True]


def test_the_plan_of_a_file_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = Path("tests/dialects/trinity_letters.yaml").read_text()
    file.write_text(text.replace("simple_workflow", "math_boxed_workflow"))
    done = CliRunner().invoke(app, ["plan", str(file)], env={"MODEL_PATH": str(tmp_path)})
    assert "differs: buffer.explorer_input.default_workflow_type" in " ".join(done.output.split()), (
        done.output
    )


def test_what_an_sft_file_does_not_read_differs_from_nothing() -> None:
    taskset = {
        "path": "tasks",
        "default_workflow_type": "sudoku_workflow",
        "task_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["rate"]},
    }
    replays = {"path": "replies", "replay_buffer": {"reuse_cooldown_time": 1.0}}
    buffer = {
        "train_batch_size": 4,
        "explorer_input": {"taskset": taskset, "default_workflow_type": "math_workflow"},
        "trainer_input": {"experience_buffer": replays},
    }
    timeout = {"enable": True, "ratio": 2.0}

    def told(kind: str) -> set[str]:
        tree = {
            "algorithm": {"algorithm_type": kind},
            "buffer": buffer,
            "explorer": {"dynamic_timeout": timeout},
        }
        found = said(translate(tree, dialect("trinity"), origins={}))
        return {text.split("=")[0].split(".")[-1] for text in found} - {"loss_agg_mode", "enable_thinking"}

    assert told("sft") == set()
    read = {"default_workflow_type", "selector_type", "train_batch_size", "ratio", "repeat_times"}
    assert told("grpo") == read

"""docs/algorithms.md, `whet keys --algorithms` and the learning benchmark name all there is, and tell the truth."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import whet.track.monitor
from whet.algos.advantages import ADVANTAGES
from whet.algos.aggregate import AGGREGATIONS
from whet.algos.kl import ESTIMATORS, RATIO_ESTIMATORS
from whet.algos.losses import LOSSES, LOSSES_OVER
from whet.algos.resample import RESAMPLE
from whet.batch import Outputs
from whet.cli import keys as keys_command
from whet.config import schema
from whet.config.algorithms_listing import choices, in_words, listed
from whet.config.functions import LOSSES as FUNCTIONS
from whet.config.functions import RESAMPLINGS, UNIFORM, WEIGHTS
from whet.config.recipes import RECIPES, resolve
from whet.prove.pictures import make_batch
from whet.types import ConfigError

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def table(heading: str, number: int = 0) -> dict[str, dict[str, str]]:
    """Rows of a table under a heading by each name in their first cell; cells by the head of their column."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = [b.splitlines() for b in re.findall(r"(?:^\|.*\n)+", section + "\n", flags=re.MULTILINE)]
    heads = cells(blocks[number][0])
    rows = [dict(zip(heads, cells(line), strict=True)) for line in blocks[number][2:]]
    named = [(name, row) for row in rows for name in re.findall(r"`([^`]+)`", row[heads[0]])]
    assert len(named) == len({name for name, _ in named}), f"{heading}: a name has two rows"
    return dict(named)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def named(code: str) -> object:
    """The function of `module:function`; modules without a dot are those of whet.algos."""
    module, _, name = code.partition(":")
    return getattr(importlib.import_module(module if "." in module else f"whet.algos.{module}"), name)


def code_of(row: dict[str, str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row["code"])


def plain(function: Any) -> object:
    return function.func if isinstance(function, partial) else function


# ---------------------------------------------------------------- the page


def test_every_recipe_has_a_row_that_says_what_it_is_made_of() -> None:
    rows = table("Recipes")
    assert rows.keys() == RECIPES.keys()
    for name, recipe in RECIPES.items():
        row = rows[name]
        assert re.split(r"[ ,;]", row["advantage"])[0] == recipe.advantage, name
        assert re.split(r"[ ,;]", row["loss"])[0] == recipe.loss, name
        assert row["loss_agg_mode"] == recipe.loss_agg_mode, name
        for number in re.findall(r"arXiv:([\d.]+)", recipe.source):
            assert number in row["source"], f"{name}: its source {number} is not in its row"


@pytest.mark.parametrize(("heading", "there"), [("Advantages", ADVANTAGES), ("Losses", LOSSES)])
def test_every_function_has_a_row_with_its_formula_and_its_code(heading: str, there: dict[str, Any]) -> None:
    rows = table(heading)
    assert rows.keys() == there.keys()
    for name, function in there.items():
        assert rows[name]["formula"], f"{name} has no formula"
        wanted = [function]
        if heading == "Losses" and name in LOSSES_OVER:
            wanted.append(LOSSES_OVER[name])
        assert [named(code) for code in code_of(rows[name])] == wanted, name


def test_every_kl_estimator_has_a_row_with_its_code() -> None:
    rows = table("KL estimators")
    assert rows.keys() == set(choices(schema.KlConfig, "estimator"))
    for name, function in (ESTIMATORS | RATIO_ESTIMATORS).items():
        assert [named(code) for code in code_of(rows[name])] == [plain(function)], name
    assert inspect.isfunction(named(code_of(rows["full"])[0]))


def test_every_aggregation_has_a_row_with_its_code() -> None:
    rows = table("Aggregation")
    assert list(rows) == list(AGGREGATIONS)
    assert {code for row in rows.values() for code in code_of(row)} == {"aggregate:weights"}


def test_every_way_to_count_rollouts_has_a_row_with_its_code() -> None:
    rows = table("Groups and counts", 1)
    assert rows.keys() == {*RESAMPLINGS, "refill=copy"}
    for name, function in RESAMPLE.items():
        weight = function.keywords.get("weight") if isinstance(function, partial) else None
        assert [named(code) for code in code_of(rows[name])] == [weight or function], name


def test_every_key_about_groups_has_a_row_with_code_that_exists() -> None:
    rows = table("Groups and counts", 0)
    settings = {f"uniform.{name}" for name in UNIFORM["rewards"].settings.model_fields}
    keys = set(schema.GroupsConfig.model_fields) - {"uniform"} | settings
    assert {name.partition("=")[0] for name in rows} == keys
    assert {f"truncated={value}" for value in choices(schema.GroupsConfig, "truncated")} - {
        "truncated=keep"
    } <= rows.keys()
    assert all(inspect.isfunction(named(code)) for row in rows.values() for code in code_of(row))


def test_every_choice_of_the_correction_has_a_row_with_code_that_exists() -> None:
    rows = [
        dict(zip(("what", "setting", "code"), cells(line)))
        for line in PAGE.split("\n## Off-policy correction\n")[1].split("\n## ")[0].splitlines()
        if line.startswith("|")
    ][2:]
    settings = [row["setting"].strip("`") for row in rows]
    assert {setting.partition(":")[0] for setting in settings} == set(
        schema.CorrectionConfig.model_fields
    ) | set(WEIGHTS["token"].settings.model_fields)
    values = {
        "weight": WEIGHTS,
        "outside": choices(WEIGHTS["token"].settings, "outside"),
        "denominator": choices(schema.CorrectionConfig, "denominator"),
    }
    for key, of_key in values.items():
        assert {f"{key}: {value}" for value in of_key} <= set(settings)
    assert all(inspect.isfunction(named(code)) for row in rows for code in code_of(row))


def names_between(start: str, end: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", PAGE.split(start)[1].split(end)[0]))


def test_the_losses_that_skip_less_are_named() -> None:
    online = {name: row.skips for name, row in FUNCTIONS.items() if row.kind == "online"}
    less = {name for name, skips in online.items() if skips != "no advantage"}
    assert names_between("With every loss on the policy's own rollouts except", ", the weight") == less
    none = {name for name, skips in online.items() if skips == "nothing"}
    assert names_between("Nothing is skipped with", "a user-defined loss") == none


def test_the_losses_that_an_impossible_token_makes_infinite_are_named() -> None:
    batch = make_batch([["pa", "pa"]], [1.0, 0.0])
    zero_N = torch.zeros(batch.tokens).double()
    batch = replace(batch, adv_N=zero_N + 1, logp_ref_N=zero_N - 1, kl_zero_R=zero_N[: batch.rollouts])
    out = Outputs(logp_N=torch.where(batch.mask_N, -torch.inf, zero_N))
    known = {name: row.settings().model_dump() for name, row in FUNCTIONS.items()}
    far = {
        name for name, keys in known.items() if not LOSSES[name](batch, out, **keys).loss_N.isfinite().all()
    }
    given = {name for name, row in FUNCTIONS.items() if row.kind != "online"} - {"kto"}
    said = names_between("A loss that multiplies log pi itself (", "those of given replies but `kto`")
    assert far == said - {"sapo", "sapo_detach"} | given


# ---------------------------------------------------------------- the listing


def of(what: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in listed() if entry["what"] == what}


def test_the_listing_has_every_name() -> None:
    assert of("recipe").keys() == RECIPES.keys()
    assert of("advantage").keys() == ADVANTAGES.keys()
    assert of("loss").keys() == LOSSES.keys()
    assert list(of("aggregation")) == list(AGGREGATIONS)
    assert of("kl").keys() == ESTIMATORS.keys() | RATIO_ESTIMATORS.keys() | {"full"}
    assert of("correction")["weight"]["values"] == ["token", "sequence", "geometric"]
    assert of("correction")["reject[].statistic"]["values"] == ["ratio", "k2", "k3"]


def test_a_listed_recipe_is_what_it_resolves_to() -> None:
    for name, entry in of("recipe").items():
        made = resolve(schema.AlgorithmConfig(name=name))
        assert (entry["advantage"], entry["loss"], entry["loss_agg_mode"]) == (
            made.advantage,
            made.loss,
            made.loss_agg_mode,
        )
        assert set(entry["needs"]) == made.needs
        for key, value in entry["settings"].items():
            part, _, setting = key.partition(".")
            found = (
                made.settings[part].settings[setting] if part in made.settings else getattr(made, key, None)
            )
            assert (made.settings[key].name if key == "mix.loss" else found) == value, (name, key)


def test_a_recipe_in_words() -> None:
    recipes = of("recipe")
    assert in_words(recipes["dapo"]).startswith(
        "grpo + ppo, token-mean; loss.clip_high=0.28; dynamic_sampling=true\n"
    )
    assert "; whiten=true; needs critic\n" in in_words(recipes["ppo"])
    assert "; learns from preferences; needs reference\n" in in_words(recipes["dpo"])
    assert in_words(of("kl")["k1"]) == "in the loss and off the reward"
    assert in_words(of("kl")["full"]) == "in the loss"


def test_the_command_prints_it_without_torch() -> None:
    code = (
        "import sys, whet.cli; sys.argv = ['whet', 'keys', '--algorithms', '--json']\n"
        "try: whet.cli.main()\n"
        "except SystemExit as e: assert not e.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(listed()))


def test_algorithms_and_dialects_are_two_lists() -> None:
    with pytest.raises(ConfigError, match="leave them out"):
        keys_command(dialect="verl", algorithms=True)


# ---------------------------------------------------------------- the benchmark


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("learning")


def test_every_recipe_advantage_and_policy_loss_is_measured(bench: Any) -> None:
    cases = bench.cases()
    assert cases.keys() >= RECIPES.keys()
    assert {case.loss for case in cases.values()} == LOSSES.keys()
    assert {case.advantage for case in cases.values()} == ADVANTAGES.keys()


def test_all_online_cases_use_the_same_number_of_rollouts_but_those_that_say_so(bench: Any) -> None:
    common = {name: case for name, case in bench.cases().items() if not case.example}
    for name, case in common.items():
        sections = bench.settings(case, 0)
        train = sections["train"]
        assert train["steps"] % 9 == 0, (
            "evaluations sync weights: they must fall on the syncs of a stale engine"
        )
        if case.kind == "online":
            own = train["tasks_per_step"] - (4 if "demonstrations" in sections["data"] else 0)
            rollouts = train["steps"] * own * 8
            assert rollouts == 81 * 128 or "fewer steps" in case.why, name
            assert train["steps"] * train["minibatches"] == 2 * 81 or "fewer steps" in case.why, name


def test_calls_are_means_of_some_steps_of_the_last_stage(bench: Any) -> None:
    lines = [
        {"stage": "sft", "rollout/calls_mean": 9.0},
        {"stage": "rl", "ledger/requested_rollouts": 8.0, "rollout/calls_mean": 0.5},
        {"stage": "rl", "eval/accuracy": 0.5},
        {"stage": "rl", "ledger/requested_rollouts": 8.0, "rollout/calls_mean": 1.0},
        {"stage": "rl", "ledger/requested_rollouts": 8.0, "rollout/calls_mean": 2.0},
    ]
    assert bench.calls(bench.of_last_stage(lines), each=2) == [(16, 0.75)]


def test_no_word_is_in_two_parts(bench: Any) -> None:
    parts = [bench.learning_cases.words(part) for part in bench.learning_cases.PARTS]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 12**4


def test_a_curve_counts_the_rollouts_before_each_evaluation(bench: Any) -> None:
    lines = [
        {"eval/accuracy": 0.25},
        {"ledger/requested_rollouts": 128.0},
        {"ledger/requested_rollouts": 64.0},
        {"eval/accuracy": 0.5},
    ]
    assert bench.curve(lines) == [(0, 0.25), (192, 0.5)]
    assert bench.curve(lines, greedy=True) == [(0, 0.25), (216, 0.5)]


def test_a_result_of_other_settings_is_measured_again(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "learning.json")
    case = bench.cases()["grpo"]
    result = {
        "name": "grpo",
        "seed": 0,
        "settings": bench.settings(case, 0),
        "curve": [[0, 0.1]],
        "cpu_s": 1.0,
    }
    old = result | {"seed": 1, "settings": {}}
    bench.write({("grpo", 0): result, ("grpo", 1): old})
    assert bench.open_runs(["grpo", "dpo"], [0, 1]) == [("dpo", 0), ("grpo", 1), ("dpo", 1)]


@pytest.mark.sweep
def test_one_run_from_its_start_to_its_curve(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(whet.track.monitor, "clock", whet.track.monitor.clock)  # which a measurement replaces
    monkeypatch.setattr(bench.learning_cases, "START", bench.learning_cases.START | {"steps": 2})
    small = replace(bench.cases()["grpo"], steps=9)
    monkeypatch.setattr(bench, "cases", lambda: {"small": small})
    bench.imitate(tmp_path, "start", 0)
    made = tmp_path / "start-0" / "metrics.jsonl"
    before = made.stat().st_mtime_ns
    bench.imitate(tmp_path, "start", 0)
    assert made.stat().st_mtime_ns == before, "a start that is there is used again"
    result = bench.measure("small", 0, tmp_path)
    assert [asked for asked, _ in result["curve"]] == [128 * step for step in range(10)]
    assert result["cpu_s"] > 0
    assert result["settings"] == bench.settings(small, 0), "what it is compared with the next time"


def test_tables_show_who_did_not_learn(bench: Any) -> None:
    def ran(name: str, seed: int, end: float) -> dict[str, Any]:
        return {"name": name, "seed": seed, "curve": [[0, 0.25], [128, end]], "cpu_s": 2.0}

    report = bench.learning_report
    found = report.summaries(
        [ran("grpo", 0, 0.75), ran("grpo", 1, 0.5), ran("ppo", 0, 0.75), ran("ppo", 1, 0.2)]
        + [{"name": "dpo", "seed": 0, "error": "it broke"}]
    )
    text = report.tables(found)
    assert "| `grpo` | 0.25 | 0.62 | 0.50 | 128 | 2.0 | |" in text
    assert "| `ppo` | 0.25 | 0.47 | 0.20 | 128 | 2.0 | **not above its start in every seed** |" in text
    assert "stopped: it broke" in text
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    assert report.put(page, text) == f"before\n{report.BEGIN}\n\n{text}\n{report.END}\nafter"
    with pytest.raises(ValueError, match="no lines"):
        report.put("no markers", text)

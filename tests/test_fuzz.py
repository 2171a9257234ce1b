"""The fuzzers find nothing in the readers, and what is planted in them they find.

`make sweep` runs ten thousand cases of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz import checkpoints, readers, replies, runs, servers
from fuzz.case import Case
from fuzz.readers import FUZZERS
from fuzz.run import case, judge, run, verdicts
from whet.config import draft, parse
from whet.config.draft import Draft
from whet.data import columns, files, prepare, tasks, templates
from whet.models import load

ROOT = Path(__file__).parents[1]
CASES = {
    "config": 20, "data": 40, "checkpoint": 30, "template": 40, "reply": 100, "model": 20,
    "run": 30, "adapter": 8, "judge": 8, "server": 150
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("fuzzer", CASES)
def test_no_damaged_input_ends_in_anything_but_a_result_or_a_clear_error(fuzzer: str) -> None:
    counts, faults = run(fuzzer, range(CASES[fuzzer]), tries=3)
    assert not faults, "\n".join(map(str, faults))
    assert counts["refused"] > 0


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_a_case_follows_from_its_number_alone(fuzzer: str) -> None:
    assert [case(fuzzer, n) for n in range(5)] == [case(fuzzer, n) for n in range(5)]
    assert case(fuzzer, 1) != case(fuzzer, 2)


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_what_is_not_damaged_is_read(fuzzer: str, tmp_path: Path) -> None:
    good = {
        "config": {"config.yaml": (ROOT / "examples/first_run.yaml").read_bytes()},
        "data": {"data.jsonl": (ROOT / "tests/data/words.jsonl").read_bytes()},
        "model": readers.model_folder(),
        "checkpoint": checkpoints.files(),
        "template": {"template": readers.MADE_UP[0].encode()},
        "reply": {"hermes": replies.good("hermes").encode()},
        "run": runs.run_files(),
        "adapter": runs.adapter_files(),
        "judge": runs.judge_files(),
        "server": {"vllm": servers.good("vllm")},
    }[fuzzer]
    assert judge(fuzzer, Case(good, next(iter(good)))) == "right"


def test_what_is_damaged_is_every_file_of_the_repository() -> None:
    """Every config file and launch script of the examples, tutorials and tests, and every template of the tests."""
    kinds, folders = (".yaml", ".toml", ".sh"), ("examples", "docs", "tests")
    found = {
        p.relative_to(ROOT).as_posix() for d in folders for p in (ROOT / d).rglob("*") if p.suffix in kinds
    }
    no_config = {name for name in found if re.match(r"docs/tutorials/.*\.sh|tests/(golden|resume)/", name)}
    assert set(readers.configs()) == found - no_config
    assert {p.read_text() for p in (ROOT / "tests").rglob("*.jinja")} == set(readers.REAL)


def test_each_of_them_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where damage leaves the bytes as they are, and no values are exchanged."""
    monkeypatch.setattr(readers, "damaged", lambda random, data: data)
    monkeypatch.setattr(readers, "changed", lambda random, tree: tree)
    monkeypatch.setattr(readers, "TYPED", ())
    monkeypatch.setattr(readers.yaml, "safe_load", lambda text: {})
    for fuzzer, whole in (
        ("config", readers.configs().values()),
        ("template", map(str.encode, readers.REAL)),
    ):
        drawn = {data for n in range(3000) for data in case(fuzzer, n).files.values()}
        assert set(whole) <= drawn


# ---------------------------------------------------------------- planted faults

Plant = Callable[[pytest.MonkeyPatch], None]


def a_key_that_is_looked_up_blindly(patch: pytest.MonkeyPatch) -> None:
    validate = Draft.validate

    def planted(self: Draft) -> Any:
        self.tree["data"]["train"]
        return validate(self)

    patch.setattr(draft.Draft, "validate", planted)


def a_loop_that_does_not_end_on_a_negative_number(patch: pytest.MonkeyPatch) -> None:
    parse = columns.parse

    def planted(row: Any, *args: Any, **kwargs: Any) -> Any:
        while any(isinstance(v, int) and v < 0 for v in row.values()):
            pass
        return parse(row, *args, **kwargs)

    for module in (prepare, tasks):
        patch.setattr(module, "parse", planted)


def memory_for_a_large_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(load, "check_files", lambda *_, **__: None)
    read = load.read_config

    def planted(*asked: Any) -> Any:
        config = read(*asked)
        sizes = (config.vocab_size, config.head_dim, config.num_hidden_layers)
        bytearray(min(max(0, *sizes), 2**20) * 2**20)
        return config

    patch.setattr(load, "read_config", planted)


def recursion_in_c_on_what_nests_deep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parse, "excess", lambda text: None)


def a_wrong_type_that_is_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(columns, "prompt_of", lambda value, *rest: str(value) or "?")


def a_template_without_a_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(templates, "MOST_WORK", 10**18)


def a_call_that_is_silently_text(patch: pytest.MonkeyPatch) -> None:
    read = replies.read_reply
    patch.setattr(replies, "read_reply", lambda *given: replace(read(*given), malformed=None))


def checksums_that_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    from whet import checkpoint

    patch.setattr(checkpoint, "digest", lambda file: Same())


class Same:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


PLANTED: dict[Plant, tuple[str, int, str]] = {
    a_key_that_is_looked_up_blindly: ("config", 0, "KeyError"),
    a_loop_that_does_not_end_on_a_negative_number: ("data", 120, "did not come to an end"),
    memory_for_a_large_number: ("model", 182, "took too much memory"),
    recursion_in_c_on_what_nests_deep: ("config", 1140, "died of SIGSEGV"),
    a_wrong_type_that_is_read: ("data", 0, "wrong, but was read"),
    a_template_without_a_limit: ("template", 420, "did not come to an end"),
    a_call_that_is_silently_text: ("reply", 0, "wrong, but was read"),
    checksums_that_are_not_compared: ("checkpoint", 0, "wrong, but was read"),
}
"""The fuzzer that finds it, the first of the fifty cases in which it does, as what."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzzer, first, said = PLANTED[plant]
    plant(monkeypatch)
    cases = [(n, case(fuzzer, n)) for n in range(first, first + 50)]
    assert any(said in what for _, what in verdicts(fuzzer, cases, cpu_s=1.0))


def test_a_fault_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(path: Path, limit: int | None) -> Any:
        if b"bbeb" in path.read_bytes():
            raise KeyError("bbeb")
        return files.ListPart(str(path), [{"prompt": "a", "answer": "b"}])

    monkeypatch.setitem(files.READERS, ".jsonl", planted)
    _, (fault,) = run(
        "data", [n for n in range(60) if case("data", n).touched == "data.jsonl"][:12], tries=20
    )
    assert fault.what == "KeyError in files.py:_read_file"
    assert b"bbeb" in fault.case.files["data.jsonl"]
    assert len(fault.case.files["data.jsonl"]) < 50

"""`make check-gpu` without a GPU: a failing check is a row, a hanging one ends, the cheap ones pass at small size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import check_gpu  # type: ignore[import-not-found]
from gpu_case import Case, Failed, within  # type: ignore[import-not-found]

CASE = Case("cpu", small=True)


@pytest.mark.parametrize(
    "name",
    [
        "machine",
        "attention of packed batches",
        "engine, float32",
        "engine against trainer, float32",
        "update, float32",
        "8-bit optimizer",
        "offload",
        "decode, tiny",
        "weight sync, tiny",
    ],
)
def test_a_check_passes_at_small_size(name: str) -> None:
    result = check_gpu.one(name, CASE)
    assert result["status"] == "passed", result
    assert check_gpu.told(result)


def test_what_a_cpu_cannot_have_is_skipped_with_the_reason() -> None:
    for name in ("CUDA graphs", "attention over pages, bfloat16"):
        result = check_gpu.one(name, CASE)
        assert result["status"] == "skipped"
        assert "needs CUDA" in result["why"]


def test_an_error_is_a_row_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(case: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel image is available [sm_61]")

    table = {"broken": (5, broken), "fine": (5, lambda case: {"share": 0.25}), "far": (5, far)}
    monkeypatch.setattr(check_gpu, "rows", lambda case: table)
    monkeypatch.setattr(check_gpu, "apart", lambda name, case, *_: check_gpu.one(name, case))
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--device", "cpu", "--out", str(tmp_path / "out.json")])
    assert check_gpu.main() == 1
    said = capsys.readouterr().out
    assert "RuntimeError: no kernel image is available [sm_61]" in said
    assert "the gap is 2, at most 1 is right" in said
    assert "2 of 3 failed: broken, far" in said
    assert '"share": 0.25' in (tmp_path / "out.json").read_text()


def far(case: Any) -> dict[str, Any]:
    return {"gap": within("the gap", 2.0, 1.0)}


def test_a_bound_refuses_what_is_no_number() -> None:
    with pytest.raises(Failed, match="nan"):
        within("the gap", float("nan"), 1.0)


def test_a_check_that_takes_too_long_is_ended() -> None:
    result = check_gpu.apart("machine", CASE, 0.2)
    assert (result["status"], result["why"]) == ("failed", "took longer than 0 s")

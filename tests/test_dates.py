"""What a chat template is told is today: one day for a whole run, whenever it goes on."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import whet
from encoded import encode_prompt
from tiny import RUN
from whet.config.schema import TokenizerConfig
from whet.data.chat import render, set_day
from whet.data.codec import MessageCodec
from whet.data.tokenizer import load_tokenizer
from whet.start import began
from whet.types import ConfigError, Message

ROOT = Path(__file__).parents[1]
DATED = "{{ strftime_now('%Y-%m-%d %H:%M:%S %A') }} {% for m in messages %}{{ m.content }}{% endfor %}"
QUESTION = Message("user", "q")


def made(template: str = DATED, date: str | None = None, day: date | None = None) -> Any:
    cfg = TokenizerConfig(build="chars", chat_template=template, date=date)
    return load_tokenizer(cfg, model_path=None, texts=["".join(map(chr, range(32, 127)))], day=day)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def test_a_template_is_told_the_day_at_midnight() -> None:
    assert render(made(date="2026-01-31"), [QUESTION]) == "2026-01-31 00:00:00 Saturday q"
    assert render(made(day=date(2025, 2, 3)), [QUESTION]) == "2025-02-03 00:00:00 Monday q"
    assert render(made(date="2026-01-31", day=date(2025, 2, 3)), [QUESTION]).startswith("2026-01-31")
    before, text = today(), render(made(), [QUESTION])
    assert text[:10] in (before, today())


def test_every_way_to_tokens_is_told_the_same_day() -> None:
    tokenizer = made(date="2026-01-31")
    ids = encode_prompt(tokenizer, (QUESTION,))
    assert tokenizer.decode(ids).startswith("2026-01-31 00:00:00")
    assert MessageCodec(tokenizer).encode_prompt([QUESTION]) == ids
    set_day(tokenizer, date(2026, 2, 1))
    assert tokenizer.decode(encode_prompt(tokenizer, (QUESTION,))).startswith("2026-02-01")


def test_an_exported_tokenizer_asks_for_its_own_day(tmp_path: Path) -> None:
    made(date="2026-01-31").save_pretrained(tmp_path)
    assert load_tokenizer(TokenizerConfig(), model_path=str(tmp_path)).chat_template == DATED
    assert not any("2026" in path.read_text() for path in tmp_path.glob("*.json"))


def test_a_date_without_effect_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.date: the chat template does not ask for the date"):
        made("{{ messages[0].content }}", date="2026-01-31")
    for wrong in ("tomorrow", "2026-02-30", "20260131"):
        with pytest.raises(
            ConfigError, match=rf"'{wrong}' is not a date; expected a date such as 2026-01-31"
        ):
            whet.train(**RUN | {"run_dir": str(tmp_path), "tokenizer": {**RUN["tokenizer"], "date": wrong}})


def test_the_day_on_which_a_run_began(tmp_path: Path) -> None:
    home, other = tmp_path / "run", tmp_path / "other"
    checkpoint = other / "checkpoints" / "0-000001"
    checkpoint.mkdir(parents=True)
    home.mkdir()
    before = today()
    assert began(home).isoformat() in (before, today())
    assert began(home, checkpoint).isoformat() in (before, today())
    starts = [{"started_utc": f"2026-01-3{n}T23:59:59+00:00"} for n in (0, 1)]
    (other / "manifest.json").write_text(json.dumps({"starts": starts}))
    assert began(home, checkpoint) == date(2026, 1, 30)
    elsewhere = tmp_path / "disk" / "saved"  # dirs.checkpoints
    elsewhere.parent.mkdir()
    checkpoint.parent.rename(elsewhere)
    checkpoint.parent.symlink_to(elsewhere)
    (elsewhere / ".whet-run").write_text(f"{other}\n")
    assert began(home, checkpoint) == began(home, elsewhere / checkpoint.name) == date(2026, 1, 30)
    (home / "manifest.json").write_text(json.dumps({"starts": starts[1:]}))
    assert began(home, checkpoint) == began(home) == date(2026, 1, 31)


def test_a_run_that_goes_on_next_year_tells_the_day_on_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    """Without that its prompts would be others, and the data's digest would not let it go on."""
    template = (
        "{{ 'aaa' if strftime_now('%Y') == '2031' else 'aa' }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    more = {
        "tokenizer": {**RUN["tokenizer"], "chat_template": template},
        "data": {**RUN["data"], "chat": True, "max_prompt_tokens": 16},
        "checkpoint": {"interval": 1, "export": False},
    }

    def told(name: str, steps: int) -> list[int]:
        """How many tokens the template adds to the prompts, in the order of the steps."""
        over = [f"train.steps={steps}", f"run_dir={tmp_path / name}"]
        whet.train(**{**RUN, **more}, overrides=over)
        files = sorted((tmp_path / name / "rollouts").glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        prompts = [row["prompt"].removeprefix("user: ") for row in rows]
        return [len(row["mask"]) - sum(row["mask"]) - len(text) for row, text in zip(rows, prompts)]

    assert told("run", 1) == [2] * 8
    monkeypatch.setattr("whet.start.datetime", Later)
    assert told("run", 2) == [2] * 16
    assert told("later", 1) == [3] * 8


class Later(datetime):
    """Stands at 2031."""

    @classmethod
    def now(cls, tz: Any = None) -> Later:
        return cls(2031, 1, 2, tzinfo=tz)

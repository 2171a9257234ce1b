"""The viewer's pages in a real browser, over real and damaged runs: what they show, keys, filters, hostile text, size.

`make test-view` runs these tests alone and leaves a picture of each page in build/view/.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import whet
from browser import Browser, find
from tiny import RUN
from whet.config.parse import parse
from whet.envs.tools import fit
from whet.track.files import RunLock
from whet.track.record import RunDirectory
from whet.track.timeline import STEPS, Timeline
from whet.track.written import ROLLOUTS
from whet.types import Message, Rollout, Strand, Task, ToolCall, Turn
from whet.view.export import write_report
from whet.view.server import ViewerServer
from whet.view.source import ShownRuns, find_runs

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine; `apt-get install chromium`"),
]

PICTURES = os.environ.get("VIEW_PICTURES")
TABS = ("", "/rollouts", "/rewards", "/ledger", "/timeline", "/mismatch", "/evals")
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
UNSEEN = "a\u202eb\u200b\x1b[2Jc"
SHOWN = "a⟨202E⟩b⟨200B⟩⟨001B⟩[2Jc"
WORDS = ["ask>", "one", " two", "\n", HOSTILE, UNSEEN, "<end>"]


# ---------------------------------------------------------------- runs


def strand(ids: list[int], mask: list[int], *turns: Turn) -> Strand:
    """Sampled token n has log-prob -n / 8 and was sampled with -n / 16, by version 41."""
    on = np.array(mask, bool)
    place = np.arange(len(ids))
    return Strand(
        token_ids=ids,
        mask=on,
        logprobs=np.where(on, -place / 8, 0.0),
        sample_logprobs=np.where(on, -place / 16, 0.0),
        versions=np.where(on, 41, -1),
        turns=turns,
    )


def hostile_run(path: Path) -> None:
    """Text that would be markup, or is not seen; two strands; thoughts, calls, a malformed reply; a fault."""
    run = RunDirectory(path, ["rl"])
    run.write_config(yaml.safe_dump({"name": HOSTILE, "stages": [{"name": "rl"}]}))
    messages = (
        Message("assistant", "", reasoning=HOSTILE, tool_calls=(ToolCall("look", {"at": HOSTILE}, "c1"),)),
        Message("tool", UNSEEN, tool_call_id="c1", name="look"),
        Message("assistant", "one two", malformed=f"no call: {HOSTILE}"),
    )
    first = strand([0, 1, 2, 3, 4, 5], [0, 1, 1, 0, 1, 0], Turn(1, 3, "stop", calls=1, reward=0.25))
    second = strand([0, 1, 2, 6, 1, 1], [0, 0, 0, 0, 1, 1], Turn(4, 6, "length", calls=0, malformed=HOSTILE))
    task = Task(uid=7, source=HOSTILE, prompt=f"ask> {HOSTILE}", answer=HOSTILE)
    rows = [
        Rollout(
            task=task,
            index=0,
            strands=(first, second),
            finish_reason="length",
            stop_reason="malformed",
            messages=messages,
            text=f"one two {HOSTILE}",
            reward=1.0,
            reward_parts={HOSTILE: 1.0, "form": 0.5},
        ),
        Rollout(
            task=task,
            index=1,
            strands=(first,),
            finish_reason="abort",
            text=UNSEEN,
            error=f"broke: {HOSTILE}",
        ),
        Rollout(
            task=task,
            index=2,
            strands=(first,),
            finish_reason="stop",
            text="one twice",
            reward=0.0,
            reward_parts={HOSTILE: 0.0, "form": 0.5},
        ),
    ]
    for step in (1, 2):
        run.log(
            "rl",
            step,
            metrics={"reward/mean": 0.5, "rollout/count": 3, "rollout/failed_count": 1},
            timings={"time/step_s": 1.0},
        )
        run.write_rollouts("rl", step, rows, advantages=[1.0, None, -1.0])
    run.close()
    (path / "export").mkdir()
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="ask>"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(path / "export" / "tokenizer.json"))
    (path / "run.log").write_text(f"2026-01-01T00:00:00Z WARNING whet: {HOSTILE}\n")


def train(path: Path, **sections: Any) -> None:
    whet.train(**{**RUN, **sections}, run_dir=str(path))


def agent_run(path: Path) -> None:
    """Two steps of each stage of the example with a tool."""
    given = parse(Path("examples/tools/look_up.yaml").read_text()).tree
    given["data"]["eval"] = []
    for stage in given["stages"]:
        stage["train"] = {"steps": 2, "tasks_per_step": 4}
        stage.pop("eval", None)
    whet.train(**given, run_dir=str(path), track={"trackers": ["jsonl"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories of every kind, by name."""
    folder = tmp_path_factory.mktemp("runs")
    held_out = folder / "held_out.jsonl"
    words = ("aaaae", "abcde", "edcba", "cacac")
    held_out.write_text("".join(json.dumps({"prompt": f"{w}>", "answer": w[::-1]}) + "\n" for w in words))
    evaluated = {**RUN["data"], "eval": [{"name": "held-out", "path": str(held_out)}]}
    track = {"trackers": ["jsonl"], "batches_interval": 1}
    train(folder / "single", data=evaluated, eval={"interval": 1}, track=track)
    train(folder / "again", data=evaluated, eval={"interval": 1}, seed=5)
    train(folder / "async", rollout={**RUN["rollout"], "max_staleness": 2, "schedule": "async"})
    agent_run(folder / "agent")
    hostile_run(folder / "hostile")
    (folder / "empty").mkdir()
    (folder / "empty" / "run.log").write_text("")
    damaged = folder / "damaged"
    hostile_run(damaged)
    (damaged / "rollouts" / "rl-step-000002.parquet").write_bytes(b"PAR1 not a parquet file PAR1")
    (damaged / "metrics.jsonl").write_text(
        '{"stage": "rl", "step": 1}\nnot JSON\n{"stage": "rl", "step": 2}\n'
    )
    return folder


@contextmanager
def served(*paths: Path) -> Iterator[str]:
    """The address of a server over run directories, in a thread."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    server = ViewerServer(ShownRuns(find_runs(paths), paths))

    def serve() -> None:
        loop.run_until_complete(server.start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(server.stop())

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(60)
    try:
        yield server.url
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(opened: Browser) -> Iterator[Browser]:
    """The browser; whatever it reports as wrong fails the test."""
    opened.ask("Page.navigate", url="about:blank")  # the page of the test before asks on
    opened.evaluate("0")
    opened.problems.clear()
    opened.refused.clear()
    opened.asked.clear()
    opened.move(0, 0)
    yield opened
    assert opened.problems == []


@pytest.fixture
def runs(folder: Path) -> dict[str, str]:
    """Numbers of the runs, by name."""
    return {path.name: str(n) for n, path in enumerate(find_runs([folder]))}


def picture(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.screenshot(Path(PICTURES) / f"{name}.png")


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)"
    )


def count(browser: Browser, selector: str) -> int:
    return browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def written(folder: Path, run: str, stage: str, step: int) -> pa.Table:
    """A file of rollouts as the run has written it."""
    return pq.read_table(folder / run / "rollouts" / f"{stage}-step-{step:06d}.parquet")


# ---------------------------------------------------------------- tests


def test_large_numbers_are_shortened_to_three_digits(browser: Browser, address: str) -> None:
    """120,000 tokens are 120k: only zeros after a point are left out."""
    wanted = {
        0: "0", 12.5: "12.5", 100: "100", 999: "999", 999.9: "1k", 1200: "1.2k", 12_345: "12.3k", 100_000: "100k",
        120_000: "120k", 500_000: "500k", 999_600: "1M", 150e6: "150M", 999.6e6: "1G", 5e13: "50000G", -2e5: "−200k",
    }  # fmt: skip
    browser.go(f"{address}#/")
    call = f"import('/dom.js').then(dom => {json.dumps(list(wanted))}.map(dom.short))"
    assert browser.evaluate(call) == list(wanted.values())


def test_a_chart_of_numbers_whose_neighbours_are_far_apart_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """From 2^53 on a number plus one may be the same number: steps of an axis are counted, not added."""
    run = RunDirectory(tmp_path / "run", ["rl"])
    for step in (1, 2):
        run.log("rl", step, metrics={"reward/mean": 1.7e18 + 256 * step}, timings={})
    run.close()
    with served(tmp_path / "run") as url:
        browser.go(f"{url}#/run/0")
        assert "2 values" in browser.evaluate("document.querySelector('[data-chart] svg').ariaLabel")
        ticks = "import('/plot.js').then(plot => [plot.ticks(-0.3, 0.3, 4), plot.ticks(2e17, 2e17 + 64)])"
        assert browser.evaluate(ticks) == [[-0.2, 0, 0.2], [2e17]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_of_every_run_opens(
    browser: Browser, address: str, runs: dict[str, str], dark: bool
) -> None:
    """Without an error of the page, nothing forbidden by its policy, and no address but the server's."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.ask("Emulation.setEmulatedMedia", features=[scheme])
    browser.go(f"{address}#/")
    assert count(browser, "[data-run]") == len(runs)
    picture(browser, f"runs-{scheme['value']}")
    for name, run in runs.items():
        for tab in TABS:
            browser.go(f"{address}#/run/{run}{tab}")
            told = texts(browser, "[data-error]")
            assert told == [] or name == "damaged", f"{name}{tab}: {told}"
            picture(browser, f"{name}-{tab[1:] or 'overview'}-{scheme['value']}")
    assert [url for url in browser.asked if not url.startswith(address)] == []
    assert [url for url in browser.refused if f"/runs/{runs['damaged']}/" not in url] == []
    browser.ask("Emulation.setEmulatedMedia", features=[])


def test_no_chart_is_wider_than_a_narrow_page(browser: Browser, address: str, runs: dict[str, str]) -> None:
    """The end of a timeline was cut off: its part of the page does not scroll."""
    narrow = {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    browser.ask("Emulation.setDeviceMetricsOverride", **narrow)
    try:
        for tab in ("", "/rewards", "/timeline", "/evals"):
            browser.go(f"{address}#/run/{runs['single']}{tab}")
            assert count(browser, ".plot svg") > 0
            over = "[...document.querySelectorAll('.plot')].map(one => one.firstChild.clientWidth - one.clientWidth)"
            assert max(browser.settled(over)) <= 0, tab
    finally:
        browser.ask("Emulation.setDeviceMetricsOverride", **{**narrow, **browser.size})


def test_the_list_of_runs_says_how_each_is(browser: Browser, address: str, runs: dict[str, str]) -> None:
    browser.go(f"{address}#/")
    state = "[...document.querySelectorAll('[data-run]')].map(one => one.querySelector('[data-state]').dataset.state)"
    states = dict(zip(runs, browser.evaluate(state)))
    assert (states["single"], states["empty"]) == ("finished", "not running")
    assert states["damaged"] == "damaged"
    single = "[...document.querySelector('[data-run=\"RUN\"]').cells].slice(1).map(one => one.innerText)"
    assert "–" not in browser.evaluate(single.replace("RUN", runs["single"])), "every column is filled"
    browser.go(f"{address}#/run/{runs['empty']}/rollouts")
    assert texts(browser, "[data-empty]") == ["No rollouts are recorded yet."]
    browser.go(f"{address}#/run/{runs['damaged']}/rewards")
    assert "is not JSON" in texts(browser, "[data-error]")[0], "not that it has no stages"
    browser.go(f"{address}#/")
    ticked = [runs["again"], runs["single"]]
    for run in ticked:
        browser.evaluate(f"document.querySelector('[data-run=\"{run}\"] input').click()")
    browser.evaluate("document.querySelector('[data-act=compare]').click()")
    browser.wait("document.body.dataset.page === 'compare' && document.body.dataset.ready")
    assert browser.evaluate("location.hash") == f"#/compare?a={ticked[0]}&b={ticked[1]}"
    keys = texts(browser, "[data-table=config] tbody td:first-child")
    assert "seed" in keys
    assert browser.evaluate("document.querySelector('[data-first]').dataset.first") != "none"
    picture(browser, "compare")


def test_curves_are_those_that_were_chosen(browser: Browser, address: str, runs: dict[str, str]) -> None:
    """Chosen, smoothed and zoomed curves are in the address, so that a reload shows them again."""
    browser.go(f"{address}#/run/{runs['single']}?m=reward%2Fmean")
    assert count(browser, "[data-chart]") == 1
    browser.evaluate(
        "(() => { const input = document.querySelector('[data-add=metric]'); input.value = 'train/grad_norm';"
        " input.dispatchEvent(new Event('change')); })()"
    )
    browser.wait("document.querySelectorAll('[data-chart]').length === 2")
    assert texts(browser, ".chip") == ["train/grad_norm×", "reward/mean×"]
    bounds = "document.querySelector('[data-chart] svg').getBoundingClientRect()"
    box = browser.settled(f"(({{x, y, width, height}}) => [x, y, width, height])({bounds})")
    middle = box[1] + box[3] / 2
    browser.drag((box[0] + 0.4 * box[2], middle), (box[0] + 0.8 * box[2], middle))
    assert "zoom=" in browser.wait("location.hash.includes('zoom=') && location.hash")
    browser.reload()
    assert texts(browser, ".chip") == ["train/grad_norm×", "reward/mean×"]
    browser.evaluate("document.querySelector('[data-chart] svg').focus()")
    browser.press("ArrowRight")
    assert browser.wait("document.querySelector('.tip:not([hidden])')?.textContent").count("step") == 1


def test_curves_of_any_name_are_drawn_and_linked(browser: Browser, tmp_path: Path) -> None:
    """The label of a source comes from the data: it may have commas, new lines and what has a meaning in an address."""
    parts = {"a, b": ", b", "a\nb": "source/a", "#&=%2C+": "%2C", "__proto__": "proto", "\u202eé/..": "é"}
    names = [f"reward/source/{label}_mean" for label in parts]
    for name in ("one", "two"):
        run = RunDirectory(tmp_path / name, ["rl"])
        for step in (1, 2):
            numbers = {name: float(10 * n + step) for n, name in enumerate(names)}
            run.log("rl", step, metrics=numbers, timings={})
        run.close()
    label = "one => [one.dataset.chart, one.querySelector('svg').ariaLabel]"
    charts = f"[...document.querySelectorAll('[data-chart]')].map({label})"
    wanted = {name: f"{name}: from {10 * n + 1} to {10 * n + 2}, 2 values" for n, name in enumerate(names)}
    with served(tmp_path) as url:
        browser.go(f"{url}#/run/0?m=nothing")
        for number, part in enumerate(parts.values(), 1):
            choose = f"one => {{ one.value = {json.dumps(part)}; one.dispatchEvent(new Event('change')) }}"
            browser.evaluate(f"({choose})(document.querySelector('[data-add=metric]'))")
            browser.wait(f"document.querySelectorAll('[data-chart]').length === {number}")
        assert dict(browser.evaluate(charts)) == wanted
        address = browser.evaluate("location.href")
        for page in (address, address.replace("#/run/0?", "#/compare?a=0&b=1&")):
            browser.go(page)
            assert dict(browser.evaluate(charts)) == wanted


def test_filters_show_the_rollouts_that_the_files_have(
    browser: Browser, address: str, runs: dict[str, str], folder: Path
) -> None:
    steps = [written(folder, "single", "main", step) for step in (1, 2, 3)]
    rewards = np.concatenate([table["reward"].to_numpy() for table in steps])
    middle = float(np.median(rewards))
    here = f"{address}#/run/{runs['single']}/rollouts"
    for query, expected in (
        ("", len(rewards)),
        ("?step_from=2&step_to=2", steps[1].num_rows),
        (f"?reward_from={middle}", int((rewards >= middle).sum())),
        ("?fault=1", sum(pc.sum(pc.is_valid(table["error"])).as_py() for table in steps)),
        ("?uid=0", sum(pc.sum(pc.equal(table["uid"], 0)).as_py() or 0 for table in steps)),
    ):
        browser.go(here + query)
        assert browser.evaluate("Number(document.querySelector('.virtual').dataset.rows)") == expected, query
    browser.go(here)
    browser.evaluate("document.querySelector('[data-sort=reward]').click()")
    first = "document.querySelector('.row[data-place=\"0\"]').children[4].textContent"
    assert float(browser.evaluate(first).replace("−", "-")) == pytest.approx(rewards.min(), abs=1e-3)
    browser.evaluate("document.querySelector('[data-sort=reward]').click()")
    assert float(browser.evaluate(first).replace("−", "-")) == pytest.approx(rewards.max(), abs=1e-3)


def test_text_is_searched_in_whole_rollouts(browser: Browser, address: str, runs: dict[str, str]) -> None:
    browser.go(f"{address}#/run/{runs['hostile']}/rollouts")
    assert browser.evaluate("document.body.dataset.shown") == "6"
    browser.press("/")
    browser.press(*"TWICE")
    assert browser.wait("document.body.dataset.shown === '2' && location.hash").endswith("q=TWICE")


def test_keys_walk_through_rollouts(browser: Browser, address: str, runs: dict[str, str]) -> None:
    here = f"#/run/{runs['single']}"
    browser.go(f"{address}{here}/rollouts")
    browser.press("j", "j", "k", "Enter")
    browser.wait("document.body.dataset.page === 'rollout' && document.body.dataset.ready")
    assert browser.evaluate("location.hash") == f"{here}/rollout/main/1/1"
    browser.press("j")
    browser.wait(f"document.body.dataset.ready === '{here}/rollout/main/1/2'")
    browser.press("x")
    browser.wait("document.body.dataset.view === 'text'")
    browser.press("i")
    browser.wait("document.body.dataset.view === 'ids'")
    browser.press("?")
    assert browser.evaluate("document.getElementById('keys').open")
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('keys').open")
    assert browser.evaluate("location.hash").startswith(f"{here}/rollout/main/1/2")
    browser.press("u")
    browser.wait("document.body.dataset.page === 'run' && document.body.dataset.ready")


def test_tokens_show_what_was_recorded_of_them(
    browser: Browser, address: str, runs: dict[str, str], folder: Path
) -> None:
    row = written(folder, "single", "main", 2).slice(3, 1).to_pylist()[0]
    browser.go(f"{address}#/run/{runs['single']}/rollout/main/2/3?view=tokens")
    shown = browser.evaluate(
        "[...document.querySelectorAll('.tokens .token')].map(one => one.dataset.value ?? null)"
    )
    assert [value is not None for value in shown] == [bool(one) for one in row["mask"]]
    for value, logprob in zip(shown, row["logprobs"]):
        assert value is None or float(value.replace("−", "-")) == pytest.approx(logprob, rel=1e-3)
    browser.evaluate("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    card = browser.wait("document.querySelector('[data-card]:not([hidden])')?.textContent")
    assert f"id{row['token_ids'][0]}" in card
    picture(browser, "tokens")
    browser.press("c")
    browser.wait("document.querySelector('.tokens').dataset.color === 'difference'")
    picture(browser, "tokens-difference")
    shown = browser.evaluate(
        "[...document.querySelectorAll('.tokens .sampled')].map(one => one.dataset.value)"
    )
    assert set(shown) == {"0"}, "on one machine the engine's log-probs and the trainer's are equal to the bit"


def test_text_of_models_is_never_markup(browser: Browser, address: str, runs: dict[str, str]) -> None:
    """In every place where text of a model, a data file or a log is shown."""
    here = f"{address}#/run/{runs['hostile']}"
    pages = [
        *TABS,
        "/group/rl/1/7",
        *(f"/rollout/rl/1/0?view={view}" for view in ("tokens", "text", "messages", "ids")),
    ]
    for page in [*pages, "/rollout/rl/1/1", "/rollouts?q=script"]:
        browser.go(here + page)
        assert browser.evaluate("[window.hacked ?? 0, document.scripts.length, document.images.length]") == [
            0,
            1,
            0,
        ], page
        picture(browser, f"hostile{page.replace('/', '-').replace('?', '-')}")
    browser.go(f"{here}/rollout/rl/1/1?view=text")
    assert HOSTILE in browser.evaluate("document.querySelector('[data-fault]').textContent")
    browser.go(f"{here}/rollout/rl/1/0?view=messages")
    assert texts(browser, "[data-role=tool] .said") == [SHOWN]
    assert HOSTILE in browser.evaluate("document.querySelector('[data-thought] .said').textContent")
    browser.go(f"{here}/rollout/rl/1/0?view=tokens")
    assert texts(browser, ".tokens .token")[5] == SHOWN.replace(" ", "·")


def test_strands_show_where_they_fork(browser: Browser, address: str, runs: dict[str, str]) -> None:
    """The second strand begins with three tokens of the first."""
    browser.go(f"{address}#/run/{runs['hostile']}/rollout/rl/1/0?view=tokens&strand=1")
    assert browser.evaluate("document.querySelector('[data-fork]').dataset.fork") == "3"
    assert count(browser, ".tokens .token.shared") == 3
    browser.go(f"{address}#/run/{runs['hostile']}/rollout/rl/1/0?view=messages")
    roles = browser.evaluate("[...document.querySelectorAll('[data-role]')].map(one => one.dataset.role)")
    assert roles == ["prompt", "assistant", "tool", "assistant"]
    assert texts(browser, "[data-call] b") == ["look"]
    assert "reward 0.25" in texts(browser, "[data-turn] > header")[0]
    assert texts(browser, "[data-turn] .flag") == ["malformed"]


def test_an_agents_rollout_opens_as_a_transcript(
    browser: Browser, address: str, runs: dict[str, str], folder: Path
) -> None:
    table = written(folder, "agent", "rl", 2)
    turns = [len(json.loads(one)) for one in table["turns"].to_pylist()]
    row = int(np.argmax(turns))
    browser.go(f"{address}#/run/{runs['agent']}/rollout/rl/2/{row}")
    assert browser.evaluate("document.body.dataset.view") == "messages"
    assert count(browser, "[data-turn]") == turns[row]
    shown = texts(browser, "[data-turn] [data-seconds]")
    assert len(shown) == turns[row]
    assert all(re.fullmatch(r"\S+ s sampling, \S+ s environment", one) for one in shown)
    picture(browser, "transcript")


def test_a_transcript_says_what_was_cut_and_keeps_long_words_in_its_cards(
    browser: Browser, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run", ["rl"])
    results = [fit("a" * 100, 20, "middle")[0], "[executed in 3 ms]", "about... 5 characters too many"]
    messages = [Message("tool", text, tool_call_id=f"c{n}", name="look") for n, text in enumerate(results)]
    rollout = Rollout(
        task=Task(uid=0, source="s", prompt="x" * 5000),
        index=0,
        strands=(strand([0, 1], [0, 1], Turn(1, 2, "stop", calls=0)),),
        finish_reason="stop",
        messages=(Message("assistant", "one"), *messages),
        text="one",
        reward=1.0,
    )
    run.write_rollouts("rl", 1, [rollout], advantages=[0.0])
    run.log("rl", 1, metrics={"reward/mean": 1.0}, timings={})
    run.close()
    with served(tmp_path / "run") as url:
        browser.go(f"{url}#/run/0/rollout/rl/1/0")
        flags = "[...document.querySelectorAll('[data-role=tool]')].map(one => !!one.querySelector('.flag'))"
        assert browser.evaluate(flags) == [True, False, False]
        widths = browser.evaluate(
            "[...document.querySelectorAll('.turn')].map(one => [one.scrollWidth, one.clientWidth])"
        )
        assert [inner for inner, _ in widths] == [outer for _, outer in widths]


def test_a_group_stands_side_by_side(browser: Browser, address: str, runs: dict[str, str]) -> None:
    browser.go(f"{address}#/run/{runs['hostile']}/group/rl/1/7")
    assert browser.evaluate("document.querySelector('[data-columns]').dataset.columns") == "3"
    assert texts(browser, "[data-table=group] tbody td:nth-child(2)") == ["1", "–", "0"]
    picture(browser, "group")


def test_the_error_that_ended_a_run_stands_at_the_top_of_its_page(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hostile_run(run)
    ended = "2026-01-01T00:00:06Z ERROR whet.api: the run ended:"
    (run / "run.log").write_text(f"{ended} 4 of 4 rollouts {HOSTILE}{UNSEEN} (r.py:9)\n")
    with served(run) as address:
        browser.go(f"{address}#/run/0")
        first = ".page section"
        assert texts(browser, "[data-ended] p") == [f"4 of 4 rollouts {HOSTILE}{SHOWN} (r.py:9)"]
        assert browser.evaluate(f"document.querySelector('{first}').matches('[data-ended]')")
        assert browser.evaluate("window.hacked") is None
        picture(browser, "ended")


def test_what_cannot_be_read_is_said(browser: Browser, address: str, runs: dict[str, str]) -> None:
    browser.go(f"{address}#/run/{runs['damaged']}")
    assert "metrics.jsonl" in browser.evaluate("document.querySelector('[data-problems]').textContent")
    browser.go(f"{address}#/run/{runs['damaged']}/rollouts")
    assert browser.evaluate("document.querySelector('.virtual').dataset.rows") == "3"
    assert "rl-step-000002.parquet" in "".join(texts(browser, "[data-problems]"))
    browser.go(f"{address}#/run/{runs['single']}/nowhere")
    assert "no page" in texts(browser, "[data-error]")[0]


def test_an_unknown_rollout_is_said_in_its_place(
    browser: Browser, address: str, runs: dict[str, str]
) -> None:
    browser.go(f"{address}#/run/{runs['single']}/rollout/main/1/999")
    assert len(texts(browser, "[data-error]")) == 1
    assert len(browser.refused) == 1


def test_a_running_run_is_shown_as_it_goes_on(browser: Browser, tmp_path: Path) -> None:
    hostile_run(tmp_path / "run")
    lock = RunLock(tmp_path / "run")
    with served(tmp_path / "run") as url:
        browser.go(f"{url}#/run/0/rollouts")
        assert browser.evaluate("document.querySelector('.virtual').dataset.rows") == "6"
        assert browser.evaluate("document.getElementById('live').textContent") == "live"
        files = tmp_path / "run" / "rollouts"
        later = files / ".later"
        later.write_bytes((files / "rl-step-000002.parquet").read_bytes())
        later.rename(files / "rl-step-000003.parquet")
        browser.wait("document.querySelector('.virtual').dataset.rows === '9'")
        browser.go(f"{url}#/run/0?m=reward%2Fmean")
        with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"stage": "rl", "step": 3, "reward/mean": 0.75}\n')
        browser.wait("document.querySelector('[data-chart] svg').getAttribute('aria-label').includes('0.75')")
        picture(browser, "running")
        lock.release()
        browser.wait("document.querySelector('[data-state]').dataset.state === 'not running'")
        with RunLock(tmp_path / "run"):
            browser.wait("document.querySelector('[data-state]').dataset.state === 'running'")


def test_a_run_that_begins_later_is_listed(browser: Browser, tmp_path: Path) -> None:
    hostile_run(tmp_path / "one")
    with served(tmp_path) as url:
        browser.go(f"{url}#/")
        hostile_run(tmp_path / "another")
        browser.wait("document.querySelectorAll('[data-run]').length === 2")
        assert "2 in view" in texts(browser, "main .bar")[0]
        assert [one.split("/")[-1] for one in texts(browser, ".path")] == ["one", "another"]
        browser.go(f"{url}#/run/1")
        assert browser.evaluate("document.querySelector('.run-header .path').textContent").endswith("another")


def large_run(path: Path, *, steps: int, rows: int, tokens: int = 16) -> None:
    """A run directory whose files have so many rollouts each, of eight rollouts a task and so many tokens."""
    (path / "rollouts").mkdir(parents=True)
    (path / "run.log").write_text("")
    number = np.arange(rows)
    ids = pa.array([list(range(tokens))] * rows, pa.list_(pa.int32()))
    floats = pa.array([[-0.5] * tokens] * rows, pa.list_(pa.float32()))
    columns: dict[str, Callable[[], Any]] = {
        "uid": lambda: number // 8,
        "index": lambda: number % 8,
        "reward": lambda: (number % 8) / 8,
        "advantage": lambda: number % 2 - 0.5,
        "reward_parts": lambda: [[]] * rows,
        "strand_tokens": lambda: [[tokens]] * rows,
        "token_ids": lambda: ids,
        "mask": lambda: [[0, 1] * (tokens // 2)] * rows,
        "logprobs": lambda: floats,
        "sample_logprobs": lambda: floats,
        "versions": lambda: ids,
        "turns": lambda: ["[]"] * rows,
        "messages": lambda: ["[]"] * rows,
        "state": lambda: ["null"] * rows,
        "answer": lambda: ["null"] * rows,
        "source": lambda: ["s"] * rows,
        "finish_reason": lambda: ["stop"] * rows,
        "prompt": lambda: [f"prompt {n // 8}" for n in number],
        "text": lambda: [f"reply {n}" for n in number],
    }
    made = [
        pa.array(columns[field.name](), field.type) if field.name in columns else pa.nulls(rows, field.type)
        for field in ROLLOUTS
    ]
    table = pa.table(made, schema=ROLLOUTS)
    for step in range(1, steps + 1):
        pq.write_table(table, path / "rollouts" / f"rl-step-{step:06d}.parquet")


def test_a_hundred_thousand_rollouts_scroll(browser: Browser, tmp_path: Path) -> None:
    """Only those in sight are elements; the last is reached, filtered and opened."""
    large_run(tmp_path / "large", steps=50, rows=2048)
    with served(tmp_path / "large") as url:
        browser.go(f"{url}#/run/0/rollouts")
        assert browser.evaluate("document.querySelector('.virtual').dataset.rows") == "102400"
        assert count(browser, ".row") < 120
        browser.press("G")
        assert "reply 2047" in browser.wait(
            "document.querySelector('.row[data-place=\"102399\"]')?.textContent"
        )
        browser.evaluate("void (document.querySelector('.rows').scrollTop = 50000 * 26)")
        assert "rl 25" in browser.wait("document.querySelector('.row[data-place=\"50000\"]')?.textContent")
        assert count(browser, ".row") < 120
        browser.press("G", "Enter")
        browser.wait("document.body.dataset.page === 'rollout' && document.body.dataset.ready")
        assert browser.evaluate("location.hash") == "#/run/0/rollout/rl/50/2047"


class LiveRun:
    """A run of 256 rollouts a step that goes on while a page shows it."""

    def __init__(self, path: Path, browser: Browser) -> None:
        self.path, self.browser, self.steps = path, browser, 0
        large_run(path, steps=1, rows=256)
        self.lock = RunLock(path)
        (path / "run.log").write_text("".join(f"line {n}\n" for n in range(60)))
        timeline = Timeline(path / "timeline.json")
        for name in ("generate", "update"):
            with timeline.span(name, STEPS):
                pass
        timeline.flush()
        self.write("rl")
        self.write("rl")

    def write(self, stage: str) -> None:
        """One more step."""
        self.steps += 1
        later = self.path / ".later"
        later.write_bytes((self.path / "rollouts" / "rl-step-000001.parquet").read_bytes())
        later.rename(self.path / "rollouts" / f"{stage}-step-{self.steps:06d}.parquet")
        numbers = {"rollout/count": 256, "reward/mean": self.steps, "train/mismatch_mean_nats": self.steps}
        with (self.path / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"stage": stage, "step": self.steps, **numbers}) + "\n")

    def go_on(self, stage: str = "rl") -> None:
        """One more step, which the page has shown."""
        updates = "(document.body.dataset.updates ?? '0')"
        before = self.browser.evaluate(updates)
        self.write(stage)
        self.browser.wait(f"{updates} !== '{before}'")


@pytest.fixture
def live(browser: Browser, tmp_path: Path) -> LiveRun:
    return LiveRun(tmp_path / "run", browser)


def test_what_is_looked_at_stays_as_the_run_goes_on(browser: Browser, live: LiveRun) -> None:
    """Where a list is scrolled to, what is open, the value that is pointed at, a zoom."""
    with served(live.path) as url:
        browser.go(f"{url}#/run/0/rollouts")
        browser.evaluate("void (document.querySelector('.rows').scrollTop = 5000)")
        live.go_on()
        browser.wait("document.querySelector('.virtual').dataset.rows === '768'")
        assert browser.evaluate("document.querySelector('.rows').scrollTop") == 5000
        browser.go(f"{url}#/run/0/ledger")
        browser.evaluate("document.querySelector('details').open = true")
        live.go_on()
        assert browser.evaluate("document.querySelector('details').open")
        browser.go(f"{url}#/run/0?m=reward%2Fmean")
        browser.evaluate("document.querySelector('[data-chart] svg').focus()")
        browser.press("ArrowRight", "ArrowRight")
        live.go_on()
        browser.press("ArrowRight")
        assert texts(browser, ".tip:not([hidden]) .where") == ["rl step 3"]
        browser.go(f"{url}#/run/0/mismatch")
        plot = "document.querySelector('[data-chart] svg')"
        bounds = browser.settled(f"(({{x, y, width}}) => [x, y, width])({plot}.getBoundingClientRect())")
        x, y, width = bounds
        browser.drag((x + 0.4 * width, y + 50), (x + 0.8 * width, y + 50))
        zoomed = browser.evaluate(f"{plot}.getAttribute('aria-label')")
        live.go_on()
        assert browser.evaluate(f"{plot}.getAttribute('aria-label')") == zoomed
        assert "2 values" in zoomed
        browser.go(f"{url}#/run/0/timeline")
        browser.evaluate("document.querySelector('.lanes svg').focus()")
        seen = "[...document.querySelectorAll('.lanes svg text')].map(one => one.textContent)"
        whole = browser.evaluate(seen)
        browser.press("+")
        zoomed = browser.evaluate(seen)
        live.go_on()
        assert browser.evaluate(seen) == zoomed != whole
        browser.settled("document.querySelector('.lanes svg').clientWidth")
        assert browser.evaluate("document.activeElement.closest('.lanes') !== null")


def test_rollouts_that_come_later_are_searched_and_filtered(browser: Browser, live: LiveRun) -> None:
    with served(live.path) as url:
        browser.go(f"{url}#/run/0/rollouts?q=reply%201")
        assert browser.evaluate("document.body.dataset.shown") == "222"
        stages = "[...document.querySelector('[data-select=stage]').options].map(one => one.value)"
        assert browser.evaluate(stages) == ["", "rl"]
        live.go_on("later")
        assert browser.evaluate("document.body.dataset.shown") == "333"
        assert browser.evaluate(stages) == ["", "later", "rl"]


def test_a_file_that_cannot_be_read_hides_no_other_one(browser: Browser, live: LiveRun) -> None:
    """Neither as it comes, nor from a search: what the search could not read is said, and no row is shown for it."""
    with served(live.path) as url:
        browser.go(f"{url}#/run/0/rollouts")
        (live.path / "rollouts" / "rl-step-000004.parquet").write_bytes(b"PAR1 no parquet file PAR1")
        live.write("rl")
        browser.wait("document.querySelector('.virtual').dataset.rows === '768'")
        assert texts(browser, "[data-problems] li")[0].count("rl-step-000004.parquet") == 1
        find = "one => { one.value = 'reply 255'; one.dispatchEvent(new Event('input')) }"
        browser.evaluate(f"({find})(document.querySelector('[data-filter=q]'))")
        browser.wait("document.body.dataset.shown === '3'")
        assert "1 files could not be searched: " in texts(browser, "[data-count]")[0]
        browser.evaluate("document.querySelector('[data-sort=reward]').click()")
        browser.wait("location.hash.includes('sort=reward')")
        assert browser.evaluate("document.body.dataset.shown") == "3"
        browser.go(f"{url}#/run/0/rewards")
        assert "rl-step-000004.parquet" in texts(browser, "[data-error]")[0]
        assert "3 values" in browser.evaluate("document.querySelector('[data-chart=reward] svg').ariaLabel")


def test_the_log_is_shown_from_its_end(browser: Browser, live: LiveRun) -> None:
    with served(live.path) as url:
        browser.go(f"{url}#/run/0")
        place = "(({top, bottom}) => [top, bottom])(%s.getBoundingClientRect())"
        top, bottom = browser.evaluate(place % "document.querySelector('[data-log]')")
        line_top, line_bottom = browser.evaluate(place % "document.querySelector('[data-log] pre').lastChild")
        assert top <= line_top < line_bottom <= bottom


def test_an_exported_page_needs_no_server(
    browser: Browser, runs: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    """From file://, with nothing asked of anybody; rollouts that it does not bring are named as such."""
    paths = find_runs([folder])
    write_report(paths, tmp_path / "report.html", most=70)
    address = (tmp_path / "report.html").as_uri()
    browser.go(f"{address}#/")
    assert count(browser, "[data-run]") == len(runs)
    assert len(texts(browser, "[data-exported]")) == 1
    picture(browser, "exported")
    for name, run in runs.items():
        for tab in TABS:
            browser.go(f"{address}#/run/{run}{tab}")
            assert texts(browser, "[data-error]") == [] or name == "damaged", f"{name}{tab}"
    here = f"{address}#/run/{runs['hostile']}"
    browser.go(f"{here}/rollouts?q=SCRIPT")
    assert browser.evaluate("document.body.dataset.shown") == "6"
    browser.evaluate("document.querySelector('.row[data-place]:not(.absent)').click()")
    browser.wait("document.body.dataset.page === 'rollout' && document.body.dataset.ready")
    browser.press("t")
    assert browser.wait("document.querySelectorAll('.tokens .token')[5]?.textContent") == SHOWN.replace(
        " ", "·"
    )
    assert browser.evaluate("[window.hacked ?? 0, document.images.length]") == [0, 0]
    browser.go(f"{address}#/run/{runs['single']}/rollout/main/2/999")
    assert "exported without it" in texts(browser, "[data-error]")[0]
    assert {url.partition("#")[0] for url in browser.asked if not url.startswith("data:")} == {address}


def test_evaluations_show_what_flipped(
    browser: Browser, address: str, runs: dict[str, str], folder: Path
) -> None:
    """Counted from the files: tasks with a reward of the eval.success threshold or more after, and less before."""
    here = folder / "single" / "eval"
    before, after = (pq.read_table(here / f"main-step-{step:06d}.parquet").to_pylist() for step in (0, 3))
    right = [{row["uid"]: row["reward"] >= 1.0 for row in rows} for rows in (before, after)]
    mended = sum(right[1][uid] and not right[0][uid] for uid in right[0])
    browser.go(f"{address}#/run/{runs['single']}/evals?from=0&to=3")
    told = browser.evaluate(
        "[...document.querySelectorAll('[data-flips]')].map(one => [one.dataset.flips, one.dataset.count])"
    )
    assert dict(told)["mended"] == str(mended)


def test_a_count_of_the_ledger_opens_its_rollouts(
    browser: Browser, address: str, runs: dict[str, str]
) -> None:
    browser.go(f"{address}#/run/{runs['hostile']}/ledger")
    linked = "document.querySelector('[data-total=\"without a reward\"] a')"
    assert browser.evaluate(f"{linked}.textContent") == "2"
    browser.evaluate(f"{linked}.click()")
    browser.wait("document.body.dataset.page === 'rollouts' && document.body.dataset.ready")
    assert browser.evaluate("document.body.dataset.shown") == "2"

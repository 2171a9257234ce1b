"""The studio's page in a real browser: what a user does with the form, the text, files and runs.

`make test-view` runs these tests and those of the viewer, and leaves a picture of each page in build/view/.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find
from whet.config.parse import parse
from whet.config.tree import leaves
from whet.studio.answers import Studio
from whet.studio.jobs import Jobs
from whet.studio.server import StudioServer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine; `apt-get install chromium`"),
]

ROOT = Path(__file__).parent.parent
PICTURES = os.environ.get("VIEW_PICTURES")
HOSTILE = "<img src=x onerror='window.hacked = 1'>"


@pytest.fixture
def browser() -> Iterator[Browser]:
    """One for each test: a page with changes asks before it is left, and a browser that ends is not asked."""
    with Browser(1500, 950) as found:
        yield found


@contextmanager
def shown(browser: Browser, file: Path | None, root: Path) -> Iterator[StudioServer]:
    """The page of a studio in a folder; at the end it has had no problem and asked nobody else."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with Jobs(root) as jobs:
        server = StudioServer(Studio.of(file, jobs, root=root))
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        browser.problems.clear()
        browser.asked.clear()
        browser.go(server.url)
        browser.wait("document.body.dataset.problems !== undefined")
        try:
            yield server
            assert browser.problems == []
            assert all(url.startswith(f"http://127.0.0.1:{server.port}/") for url in browser.asked)
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def picture(browser: Browser, name: str) -> None:
    if PICTURES:
        browser.screenshot(Path(PICTURES, f"studio-{name}.png"))


def text(browser: Browser) -> str:
    return browser.evaluate("document.getElementById('yaml')?.value ?? ''")


def click(browser: Browser, selector: str) -> None:
    browser.wait(f"!!document.querySelector({json.dumps(selector)})")
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def control(path: list[Any]) -> str:
    """JavaScript for the control of a key."""
    shown_path = json.dumps(json.dumps(path, separators=(",", ":")))
    return f"[...document.querySelectorAll('[data-path]')].find((one) => one.dataset.path === {shown_path})"


def enter(browser: Browser, path: list[Any], value: str) -> None:
    """Type a value into a field and leave it."""
    browser.wait(f"!!{control(path)}")
    browser.evaluate(f"{control(path)}.focus(); {control(path)}.select(); undefined")
    browser.ask("Input.insertText", text=value)
    browser.press("Enter")


def choose(browser: Browser, selector: str, value: str, event: str) -> None:
    """Give an element another value, as typing or choosing does."""
    browser.evaluate(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
        f" e.dispatchEvent(new Event('{event}')); }})()"
    )


def write(browser: Browser, value: str) -> None:
    """Put another text into the editor."""
    choose(browser, "#yaml", value, "input")


def test_a_field_changes_its_key_and_nothing_else(browser: Browser, tmp_path: Path) -> None:
    source = (ROOT / "examples/first_run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(source)
    with shown(browser, tmp_path / "run.yaml", tmp_path):
        assert text(browser) == source
        picture(browser, "form")
        enter(browser, ["seed"], "7")
        browser.wait("document.getElementById('yaml').value.includes('seed: 7')")
        assert text(browser) == source.replace("seed: 0", "seed: 7")
        browser.wait("document.getElementById('state').textContent === 'not saved'")
        click(browser, "#undo")
        browser.wait(f"document.getElementById('yaml').value === {json.dumps(source)}")
        browser.wait(f"{control(['seed'])}.value === '0'")
        enter(browser, ["seed"], "many")
        browser.wait("document.body.dataset.problems === '1'")
        assert "expected a whole number" in browser.evaluate(
            "document.querySelector('[data-problem=seed]').textContent"
        )
        picture(browser, "wrong")
        enter(browser, ["seed"], "3")
        browser.wait("document.body.dataset.problems === '0'")
        click(browser, "#save")
        browser.wait("document.getElementById('state').textContent === 'saved'")
    assert (tmp_path / "run.yaml").read_text() == source.replace("seed: 0", "seed: 3")


def test_text_that_was_typed_is_not_lost_without_a_question(browser: Browser, tmp_path: Path) -> None:
    """By a page that is closed; one whose text is that of the file closes, also where its lines end as on Windows."""
    (tmp_path / "run.yaml").write_bytes(b"name: run\r\nseed: 0\r\n")
    asks = "!dispatchEvent(new Event('beforeunload', {cancelable: true}))"
    with shown(browser, tmp_path / "run.yaml", tmp_path):
        assert browser.evaluate("document.getElementById('state').textContent") == "saved"
        assert not browser.evaluate(asks)
        write(browser, "name: run\nseed: 1\n")
        browser.wait("document.getElementById('state').textContent === 'not saved'")
        assert browser.evaluate(asks)
        click(browser, "#save")
        browser.wait("document.getElementById('state').textContent === 'saved'")
        assert not browser.evaluate(asks)


def test_the_form_follows_the_text(browser: Browser, tmp_path: Path) -> None:
    with shown(browser, None, tmp_path):
        assert browser.evaluate("document.querySelectorAll('[data-told]').length") > 0, (
            "an empty config is told what it lacks"
        )
        write(browser, "name: typed\nseed: 5\ntrain: {stepz: 1}\n")
        browser.wait(f"{control(['name'])}?.value === 'typed'")
        browser.wait("!!document.querySelector('[data-told=\"train.stepz\"]')")
        write(browser, "name: [broken\n")
        browser.wait("document.querySelector('[data-told=\"\"]')?.textContent.includes('not valid YAML')")
        assert browser.evaluate(f"{control(['name'])}.value") == "typed", "the form stays as it was"
        picture(browser, "broken")
        write(
            browser,
            "name: H\nrewards: {H: {weight: 1}}\nstages: [{name: H}]\n".replace("H", json.dumps(HOSTILE)),
        )
        browser.wait(f"{control(['name'])}?.value === {json.dumps(HOSTILE)}")
        click(browser, "[data-section=rewards]")
        assert browser.evaluate("window.hacked") is None
        assert browser.evaluate("document.querySelectorAll('img').length") == 0


def test_search_levels_and_what_has_no_effect(browser: Browser) -> None:
    with shown(browser, ROOT / "examples/first_run.yaml", ROOT):
        fields = "document.querySelectorAll('[data-field]').length"
        click(browser, "[data-section='*']")
        basic = browser.evaluate(fields)
        click(browser, "[data-choice=expert]")
        everything = browser.evaluate(fields)
        assert everything > 3 * basic
        assert browser.evaluate("document.querySelectorAll('[data-unread]').length") > 20
        choose(browser, "#search", "chat template", "input")
        assert 0 < browser.evaluate(fields) < 20
        assert browser.evaluate(f"!!{control(['tokenizer', 'chat_template'])}")
        picture(browser, "search")
        choose(browser, "#search", "", "input")
        click(browser, ".form-side input[type=checkbox]")
        assert browser.evaluate(
            "[...document.querySelectorAll('[data-field]')].every((one) => one.dataset.given === 'true')"
        )
        click(browser, ".form-side input[type=checkbox]")
        click(browser, "[data-section=critic]")
        assert "has no critic" in browser.evaluate("document.querySelector('.why').textContent")
        picture(browser, "unread")
        click(browser, "[data-field='critic.path'] .name")
        browser.wait("document.getElementById('explaining').open")
        assert (
            "initial weights" in browser.evaluate("document.getElementById('explaining').textContent").lower()
        )
        picture(browser, "explain")


def test_a_stage_is_edited_as_sections(browser: Browser, tmp_path: Path) -> None:
    source = (ROOT / "examples/first_run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(source)
    with shown(browser, tmp_path / "run.yaml", tmp_path):
        choose(browser, "#sections select", "1", "change")
        click(browser, "[data-section=train]")
        enter(browser, ["stages", 1, "train", "tasks_per_step"], "32")
        browser.wait("document.getElementById('yaml').value.includes('tasks_per_step: 32')")
        assert text(browser) == source.replace("tasks_per_step: 16", "tasks_per_step: 32")
        click(browser, "[data-section=rollout]")
        said = "document.querySelector('[data-field=\"stages[1].rollout.sampling.temperature\"] .origin').textContent"
        assert browser.evaluate(said) == "1 from line 30, for all stages"
        click(browser, "[data-section=algorithm]")
        click(browser, "[data-choice=expert]")
        enter(browser, ["stages", 1, "algorithm", "loss"], "gspo")
        browser.wait("document.getElementById('yaml').value.includes('loss: gspo')")
        enter(browser, ["stages", 1, "algorithm", "loss", "clip_low"], "3e-4")
        browser.wait("document.getElementById('yaml').value.includes('clip_low: 0.0003')")
        assert parse(text(browser)).tree["stages"][1]["algorithm"]["loss"] == {
            "name": "gspo",
            "clip_low": 3e-4,
        }
        picture(browser, "stage")
        browser.wait("document.body.dataset.problems === '1'")  # one optimizer step on a batch clips nothing
        click(browser, "[data-section=train]")
        enter(browser, ["stages", 1, "train", "minibatches"], "2")
        browser.wait("document.body.dataset.problems === '0'")
        click(browser, "[data-pane=Plan]")
        browser.wait("!!document.querySelector('[data-phase]')")
        assert "loss gspo" in browser.evaluate("document.querySelector('[data-fact=algorithm]').textContent")
        picture(browser, "plan")


@pytest.mark.parametrize(
    "file",
    [
        "examples/first_run.yaml",
        "examples/tools/look_up.yaml",
        "examples/gsm8k.yaml",
        "tests/dialects/verl_letters.native.yaml",
    ],
)
def test_every_given_value_has_a_control_that_shows_it(file: str, browser: Browser) -> None:
    """The page's own round trip: each control, written again as it is, would write the value that is there."""
    with shown(browser, ROOT / file, ROOT):
        click(browser, "[data-choice=expert]")
        click(browser, "[data-section='*']")
        controls = "[...document.querySelectorAll('[data-path]')]"
        read = f"{controls}.map((one) => [one.dataset.path, one.dataset.kind, one.value])"
        tree = parse(text(browser)).tree
        values: dict[tuple[Any, ...], Any] = {}
        scopes = [None, *range(len(tree.get("stages", [])))]
        for scope in scopes:
            if len(scopes) > 1:
                choose(browser, "#sections select", "" if scope is None else str(scope), "change")
            for path, kind, raw in browser.evaluate(read):
                if raw != "":
                    values[tuple(json.loads(path))] = (
                        raw if kind == "text" else json.loads(raw) if kind == "choice" else parse(raw).tree
                    )
        given = dict(leaves(tree))
        for path, value in given.items():
            above = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in values), None)
            assert above is not None, path
            inside = values[above]
            for part in path[len(above) :]:
                inside = inside[part]
            assert inside == value, path  # 1.0 is 1 to a browser
            assert isinstance(inside, bool) == isinstance(value, bool), path
        assert text(browser) == (ROOT / file).read_text()


def test_a_file_of_another_system_is_imported_with_its_report(browser: Browser, tmp_path: Path) -> None:
    for name in ("from_verl.yaml", "from_skyrl.yaml", "from_cosmos.toml", "from_trinity.yaml"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    with shown(browser, None, tmp_path):
        for name in ("from_verl.yaml", "from_skyrl.yaml", "from_cosmos.toml", "from_trinity.yaml"):
            click(browser, "#open")
            browser.evaluate(f"document.getElementById('open-path').value = '{name}'")
            click(browser, "#open-it")
            browser.wait("!document.getElementById('opening').open || document.getElementById('asking').open")
            if browser.evaluate("document.getElementById('asking').open"):
                click(browser, "[data-agree=yes]")
            browser.wait(f"document.getElementById('file').textContent === '{Path(name).stem}.native.yaml'")
            browser.wait(
                "document.querySelectorAll('[data-status=mapped], [data-status=translated]').length > 3"
            )
            if name == "from_verl.yaml":
                picture(browser, "report")
            click(browser, "[data-pane=YAML]")
            assert "Written by `whet convert`" in text(browser)
        click(browser, "#open")
        browser.evaluate("document.getElementById('open-path').value = '../outside.yaml'")
        click(browser, "#open-it")
        browser.wait("document.querySelector('#opening .error')?.textContent.includes('is outside of')")
        picture(browser, "open")
        browser.evaluate("document.getElementById('opening').close()")
        browser.problems[:] = [one for one in browser.problems if "422" not in one]


def test_a_run_is_started_from_the_page(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: x\ntrain: {stepz: 1}\n")
    with shown(browser, tmp_path / "run.yaml", tmp_path):
        click(browser, "[data-command=rehearse]")
        browser.wait("!!document.querySelector('[data-job=\"2\"]')")
        assert "unknown key" in browser.evaluate("document.querySelector('[data-log]').textContent")
        picture(browser, "log")
        browser.wait("document.getElementById('stop').hidden")

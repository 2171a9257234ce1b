"""Documentation that can be checked: the generated page is the committed one, and links lead somewhere."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import whet
from whet import reference
from whet.config.docs import markdown
from whet.config.explain import explain
from whet.config.keys import dotted, keys
from whet.config.schema import Config
from whet.types import ConfigError

ROOT = Path(__file__).parent.parent
WRITTEN = ROOT / "report.md"
"""What an example in the help of a command writes; no page."""
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {WRITTEN})
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {"".join(c for c in h.lower().replace(" ", "-") if c.isalnum() or c in "-_") for h in heads}


def test_the_committed_config_page_is_the_generated_one():
    page = ROOT / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run: python -m whet.config.docs > docs/config.md"


def test_every_key_of_the_schema_stands_on_the_page_with_its_default():
    text = markdown()
    for key in keys().values():
        name = key.path[-1]
        if name != "*":
            assert f"| `{name}` |" in text, dotted(key.path)
    assert "| `temperature` | a number >= 0 | `1.0` |" in text
    assert "| `make` | text | required |" in text


NO_KEYS = {
    "algorithm.sppo_eta": "of verl's recipe",
    "algorithm.loss.tilt=0.5": "a setting of the example's own function",
    "rollout.engine=trtllm": "an engine that is refused",
    "train.engine_arguments.step_s": "an argument of train.engine=simulated",
    "train.router": "decision 042: what was not taken",
    "rollout.envs": "decision 055: what was not taken",
    "train.deepspeed": "decision 047: what it was before",
}
"""What pages name that looks like a key, and why it is none."""
FILES = (".c", ".h", ".json", ".jsonl", ".md", ".parquet", ".py", ".toml", ".tsv", ".yaml")


def keys_of(page: Path) -> set[str]:
    """What a page names in its text that begins as a native key does; `a.b=c` with its value."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = {word.strip("'") for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split()}
    found = {word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_0-9<>\[\]]+)+(=[\w.]{2,})?", word)}
    return {word for word in found if word.split(".")[0] in Config.model_fields and not word.endswith(FILES)}


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if not p.name.startswith(("from_", "CHANGELOG", "ARCHITECTURE", "config.md"))],
    ids=lambda p: p.name,
)
def test_keys_and_values_that_a_page_names_are_there(page):
    """Pages of other systems name their keys; ARCHITECTURE.md names modules, the changelog what has gone. config.md and
    the pages of other systems are made from the tables."""
    assert [word for word in sorted(keys_of(page) - NO_KEYS.keys()) if not explained(word)] == []


def explained(word: str) -> bool:
    try:
        return bool(explain(word).key)
    except ConfigError:
        return False


def test_each_word_that_is_no_key_is_on_a_page():
    assert set().union(*map(keys_of, PAGES)) >= NO_KEYS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for groups in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        target, _, anchor = (groups[0] or groups[1]).partition("#")
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), (
                f"{page.name} links to {target}#{anchor}"
            )


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_committed_reference_is_the_generated_one(name: str):
    page = ROOT / "docs" / name
    assert page.read_text(encoding="utf-8") == reference.PAGES[name](), "run: make docs"


def test_the_reference_has_every_command_and_every_public_name():
    commands = reference.cli_page()
    assert "## whet train\n" in commands
    assert "## whet data gsm8k\n" in commands
    assert (
        "| `--tokens` | List every token with its log-prob by the engine, before and after sampling filters. |"
        in commands
    )
    names = reference.python_page()
    assert set(whet.__all__) <= set(reference.PUBLIC["whet"])
    assert [name for name in whet.__all__ if f"\n### {name}\n" not in names] == []
    assert "| `stop` | `tuple[str, ...]` | Stop strings: sampling ends once" in names


def test_text_after_the_example_of_a_docstring_is_text():
    text = re.sub(r"```.*?```", "", reference.python_page(), flags=re.DOTALL)
    assert "Arrays are all of the length of `token_ids`" in text


def test_every_item_under_a_function_is_one_of_its_parameters():
    """A line of prose that begins with `word:` reads as one."""
    for part in reference.python_page().split("\n### ")[1:]:
        if part.startswith(tuple(f"{name}\n" for name in ("train", "evaluate", "generate", "load_run"))):
            parameters = inspect.signature(getattr(whet, part.partition("\n")[0])).parameters
            items = re.findall(r"^- (.+?): ", part, flags=re.MULTILINE)
            named = {name for item in items for name in re.findall(r"`(\w+)`", item)}
            assert named <= set(parameters), part


METRIC_GROUPS = "reward|rollout|group|ledger|train|correction|critic|eval|sync|time|speed|memory|env|track"
STATISTICS = ("algos/*.py", "training/*.py", "models/router.py", "eval*.py")
"""Where numbers of updates and evaluations are made, without the group that is written before them elsewhere."""
NO_METRICS = {
    "time/save_s": "checkpoints and exports are outside the time of a step",
    "time/export_s": "the same",
    "*/gpu_peak_mb": "of a rank: its row begins with memory/rank",
}
"""What the scan takes for a metric that no line has."""


def quoted(code: str) -> set[str]:
    """The strings of the code; `*` for what an f-string fills in."""
    return {re.sub(r"\{[^{}]*\}", "*", text) for text in re.findall(r'"([^"\s][^"\n]*)"', code)}


def metrics_of(source: Path) -> set[str]:
    """Names of metrics in the source: strings `group/what`, statistics as `*/what`, and phases as `time/PHASE_s`."""
    code = {path: path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    name = re.compile(rf"({METRIC_GROUPS})/[\w*/@]*[a-z0-9*]")
    found = {text for each in code.values() for text in quoted(each) if name.fullmatch(text)}
    for path in (path for pattern in STATISTICS for path in source.glob(pattern)):
        part = re.sub(r"\{\w+\}", "*", code[path])
        for flat in re.findall(
            r"(?:(?:stats|out|scaled|stepped) .?= |return [\w, |]*|Loss\(.*)\{([^{}]*)\}", part
        ):
            found |= {f"*/{key}" for key in re.findall(r'"([a-z][\w@*]+)":', flat)}
        found |= {f"*/{key}" for key in re.findall(r'(?:stats|out)\[f?"([a-z][\w@*]+)"\] = ', part)}
    phases = re.findall(r'(?:monitor\.|self\._)phase\("(\w+)"\)', "".join(code.values()))
    return found | {f"time/{phase}_s" for phase in phases}


def metric_rows(page: str) -> set[str]:
    """Names in the first column; `*` for words in capitals."""
    cells = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    return {re.sub(r"[A-Z]+", "*", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def matches(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "(.*?)"), name)


def metrics_without_row(names: set[str], rows: set[str]) -> list[str]:
    return sorted(name for name in names if not any(matches(name, row) for row in rows))


def rows_without_metric(rows: set[str], names: set[str], words: set[str]) -> list[str]:
    """Those that the source does not write. What stands where a name is filled in must be a word of the source."""

    def written(row: str) -> bool:
        found = (matches(name, each) for name in names for each in (row, re.sub("_(mean|count)$", "", row)))
        fills = [
            [part for filled in match.groups() for part in filled.split("/")] for match in found if match
        ]
        return any(all(part in words or not part.strip("*_") for part in parts) for parts in fills)

    return sorted(row for row in rows if not written(row))


def test_every_metric_has_a_row_and_every_row_a_metric():
    source, rows = ROOT / "src/whet", metric_rows((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    names = metrics_of(source)
    assert metrics_without_row(names - NO_METRICS.keys(), rows) == []
    code = [path.read_text(encoding="utf-8") for path in source.rglob("*.py")]
    words = {word for each in code for text in quoted(each) for word in text.split("/")}
    assert rows_without_metric(rows, names, words) == []
    assert names >= NO_METRICS.keys()


def test_the_check_of_metrics_can_fail(tmp_path):
    (tmp_path / "algos").mkdir()
    code = 'stats = {"gate": x}\nout[f"reward/part/{name}"] = monitor.phase("read")\n'
    (tmp_path / "algos/a.py").write_text(code)
    names = metrics_of(tmp_path)
    assert names == {"*/gate", "reward/part/*", "time/read_s"}
    rows = metric_rows("| `train/gate` | |\n| `reward/part/NAME_mean`, `time/read_s` | |\n")
    assert metrics_without_row(names, rows) == rows_without_metric(rows, names, {"train"}) == []
    assert metrics_without_row(names, rows - {"train/gate"}) == ["*/gate"]
    assert rows_without_metric({*rows, "reward/gone"}, names, {"train"}) == ["reward/gone"]


def metrics_named(page: str) -> set[str]:
    """Names of metrics and of an environment's parts in the text of a page; `*` for words in capitals."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = {word.strip("'") for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split()}
    name = re.compile(rf"({METRIC_GROUPS})/[\w/@*]*(\w|\.\.\.)")
    return {re.sub("[A-Z]+", "*", word) for word in words if name.fullmatch(word)}


def unknown_metrics(names: set[str], rows: set[str]) -> list[str]:
    """Those without a row. `group/...` stands for several; `env/calls` is a part, whose mean is a metric."""

    def known(name: str) -> bool:
        if name.endswith("..."):
            return any(row.startswith(name[:-3]) for row in rows)
        part = [f"reward/part/{name}_mean"] if name.startswith("env/") else []
        return any(matches(row, each) for row in rows for each in [name, *part])

    return sorted(name for name in names if not known(name))


def test_metrics_that_a_page_names_are_there():
    """metrics.md also names those of other systems, and the changelog what has gone."""
    rows = metric_rows((ROOT / "docs/metrics.md").read_text(encoding="utf-8"))
    pages = [page for page in PAGES if page.name not in ("CHANGELOG.md", "metrics.md")]
    found = {page.name: metrics_named(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: wrong for name in found if (wrong := unknown_metrics(found[name], rows))} == {
        "algorithms.md": ["train/far_frac"],  # of the example's own loss
    }


def test_the_check_of_named_metrics_can_fail():
    named = metrics_named(
        "`reward/part/right/NAME` `env/calls` `env/gone_s` `reward/...` `rollout/engine.py`"
    )
    assert named == {"reward/part/right/*", "env/calls", "env/gone_s", "reward/..."}
    rows = {"reward/part/*_mean", "time/step_s"}
    assert unknown_metrics(named, rows) == ["reward/part/right/*"]
    assert unknown_metrics(named, {"time/step_s"}) == sorted(named)


class Nav(yaml.SafeLoader):
    """mkdocs.yml without the Python names in it."""


Nav.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def in_nav(entry: Any) -> list[str]:
    """The files of a navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [file for each in inner for file in in_nav(each)]


def test_every_page_is_in_the_navigation_of_the_site():
    named = in_nav(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Nav)["nav"])
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


class Loads(HTMLParser):
    """What a browser would load or ask for while it shows a page: not links that a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "a" and given.get("rel") != "canonical":
            self.found += [given[name] or "" for name in ("src", "href") if name in given]


def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path):
    pytest.importorskip("material", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert [url for url in loads.found if re.match(r"(https?:)?//", url)] == [], page.name


def test_the_page_on_installing_has_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8").partition("| extra | for |")[2]
    named = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    extras = [name for cell in named for name in re.findall(r"`([\w-]+)`", cell)]
    assert sorted(extras) == sorted(project["optional-dependencies"])


def test_the_page_of_benchmarks_has_every_program():
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    named = re.findall(r"`(\w+\.py)`", "".join(re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)))
    assert sorted(named) == sorted(path.name for path in folder.glob("*.py"))


def test_what_cites_whet_names_its_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(cited["version"]), cited["license"]) == (project["version"], project["license"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_forms_have_what_a_form_needs(path: Path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 1
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


def test_the_link_check_can_fail(tmp_path):
    assert anchors("# A `b.c[]` d\n```\n# no\n```\n") == {"a-bc-d"}
    assert LINK.findall("[a](b.md#c) ![p](d.png)") == [("b.md#c", ""), ("", "d.png")]

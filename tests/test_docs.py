"""Documentation that can be checked: the generated page is the committed one, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whet.config.docs import markdown
from whet.config.keys import dotted, keys

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
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
    assert "| `task` | text | required |" in text


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


def test_the_link_check_can_fail(tmp_path):
    assert anchors("# A `b.c[]` d\n```\n# no\n```\n") == {"a-bc-d"}
    assert LINK.findall("[a](b.md#c) ![p](d.png)") == [("b.md#c", ""), ("", "d.png")]

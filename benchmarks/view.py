"""How fast `whet view` shows many rollouts: in a headless Chromium, over run directories that are made for it.

    PYTHONPATH=tests .venv/bin/python benchmarks/view.py          10^4 and 10^5 rollouts, 400 tokens each

Prints a line of the table in docs/viewer.md for each size: seconds from the address to a page that is whole, the first
time after the server has started (files are read) and again; to the last row of the list; to the rows of a text search;
to one rollout with its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from browser import Browser
from test_view_pages import large_run, served

COLUMNS = ("rollouts", "files", "first open", "again", "last row", "text search", "one rollout")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(browser: Browser, folder: Path, *, steps: int, rows: int, tokens: int) -> list[float]:
    """Seconds of the columns after `files`."""
    large_run(folder, steps=steps, rows=rows, tokens=tokens)
    last = steps * rows - 1
    with served(folder) as url:
        page = f"{url}#/run/0/rollouts"
        first = seconds(lambda: browser.go(page))
        again = statistics.median(seconds(lambda: browser.go(page)) for _ in range(3))

        def to_last() -> None:
            browser.press("G")
            browser.wait(f"!!document.querySelector('.row[data-place=\"{last}\"]')")

        end = seconds(to_last)
        wanted = json.dumps(f"reply {rows - 1}")
        search = (
            "(() => { const box = document.querySelector('[data-filter=q]'); "
            f"box.value = {wanted}; box.dispatchEvent(new Event('input')); }})()"
        )

        def to_hits() -> None:
            browser.evaluate(search)
            browser.wait(f"document.body.dataset.shown === '{steps}'")

        found = seconds(to_hits)
        one = seconds(lambda: browser.go(f"{url}#/run/0/rollout/rl/{steps}/{rows - 1}?view=tokens"))
    return [first, again, end, found, one]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a rollout")
    parser.add_argument("--files", type=int, nargs="*", default=[40, 400], help="files of 256 rollouts each")
    args = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        for files in args.files:
            found = measured(browser, Path(folder, str(files)), steps=files, rows=256, tokens=args.tokens)
            print(
                f"| {files * 256:,} | {files} | " + " | ".join(f"{s:.2f} s" for s in found) + " |", flush=True
            )


if __name__ == "__main__":
    main()

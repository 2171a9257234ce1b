"""Forked processes have loaded what their server is told to load: what it does not find, it leaves out silently."""

from __future__ import annotations

from forked import LOADED, ran


def test_all_that_the_server_is_told_to_load_is_there() -> None:
    done = ran("import sys; print(*sys.modules)")
    assert set(LOADED) - set(done.stdout.split()) == set()

"""An interpreter for clusters of tests: workers of Ray, and what those start at the other end of a line, are forked
from a process that has torch and whet already. Everything else of Ray begins as it always does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from programs import programs

WORKER = """
import runpy, sys
import forked
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.utils import update_envs
from ray._private.workers.setup_worker import parser

forked.fork_lines()
first = next(n for n, word in enumerate(sys.argv) if word.endswith("default_worker.py"))
told, sys.argv = parser.parse_known_args(sys.argv[first:])
update_envs(RuntimeEnvContext.deserialize(told.serialized_runtime_env_context or "{}").env_vars)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Ray itself starts an interpreter that reads the environment of the worker and then becomes another one."""
PYTHON = """#!/bin/sh
case "$*" in *default_worker.py*) exec "{folder}/worker" "$@" ;; esac
exec "{python}" "$@"
"""


@contextmanager
def interpreter(folder: Path) -> Iterator[Path]:
    """The path of the interpreter, while the block runs. Clusters that runs start for themselves have another one."""
    with programs(folder, worker=WORKER):
        path = folder / "python"
        path.write_text(PYTHON.format(folder=folder, python=sys.executable))
        path.chmod(0o755)
        yield path

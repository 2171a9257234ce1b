"""The beginning of a process that `guard.line` has started: `python -m whet.guard.begin MODULE ARGUMENTS`."""

from __future__ import annotations

import sys
from importlib import import_module

from whet.environment import importing
from whet.guard.line import picked_up


def main() -> None:
    """Serve at this end of the line, as the module does."""
    module, *told = sys.argv[1:]
    connection = picked_up(told)  # first: an import that takes long or hangs is asked where it stands
    with importing():
        serve = import_module(module).serve
    serve(connection)


if __name__ == "__main__":
    main()

"""`whet` and `python -m whet`: the command line.

Ctrl-C ends the process at once while the command is imported: there is nothing to leave in order yet, and Python would
print a traceback of the imports.
"""

import signal


def main() -> None:
    """Entry point of the script `whet`."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # ignored (nohup): stay so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from whet.cli import main as command
    from whet.guard import leftover

    signal.signal(signal.SIGINT, handler)
    status = 1
    try:
        command()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        raise
    finally:
        leftover.bound(status)  # of this process, which is nobody else's


if __name__ == "__main__":
    main()

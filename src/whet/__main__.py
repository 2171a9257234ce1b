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

    signal.signal(signal.SIGINT, handler)
    command()


if __name__ == "__main__":
    main()

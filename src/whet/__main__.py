"""`whet` and `python -m whet`: the command line.

Ctrl-C ends the process at once while the command is imported, and when it is done: there is nothing to leave in order
yet, or any more, and Python would print a traceback. While a command runs, SIGTERM is answered as Ctrl-C is, so what
schedulers and service managers end leaves no temporary folders; `whet train` answers both itself.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working directory first; `whet` has it last (`tables.find`), so a file of the user's there,
    # such as random.py, does not take the place of a module of Python's
    sys.path.append(sys.path.pop(0))

import signal


def main() -> None:
    """Entry point of the script `whet`."""
    try:
        _main()
    except KeyboardInterrupt:  # before or after what looks after it itself
        sys.exit(130)
    finally:
        # Python remembers that a text it executed (a dataclass is one) was interrupted, and would end by SIGINT in
        # place of 130. The next text that is executed clears this.
        exec("")


def _main() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # ignored (nohup): stay so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from whet.cli import main as command
    from whet.guard import leftover, temporary

    signal.signal(signal.SIGINT, handler)
    hears = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if hears:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = 130
    try:
        command()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        raise
    except Exception as error:
        if type(error).__name__ == "SchemaError" and "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None  # pydantic was building a schema, and makes an error of its own of it
        status = 1
        raise
    finally:
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if hears:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        temporary.sweep_all()
        leftover.bound(status)  # of this process, which is nobody else's


if __name__ == "__main__":
    main()

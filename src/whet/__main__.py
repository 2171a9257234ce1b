"""`python -m whet`: the command line."""

from whet.cli import main

if __name__ == "__main__":
    main()

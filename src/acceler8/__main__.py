"""``python -m acceler8``: the command line."""

from acceler8.cli import main

if __name__ == "__main__":
    main()

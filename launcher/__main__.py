"""`python -m penstock.launcher` is the `penstock` command, and so is the script of that name."""

import sys


def main() -> int:
    """Runs the command. Returns the exit code."""
    try:
        from . import cli  # here, since Ctrl-C may come while it is read

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

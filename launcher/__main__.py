"""Runs the `penstock` command, as `python -m penstock`, `python -m penstock.launcher` or by the script of that name."""

import sys


def main() -> int:
    """Runs the command. Returns the exit code."""
    try:
        from . import cli  # imported here, since Ctrl-C may come meanwhile

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

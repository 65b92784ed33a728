"""Runs `penstock simulate`, as `python -m penstock.simulator`."""

import io
import sys


def main() -> int:
    """Runs the command. Returns the exit code."""
    try:
        from . import command  # imported here, since Ctrl-C may come meanwhile

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may have characters that its encoding lacks
        return command.run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

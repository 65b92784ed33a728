"""Repairs the three standard streams, which whoever started this process may have closed, or given an encoding that lacks most
characters."""

import io
import os
import sys


def repair() -> None:
    """To be called first of all: what is opened before would get a closed stream's number, and output meant for the stream."""
    _open_closed()
    # A name or an answer may have characters that the locale's encoding lacks: shown as \u20ac, instead of ending the process.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_closed() -> None:
    """Opens closed streams (`penstock serve >&-`, a cron job) to nowhere. Python has None in their place."""
    for number in range(3):  # in this order: each open takes the lowest free number
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as the process lives
